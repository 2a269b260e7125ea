"""Tensor partition: how the linears of a layer are cut over the tensor-parallel devices."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import STOCK
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.tensor_partition import (
    BlockPartition,
    TensorPartition,
    partition_from_label,
)
from quartet_plugin.partition.layer import fault_of_sizes
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, LayoutKnob, Value

# Features whose layers are not four plain linears, or whose traffic or memory is bound to the framework's.
REFUSED_FEATURES = {
    "moe": "experts are no plain linears",
    "multi_latent_attention": "latent attention has other linears",
    "attention_variant": "its linears are not the four of a plain layer",
    "hybrid": "its layers are not alike",
    "heterogeneous": "its layers are not alike",
    "mtp": "its layers are bound to the framework's last stage",
    "fp8": "the scales of FP8 products are bound to whole matrices",
    "fp4": "the scales of FP4 products are bound to whole matrices",
    "cuda_graphs": "transfers between products are not captured",
    "tp_comm_overlap": "the framework overlaps the collectives of its own partition",
    "context_parallel": "sequences are cut already",
    "fsdp": "parameters are sharded over devices",
    "torch_fsdp": "parameters are sharded over devices",
    "weight_shards": "parameters are sharded over devices",
    "activation_offload": "modules whose activations are on the host are the framework's own",
    "emerging_optimizer": "Muon and SOAP update whole matrices, and Lion was not tried",
}


def partition_fault(
    partition: TensorPartition, *, layout: Layout, shape: ModelShape, features: Iterable[str]
) -> str | None:
    """The rule that a partition breaks in a layout of a model; None for a legal one."""
    present = set(features)
    refused = next((name for name in REFUSED_FEATURES if name in present), None)
    if refused is not None:
        return f"stock stays with {refused}: {REFUSED_FEATURES[refused]}"
    if layout.context_parallel > 1:
        return f"stock stays with CP {layout.context_parallel}: {REFUSED_FEATURES['context_parallel']}"
    if layout.expert_parallel > 1:
        return f"stock stays with EP {layout.expert_parallel}: {REFUSED_FEATURES['moe']}"
    return fault_of_sizes(
        partition, shape, devices=layout.tensor_parallel, micro_batch_size=layout.micro_batch_size
    )


def partitions_for(num_devices: int) -> list[TensorPartition]:
    """The partitions of both blocks alike that this number of devices can have: rings, and every grid."""
    forms = [BlockPartition(form="rings"), *grids_for(num_devices)] if num_devices > 1 else []
    return [TensorPartition(attention=form, mlp=form) for form in forms]


def every_pair(num_devices: int) -> list[TensorPartition]:
    """The partitions that the devices can have, with a form of its own for each block, stock left out."""
    forms = [BlockPartition(form="stock"), BlockPartition(form="rings"), *grids_for(num_devices)]
    pairs = list(product(forms, repeat=2))[1:]
    return [TensorPartition(attention=attention, mlp=mlp) for attention, mlp in pairs]


def grids_for(num_devices: int) -> list[BlockPartition]:
    """The grids that this number of devices can be, the largest first."""
    grids = []
    for outer in range(1, num_devices // 4 + 1):
        grid = BlockPartition(form="grid", outer=None if outer == 1 else outer)
        try:
            grid.side(num_devices)
        except ConfigError:
            continue
        grids.append(grid)
    return grids


class PartitionKnob(LayoutKnob):
    """The partition by its label; a layout without one is `stock`. One that is not stock turns SP on."""

    def in_layout(self, layout: Layout) -> Value | None:
        """The label of the layout's partition; `stock` without one."""
        return STOCK if layout.tensor_partition is None else layout.tensor_partition.label

    def put(self, layout: Layout, value: Value | None) -> Layout:
        """The layout with another partition."""
        partition = partition_from_label(str(value))
        if partition is None:
            return replace(layout, tensor_partition=None)
        return replace(layout, tensor_partition=partition, sequence_parallel=True)


def _offers(context: KnobContext) -> list[str]:
    devices = context.layout.tensor_parallel
    partitions = every_pair(devices) if context.rules.is_planned else partitions_for(devices)
    return [STOCK, *(partition.label for partition in partitions)]


def _fault(value: Value, context: KnobContext) -> str | None:
    partition, rules, layout = partition_from_label(str(value)), context.rules, context.layout
    if partition is None:
        return None
    if (reason := _kept(rules)) is not None:
        return reason
    switches = rules.search.requested("sequence_parallel")
    if switches is not None and not {True, STOCK} & set(switches):
        return "needs sequence_parallel, which the search keeps off"
    if rules.joined_devices % layout.tensor_parallel:
        return f"TP {layout.tensor_parallel} leaves the {rules.joined_devices} devices that fast links join"
    return partition_fault(partition, layout=layout, shape=context.shape, features=rules.job.features)


def _kept(rules: KnobRules) -> str | None:
    if rules.job.no_tensor_partition is not None:
        return rules.job.no_tensor_partition
    refused = next((name for name in REFUSED_FEATURES if name in rules.job.features), None)
    return None if refused is None else f"{refused}: {REFUSED_FEATURES[refused]}"


TENSOR_PARTITION = PartitionKnob(
    name="tensor_partition",
    label="partition",
    meaning="how a layer's linears are cut: stock, rings, grid, or {outer: N, inner: grid}, for each block",
    kind="partition",
    axis=Axis.DEGREES,
    change_class="B",
    rule="TP above 1, of a grid q x q (times outer), divides heads, groups and sequences, q hidden size and "
    "FFN; no experts, latent attention, FP8, CUDA graphs, TP overlap, CP, Muon, SOAP or Lion "
    "(docs/partitions.md)",
    default="stock",
    offers=_offers,
    fault=_fault,
    kept=_kept,
    read_back=lambda live: live.tensor_partition,
    framework=MEGATRON.framework,
    applies=lambda layout: layout.tensor_parallel > 1,
)
