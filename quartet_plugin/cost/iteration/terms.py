"""Computes the terms of a stage: seconds of a microbatch by cause, for layers, ends and actions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quartet_plugin.cost import communication, compute, layer_partition
from quartet_plugin.cost.compute import LayerTimes, Rates
from quartet_plugin.cost.constants import ClusterConstants, Constants
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.cost.times import Times
from quartet_plugin.model.job_description import Experts

# Causes of a stage's time that are compute, and those that are collectives, by the key of `StageParts`.
COMPUTE = ("gemm", "attention", "elementwise", "launch", "head")
COLLECTIVES = ("tp_comm", "cp_comm", "ep_comm")
StageParts = dict[str, Times]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitParts:
    """One microbatch by cause: of a dense layer, of one with experts, and what both ends add to theirs.

    `action` are the seconds of a stage's actions beside its layers.
    """

    dense: StageParts
    routed: StageParts
    embedding: StageParts
    head: StageParts
    action: StageParts


def unit_parts(run: TrainingRun, constants: Constants) -> UnitParts:
    """The parts that every stage of the run is made of."""
    rates = Rates(run, constants)
    dense = layer_parts(run, constants, rates)
    embedding_comm, head_comm = communication.tensor_parallel_ends(run, constants)
    head = compute.head_times(run, constants, rates)
    routed = dense if run.experts is None else layer_parts(run, constants, rates, experts=run.experts)
    head_parts = _end_parts(replace(head, gemm=Times())) | {"tp_comm": head_comm, "head": head.gemm}
    if run.mtp_layers:
        head_parts = _with_mtp(run, rates, head=head_parts, layer=routed)
    return UnitParts(
        dense=dense,
        routed=routed,
        embedding=_end_parts(compute.embedding_times(run, rates)) | {"tp_comm": embedding_comm},
        head=head_parts,
        action={"action": _action_times(run, constants)} if isinstance(constants, ClusterConstants) else {},
    )


def _with_mtp(run: TrainingRun, rates: Rates, *, head: StageParts, layer: StageParts) -> StageParts:
    """The head's parts with the layers of multi-token prediction before it.

    Each embeds the tokens once more, is a transformer layer behind a product of two hidden states, and runs
    the head once more (DeepSeek-V3, section 2.2).
    """
    joined = {"gemm": compute.joined_states_times(run, rates)}
    lookup = _end_parts(compute.embedding_times(run, rates))
    parts = dict(head)
    for added in (lookup, layer, head, joined):
        for name, times in added.items():
            more = times.scaled(run.mtp_layers)
            parts[name] = parts[name].plus(more) if name in parts else more
    return parts


def _end_parts(end: LayerTimes) -> StageParts:
    return {name: getattr(end, name) for name in ("gemm", "elementwise", "launch")}


def layer_counts(run: TrainingRun) -> list[tuple[int, int]]:
    """The layers of each stage with a dense FFN, and those with experts."""
    num_dense = run.experts.num_dense_layers if run.experts else run.shape.num_layers
    counts, first = [], 0
    for count in run.layers_per_stage:
        plain = max(0, min(count, num_dense - first))
        first += count
        counts.append((plain, count - plain))
    return counts


def stage_parts(run: TrainingRun, constants: Constants) -> list[StageParts]:
    """The time of one microbatch on each stage, by cause; stages that hold the same share one table."""
    unit = unit_parts(run, constants)
    kinds: dict[tuple[int, int, bool, bool], StageParts] = {}
    stages: list[StageParts] = []
    last = len(run.layers_per_stage) - 1
    for stage, (plain, routed) in enumerate(layer_counts(run)):
        kind = (plain, routed, stage == 0, stage == last)
        if kind not in kinds:
            kinds[kind] = _parts_of_kind(unit, *kind)
        stages.append(kinds[kind])
    return stages


def _parts_of_kind(unit: UnitParts, plain: int, routed: int, is_first: bool, is_last: bool) -> StageParts:
    """The parts of a stage of `plain` dense layers and `routed` ones with experts."""
    parts = {
        name: times.scaled(plain).plus(unit.routed[name].scaled(routed)) for name, times in unit.dense.items()
    }
    for added in (unit.embedding if is_first else {}, unit.head if is_last else {}, unit.action):
        for name, times in added.items():
            parts[name] = parts[name].plus(times) if name in parts else times
    return parts


def stage_sums(parts: Sequence[StageParts]) -> list[Times]:
    """The time of one microbatch on each stage by all causes; once for stages that share a table."""
    sums: dict[int, Times] = {}
    for part in parts:
        if id(part) not in sums:
            sums[id(part)] = Times.sum_of(part.values())
    return [sums[id(part)] for part in parts]


def _action_times(run: TrainingRun, constants: ClusterConstants) -> Times:
    """Seconds of a stage's actions beside its layers; weight gradients are actions in split backwards."""
    runtime_s = constants.runtime_s if run.is_custom else 0.0
    action_s = constants.action_s + runtime_s
    return Times(action_s, action_s, runtime_s if run.splits_backward else 0.0)


def layer_parts(
    run: TrainingRun, constants: Constants, rates: Rates, *, experts: Experts | None = None
) -> StageParts:
    """One layer's time for a microbatch by cause, with `experts` or a dense FFN."""
    partition = run.layout.tensor_partition
    cut = None if partition is None else layer_partition.partition_products(run, rates, partition)
    layer = compute.layer_times(run, constants, rates, experts=experts, cut=cut)
    tensor, repeated = communication.tensor_parallel(run, constants)
    share = _repeated_share(run, has_experts=experts is not None)
    tensor = Times(tensor.forward_s, tensor.input_grad_s + repeated * share, tensor.weight_grad_s)
    return {
        "gemm": layer.gemm,
        "attention": layer.attention,
        "elementwise": layer.elementwise,
        "launch": layer.launch,
        "recompute": Times(0.0, layer.recompute_s, 0.0),
        "tp_comm": tensor.plus(communication.skew(run, constants, layer)),
        "cp_comm": communication.context_parallel(run, constants, layer.attention),
        "ep_comm": Times() if experts is None else _exchanges(run, constants, experts, layer),
    }


def _repeated_share(run: TrainingRun, *, has_experts: bool) -> float:
    """The share of a layer's tensor-parallel collectives that recompute repeats; the FFN has half of them."""
    if run.layout.recompute == "full":
        return run.recomputed_share
    return 0.5 if run.recomputes("moe" if has_experts else "mlp") else 0.0


def _exchanges(run: TrainingRun, constants: Constants, experts: Experts, layer: LayerTimes) -> Times:
    """What stays exposed of a layer's all-to-alls; those of experts that are recomputed come once more."""
    exchange = communication.expert_parallel(run, constants, experts)
    if run.recomputes("moe"):
        exchange = exchange._replace(input_grad_s=exchange.input_grad_s + exchange.forward_s)
    return communication.beside_compute(run, constants, exchange, layer)
