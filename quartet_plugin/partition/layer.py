"""The four linears of a transformer layer, and how tensor parallelism may cut them together."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Literal

from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.tensor_partition import BlockPartition, TensorPartition
from quartet_plugin.partition.named import named_partition
from quartet_plugin.partition.table import Partition, Triple
from quartet_plugin.partition.traffic import check_divides

# The first linear of a block takes the layer's input ("in"), the second one gives its output ("out").
Role = Literal["in", "out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One linear of a layer: O [M, K] = I [M, N] W [N, K] with M tokens of a microbatch."""

    name: str
    role: Role
    sizes: Triple


# The block of a layer that each linear belongs to.
BLOCK_OF: dict[str, Literal["attention", "mlp"]] = {
    "qkv": "attention",
    "proj": "attention",
    "fc1": "mlp",
    "fc2": "mlp",
}


def linears_of(shape: ModelShape, *, tokens: int) -> tuple[Linear, ...]:
    """The linears of one layer for the tokens of a microbatch; a gated layer's fc1 has both halves."""
    key_value = 2 * shape.num_query_groups * shape.kv_channels
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    return (
        Linear(name="qkv", role="in", sizes=(tokens, hidden, shape.attention_size + key_value)),
        Linear(name="proj", role="out", sizes=(tokens, shape.attention_size, hidden)),
        Linear(name="fc1", role="in", sizes=(tokens, hidden, ffn * (2 if shape.gated_ffn else 1))),
        Linear(name="fc2", role="out", sizes=(tokens, ffn, hidden)),
    )


def _side(devices: int, power: int) -> str:
    side = isqrt(devices) if power == 2 else round(devices ** (1 / 3))
    if side**power != devices:
        kind = "square" if power == 2 else "cube"
        raise PlanError(f"tensor_parallel {devices}: must be a {kind} for this form of partition")
    return "x".join([str(side)] * power)


_FORMS: dict[str, Callable[[int, Role], str]] = {
    "stock": lambda devices, role: f"{'column' if role == 'in' else 'row'}{devices}",
    "stock-replicated": lambda devices, role: f"{'column' if role == 'in' else 'row'}{devices}-replicated",
    "rings": lambda devices, role: f"ring-{'column' if role == 'in' else 'row'}{devices}",
    "grid": lambda devices, role: f"home{_side(devices, 2)}-{role}",
    "primepar": lambda devices, _: f"P{_side(devices, 2)}",
    "2d": lambda devices, _: f"2D{_side(devices, 2)}",
    "3d": lambda devices, _: f"3D{_side(devices, 3)}",
}
LAYER_FORMS = tuple(_FORMS)


def partition_of(form: str, linear: Linear, devices: int) -> Partition:
    """The partition of one linear in a form. Raises PlanError for a number of devices that the form lacks."""
    return named_partition(_FORMS[form](devices, linear.role))


def planned_partition(block: BlockPartition, linear: Linear, devices: int) -> Partition:
    """The partition that a plan's form of a block means for one of its linears: what runs and what is priced.

    A grid keeps results at home. An outer dimension is cut as the framework cuts it: K of a block's first
    linear, N of its second. Raises ConfigError for a number of devices that the form lacks.
    """
    return _planned(block, linear.role, devices)


@lru_cache(maxsize=1024)
def _planned(block: BlockPartition, role: Role, devices: int) -> Partition:
    if block.form != "grid":
        return named_partition(_FORMS[block.form](devices, role))
    side = block.side(devices)
    outer = "" if block.outer is None else f"{'K' if role == 'in' else 'N'}{block.outer}-"
    return named_partition(f"{outer}home{side}x{side}-{role}")


def planned_layer(
    partition: TensorPartition, linears: tuple[Linear, ...], devices: int
) -> tuple[Partition, ...]:
    """The partitions of a layer's linears, in their order."""
    blocks = partition.blocks
    return tuple(planned_partition(blocks[BLOCK_OF[linear.name]], linear, devices) for linear in linears)


def fault_of_sizes(
    partition: TensorPartition, shape: ModelShape, *, devices: int, micro_batch_size: int
) -> str | None:
    """The size of a model that a partition does not divide on these devices; None where it divides all."""
    sizes = {"heads": shape.num_attention_heads, "query groups": shape.num_query_groups}
    uneven = next((f"{size} {name}" for name, size in sizes.items() if size % devices), None)
    if uneven is not None and partition.attention.form != "stock":
        return f"TP {devices} must divide the {uneven}"
    if shape.seq_length % devices:
        return f"TP {devices} must divide sequences of {shape.seq_length}"
    linears = linears_of(shape, tokens=micro_batch_size * shape.seq_length)
    try:
        partition.check_devices(devices)
        for linear, cut in zip(linears, planned_layer(partition, linears, devices), strict=True):
            check_divides(cut, linear.sizes)
    except (ConfigError, PlanError) as error:
        return str(error)
    return None
