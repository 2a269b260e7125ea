"""Computes the terms of a stage: seconds of a microbatch by cause, for layers, ends and actions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quartet_plugin.cost import activation_offload, communication, compute, layer_partition
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
    """One microbatch by cause: of a layer of each kind (`layers`), and what both ends add to theirs.

    `action` are the seconds of a stage's actions beside its layers. `further` are those of the layers of
    multi-token prediction on the stage before the last one; on the last one they are the head's.
    """

    layers: tuple[StageParts, ...]
    embedding: StageParts
    head: StageParts
    action: StageParts
    further: StageParts


def unit_parts(run: TrainingRun, constants: Constants) -> UnitParts:
    """The parts that every stage of the run is made of."""
    rates = Rates(run, constants)
    layers = tuple(
        layer_parts(kind_run, constants, rates, experts=experts) for kind_run, experts in run.runs_by_kind
    )
    embedding_comm, head_comm = communication.tensor_parallel_ends(run, constants)
    head = compute.head_times(run, constants, rates)
    head_parts = _end_parts(replace(head, gemm=Times())) | {"tp_comm": head_comm, "head": head.gemm}
    further: StageParts = {}
    if run.mtp_layers:
        layer = layers[-1] if run.mtp_depth is None else _parts_of_depth(run, constants)
        if run.is_mtp_before_last:
            further = _with_mtp(run, rates, head={}, further=layer)
            head_parts = {name: times.scaled(1 + run.mtp_layers) for name, times in head_parts.items()}
        else:
            head_parts = _with_mtp(run, rates, head=head_parts, further=layer)
    return UnitParts(
        layers=layers,
        embedding=_end_parts(compute.embedding_times(run, rates)) | {"tp_comm": embedding_comm},
        head=head_parts,
        action={"action": _action_times(run, constants)} if isinstance(constants, ClusterConstants) else {},
        further=further,
    )


def _with_mtp(run: TrainingRun, rates: Rates, *, head: StageParts, further: StageParts) -> StageParts:
    """The head's parts with the layers of multi-token prediction before it.

    Each embeds the tokens once more, is a transformer layer behind a product of two hidden states, and runs
    the head once more (DeepSeek-V3, section 2.2). `further` are the parts of the transformer layer, in a
    hybrid model of all layers of a depth.
    """
    joined = {"gemm": compute.joined_states_times(run, rates)}
    lookup = _end_parts(compute.embedding_times(run, rates))
    parts = dict(head)
    for added in (lookup, further, head, joined):
        for name, times in added.items():
            more = times.scaled(run.mtp_layers)
            parts[name] = parts[name].plus(more) if name in parts else more
    return parts


def _parts_of_depth(run: TrainingRun, constants: Constants) -> StageParts:
    """The parts of the layers of a hybrid model's depth of multi-token prediction together."""
    parts: StageParts = {}
    for further, experts, count in run.further_layers:
        layer = layer_parts(further, constants, Rates(further, constants), experts=experts)
        for name, times in layer.items():
            more = times.scaled(count)
            parts[name] = parts[name].plus(more) if name in parts else more
    return parts


def _end_parts(end: LayerTimes) -> StageParts:
    return {name: getattr(end, name) for name in ("gemm", "elementwise", "launch")}


def stage_parts(run: TrainingRun, constants: Constants) -> list[StageParts]:
    """The time of one microbatch on each stage, by cause; stages that hold the same share one table."""
    unit = unit_parts(run, constants)
    kinds: dict[tuple[tuple[int, ...], bool, bool, bool], StageParts] = {}
    stages: list[StageParts] = []
    last = len(run.layers_per_stage) - 1
    for stage, counts in enumerate(run.layer_counts):
        has_further = run.is_mtp_before_last and stage == last - 1
        kind = (counts, stage == 0, has_further, stage == last)
        if kind not in kinds:
            kinds[kind] = _parts_of_kind(unit, *kind)
        stages.append(kinds[kind])
    return stages


def _parts_of_kind(
    unit: UnitParts, counts: tuple[int, ...], is_first: bool, has_further: bool, is_last: bool
) -> StageParts:
    """The parts of a stage with `counts` layers of each kind."""
    parts = {name: times.scaled(counts[0]) for name, times in unit.layers[0].items()}
    for layer, count in zip(unit.layers[1:], counts[1:], strict=True):
        parts = {name: times.plus(layer[name].scaled(count)) for name, times in parts.items()}
    further = unit.further if has_further else {}
    for added in (unit.embedding if is_first else {}, further, unit.head if is_last else {}, unit.action):
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
    attention = float(run.has_attention)
    routed, shared = (float(run.has_ffn), 0.0) if experts is None else communication.ffn_pairs(run, experts)
    tensor = tensor.scaled((attention + routed + shared) / 2.0)
    again = repeated * _pairs_again(run, routed, shared, has_experts=experts is not None) / 2.0
    tensor = Times(tensor.forward_s, tensor.input_grad_s + again, tensor.weight_grad_s)
    parts = {
        "gemm": layer.gemm,
        "attention": layer.attention,
        "elementwise": layer.elementwise,
        "launch": layer.launch,
        "recompute": Times(0.0, layer.recompute_s, 0.0),
        "tp_comm": tensor.plus(communication.skew(run, constants, layer)),
        "cp_comm": _shared_sequences(run, constants, layer),
        "ep_comm": Times() if experts is None else _exchanges(run, constants, experts, layer),
    }
    if run.software.offloaded_modules:
        parts["offload"] = activation_offload.exposed(run, layer, experts=experts)
    return parts


def _shared_sequences(run: TrainingRun, constants: Constants, layer: LayerTimes) -> Times:
    """What ranks that share sequences send each other in a layer, around its attention or its scan."""
    if run.has_attention:
        times = communication.context_parallel(run, constants, layer.attention)
        return with_repeated(run, "core_attn", times)
    if run.scan is None:
        return Times()
    return with_repeated(run, "mamba", communication.scanned_heads(run, constants))


def _pairs_again(run: TrainingRun, routed: float, shared: float, *, has_experts: bool) -> float:
    """The tensor-parallel collectives that recompute repeats in a layer, in those of attention."""
    if run.layout.recompute == "full":
        return (float(run.has_attention) + routed + shared) * run.recomputed_share
    if run.recomputes("moe") if has_experts else run.recomputes_mlp:
        return routed + shared
    return shared if run.recomputes("shared_experts") else 0.0


def _exchanges(run: TrainingRun, constants: Constants, experts: Experts, layer: LayerTimes) -> Times:
    """What stays exposed of a layer's all-to-alls; those of experts that are recomputed come once more."""
    exchange = communication.expert_parallel(run, constants, experts)
    return communication.beside_compute(run, constants, with_repeated(run, "moe", exchange), layer)


def with_repeated(run: TrainingRun, module: str, times: Times) -> Times:
    """The times of a module's transfers, with those that recompute repeats in the backward.

    Full recompute repeats them in a share of the layers; these are the times of the mean layer.
    """
    again = run.recomputed_share if run.layout.recompute == "full" else float(run.recomputes(module))
    return times._replace(input_grad_s=times.input_grad_s + again * times.forward_s)
