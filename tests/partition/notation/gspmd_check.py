"""Has XLA place and multiply a step's tensors on four CPU devices by annotations: names as arguments."""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax._src.lib import xla_client
from jax._src.sharding_impls import GSPMDSharding

from quartet_plugin.partition.named import named_partition
from quartet_plugin.partition.notation.gspmd import to_gspmd
from quartet_plugin.partition.table import Partition, Tensor
from quartet_plugin.partition.tiles import home_tiles
from tests.partition.lockstep import run_lockstep
from tests.partition.notation.test_notation import stacked
from tests.partition.test_lockstep import factors, sizes_for

# Annotations are read by GSPMD; its successor has a notation of its own.
jax.config.update("jax_use_shardy_partitioner", False)


def sharding_of(partition: Partition, tensor: Tensor) -> GSPMDSharding:
    text = to_gspmd(home_tiles(partition, tensor))
    return GSPMDSharding(tuple(jax.devices()), xla_client.HloSharding.from_string(text))


def check(partition: Partition) -> None:
    """Each device of XLA holds what the table's device holds, before and after the product."""
    input_, weight, grad = factors(sizes_for(partition), np.float32)
    held = run_lockstep(partition, input_, weight, grad).held
    placed = {
        tensor: jax.device_put(values, sharding_of(partition, tensor))
        for tensor, values in ((Tensor.INPUT, input_), (Tensor.WEIGHT, weight))
    }
    product = jax.jit(lambda left, right: left @ right, out_shardings=sharding_of(partition, Tensor.OUTPUT))
    output = product(placed[Tensor.INPUT], placed[Tensor.WEIGHT])
    compared = {Tensor.WEIGHT: placed[Tensor.WEIGHT], Tensor.OUTPUT: output}
    if Tensor.INPUT not in partition.carried:
        compared[Tensor.INPUT] = placed[Tensor.INPUT]
    for tensor, array in compared.items():
        for shard in array.addressable_shards:
            expected = stacked(held[tensor][shard.device.id])
            difference = np.abs(np.asarray(shard.data) - expected).max()
            assert difference <= 1e-5 * np.abs(expected).max(), (partition.name, tensor, shard.device)


for name in sys.argv[1:]:
    check(named_partition(name))
    print(name)
