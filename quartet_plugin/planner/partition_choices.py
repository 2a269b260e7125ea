"""The tensor partitions that the layouts of a described job may have."""

from itertools import product

from quartet_plugin.model.plan import STOCK
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.tensor_partition import BlockPartition, TensorPartition, partition_from_label
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.table_rows import layout_of
from quartet_plugin.space.knobs.divisors import divisors
from quartet_plugin.space.knobs.tensor_partition import grids_for, partition_fault

STOCK_ALONE: tuple[TensorPartition | None, ...] = (None,)


def partitions_of(job: PlanRequest) -> tuple[TensorPartition | None, ...]:
    """Stock (None), then what the job asks for: of `auto` every pair of forms of the two blocks."""
    requested = job.search.requested("tensor_partition")
    if requested is not None:
        asked = [partition_from_label(label) for label in requested]
    else:
        degrees = divisors(job.largest_tensor_parallel)
        grids = [grid for devices in degrees for grid in grids_for(devices)]
        forms = [
            BlockPartition(form="stock"),
            BlockPartition(form="rings"),
            *dict.fromkeys(grids),
        ]
        pairs = list(product(forms, repeat=2))[1:]
        asked = [TensorPartition(attention=attention, mlp=mlp) for attention, mlp in pairs]
    return tuple(dict.fromkeys([None, *asked]))


def legal_partitions(
    job: PlanRequest,
    shape: ModelShape,
    partitions: tuple[TensorPartition | None, ...],
    tp: int,
    cp: int,
    ep: int,
    size: int,
) -> list[int]:
    """The numbers of the partitions that layouts of these sizes may have; stock where nothing is cut."""
    requested = job.search.requested("tensor_partition")
    if tp == 1:
        return [0]
    legal = [0] if requested is None or STOCK in requested else []
    if len(partitions) == 1:
        return legal
    layout = layout_of(tp, cp, 1, ep, size, 1, 0, 0, ep=ep)
    features = [
        name
        for name, is_there in (
            ("moe", job.experts is not None),
            ("multi_latent_attention", job.latent is not None),
            ("fp8", job.precision == "fp8"),
        )
        if is_there
    ]
    for number, partition in enumerate(partitions):
        if partition is not None and not partition_fault(
            partition, layout=layout, shape=shape, features=features
        ):
            legal.append(number)
    return legal
