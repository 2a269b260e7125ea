"""The terms of a step: what happens once an iteration, and the sum of all terms."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from quartet_plugin.cost import communication, compute
from quartet_plugin.cost.constants import ClusterConstants, Constants
from quartet_plugin.cost.iteration.orders import device_of_stages, stages_of_devices
from quartet_plugin.cost.iteration.replay import PipelineSpan, both_ways, pipeline_span
from quartet_plugin.cost.iteration.terms import COMPUTE, StageParts, stage_sums
from quartet_plugin.cost.layer_kinds import Sublayers
from quartet_plugin.cost.memory import Weights, weights_of_stages
from quartet_plugin.cost.run import Software, TrainingRun, UniformCluster
from quartet_plugin.cost.times import Times
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.job_description import Experts

# Bytes a parameter that an Adam step reads and writes: fp32 weight and moments twice, gradient, new weight.
OPTIMIZER_BYTES = 28.0
# Of the six more for the gradients' norm and for clearing them, what clearing writes.
CLEARED_BYTES = 4.0
# Of a gradient that goes to the host.
GRADIENT_COPY_BYTES = 4.0
# Weight tensors of a layer with biases and without, and of the ends.
TENSORS, PLAIN_TENSORS, END_TENSORS = 12, 6, 4
# Those of a scan: weight and bias of its convolution, the steps' bias, decays, skips, and its norm.
SCAN_TENSORS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPrediction:
    """Seconds an iteration; `terms` sum to it, `compute_terms` to the term `compute_s`.

    `bubble_fraction` is the part of all pipeline ranks' time, from their first to their last action, in which
    they run none; the term `pp_bubble_s` is the seconds of the busiest of them alone.
    """

    iter_time_s: float
    terms: Mapping[str, float]
    compute_terms: Mapping[str, float]
    bubble_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTerms:
    """The pipeline seen from its busiest rank: seconds an iteration by cause, its waiting among them.

    `forward_s` and `backward_s` are the seconds of its passes for a microbatch.
    """

    terms: Mapping[str, float]
    forward_s: float
    backward_s: float
    span: PipelineSpan


def pipeline_terms(
    run: TrainingRun,
    constants: Constants,
    parts: Sequence[StageParts],
    *,
    forward_s: FloatArray,
    backward_s: FloatArray,
) -> PipelineTerms:
    """The terms of a pipeline whose stages take `parts` a microbatch; what pairs hide is not in `ep_comm_s`.

    `forward_s` and `backward_s` [num_stages] are the seconds of a stage's transfers to the next and to the
    one before.
    """
    sums = stage_sums(parts)
    stages, m = stages_of_devices(run), run.num_microbatches
    device = busiest_rank(run, [stage.total_s for stage in sums])
    by_cause: dict[str, float] = {}
    for k in stages[device]:
        for name, times in parts[k].items():
            by_cause[f"{name}_s"] = by_cause.get(f"{name}_s", 0.0) + m * times.total_s
    busy = sum(by_cause.values())
    exchange_s = None
    if run.has_pairs:
        exchange_s = communication.hideable_s(constants, [part.get("ep_comm", Times()) for part in parts])
    span = pipeline_span(run, sums, device, forward_s=forward_s, backward_s=backward_s, exchange_s=exchange_s)
    if span.hidden_s:
        by_cause["ep_comm_s"] -= span.hidden_s
        busy -= span.hidden_s
    by_cause["pp_comm_s"] = span.blocked_s
    has_one_stage = run.layout.pipeline_parallel == 1
    by_cause["pp_bubble_s"] = 0.0 if has_one_stage else max(0.0, span.makespan_s - busy - span.blocked_s)
    return PipelineTerms(
        terms=by_cause,
        forward_s=sum(sums[k].forward_s for k in stages[device]),
        backward_s=sum(sums[k].input_grad_s + sums[k].weight_grad_s for k in stages[device]),
        span=span,
    )


def busiest_rank(run: TrainingRun, seconds: Sequence[float]) -> int:
    """The pipeline rank whose stages take the most of `seconds` [num_stages]."""
    totals = [sum([seconds[k] for k in held]) for held in stages_of_devices(run)]
    return totals.index(max(totals))


def transfers_s(run: TrainingRun, constants: Constants) -> tuple[FloatArray, FloatArray]:
    """Seconds of each stage's transfers to the next and to the one before, on the run's usual links."""
    device = device_of_stages(run)
    seconds = np.zeros(len(device))
    for stage, (sender, receiver) in enumerate(pairwise(device)):
        if sender != receiver:
            seconds[stage] = communication.transfer_s(
                run,
                constants,
                sender=sender,
                receiver=receiver,
                num_tensors=run.num_sent_tensors(stage),
            )
    forward_s, backward_s = both_ways(seconds)
    return forward_s, backward_s


def step_terms(
    run: TrainingRun,
    constants: Constants,
    *,
    forward_s: float,
    backward_s: float,
    gradients_s: float | None = None,
    slowdown: float = 1.0,
    weights: Sequence[Weights] | None = None,
    fullest: int | None = None,
) -> dict[str, float]:
    """Seconds once an iteration, by cause.

    `forward_s` and `backward_s` are those of the busiest rank's passes for a microbatch. `gradients_s` is the
    exposed gradient traffic where it is not that of the fullest rank on the run's links; `slowdown` that of
    the slowest rank. `weights` are those of the stages and `fullest` is the rank that holds the most of them,
    where the caller has them.
    """
    weights = weights or weights_of_stages(run)
    fullest = fullest_rank(run, weights) if fullest is None else fullest
    held = held_weights(run, fullest, weights)
    if gradients_s is None:
        gradients_s = communication.data_parallel_s(
            run,
            constants,
            num_dense=held.num_dense,
            num_expert=held.num_expert,
            forward_s=forward_s,
            backward_s=backward_s,
        )
    terms = {
        "fsdp_comm_s": run.num_microbatches
        * communication.sharded_parameters_s(
            run,
            constants,
            num_dense=held.num_dense,
            num_expert=held.num_expert,
            forward_s=forward_s,
            backward_s=backward_s,
        ),
        "dp_comm_s": gradients_s,
    }
    tied_ends = communication.tied_ends_s(run, constants)
    if tied_ends:
        terms["ends_comm_s"] = tied_ends
    optimizer = optimizer_s(run, constants, held, counts=held_layers(run, fullest))
    terms["optimizer_s"] = slowdown * optimizer
    terms["step_overhead_s"] = 0.0 if run.software.logs_step_only else constants.step_s
    return terms


def summed(
    run: TrainingRun, constants: Constants, pipeline: PipelineTerms, step: Mapping[str, float]
) -> RowPrediction:
    """The prediction: all terms, and those that are shares of the others."""
    by_cause = dict(pipeline.terms)
    compute_terms = {f"{name}_s": by_cause.pop(f"{name}_s", 0.0) for name in COMPUTE}
    terms = {"compute_s": sum(compute_terms.values())} | by_cause
    span = pipeline.span
    gain = contention_gain(run.software, run.cluster, constants) * idle_beside_another(
        run, span.bubble_fraction
    )
    if gain:
        terms["pp_alone_s"] = -gain * span.makespan_s
    terms |= step
    terms["straggler_s"] = straggler_share(run, constants) * sum(terms.values())
    if isinstance(constants, ClusterConstants):
        terms["residual_s"] = (constants.residual - 1.0) * sum(terms.values())
    return RowPrediction(
        iter_time_s=sum(terms.values()),
        terms=terms,
        compute_terms=compute_terms,
        bubble_fraction=span.bubble_fraction,
    )


def straggler_share(run: TrainingRun, constants: Constants) -> float:
    """The additional share of an iteration because the slowest of many nodes is waited for."""
    nodes = run.cluster.num_devices / run.cluster.devices_per_node
    return constants.straggler * max(0.0, math.log2(nodes))


def contention_gain(software: Software, cluster: UniformCluster, constants: Constants) -> float:
    """The share of a rank's compute time that it saves while all other ranks wait.

    It is 0 unless a node's ranks share one memory and all ranks are on one node.
    """
    is_shared = software.shares_memory and cluster.num_devices <= cluster.devices_per_node
    if not (is_shared and isinstance(constants, ClusterConstants)):
        return 0.0
    return constants.contention / (1.0 + constants.contention)


def idle_beside_another(run: TrainingRun, bubble_fraction: float) -> float:
    """The share of the other ranks that wait for an action while one computes."""
    ranks = run.layout.world_size
    return 0.0 if ranks == 1 else min(1.0, bubble_fraction * ranks / (ranks - 1))


def fullest_rank(run: TrainingRun, weights: Sequence[Weights]) -> int:
    """The pipeline rank that holds the most of the stages' `weights`."""
    return busiest_rank(run, [held.num_total for held in weights])


def held_weights(run: TrainingRun, device: int, weights: Sequence[Weights] | None = None) -> Weights:
    """Parameters that a rank of pipeline rank `device` holds; `weights` are those of the stages."""
    each = weights or weights_of_stages(run)
    return Weights.total_of(each[stage] for stage in stages_of_devices(run)[device])


def held_layers(run: TrainingRun, device: int) -> tuple[int, ...]:
    """Layers of each kind that a rank of pipeline rank `device` holds."""
    counts = run.layer_counts
    held = [counts[stage] for stage in stages_of_devices(run)[device]]
    return tuple(map(sum, zip(*held, strict=True)))


def optimizer_s(
    run: TrainingRun,
    constants: Constants,
    held: Weights,
    *,
    counts: Sequence[int],
) -> float:
    """Seconds of the optimizer's step on a rank that holds these parameters, and of clearing its gradients.

    Where weights are stepped one by one, each weight of its layers starts kernels; `counts` are its layers of
    each kind.
    """
    shards, expert_shards = run.optimizer_shards
    stepped = _stepped_s(run, constants, held.num_dense, shards=shards)
    stepped += _stepped_s(run, constants, held.num_expert, shards=expert_shards)
    kinds = run.runs_by_kind
    tensors = sum(num * tensors_of_layer(kind_run) for num, (kind_run, _) in zip(counts, kinds, strict=True))
    stepped += (tensors + END_TENSORS) * tensor_start_s(run, constants)
    return stepped + sum(
        num * experts_start_s(kind_run, constants, experts)
        for num, (kind_run, experts) in zip(counts, kinds, strict=True)
    )


def _stepped_s(run: TrainingRun, constants: Constants, parameters: float, *, shards: float) -> float:
    """Seconds to step weights whose states `shards` ranks share, and to clear their gradients."""
    memory = run.cluster.device.memory_bandwidth_bytes_per_s * compute.MEMORY_RATE
    # Reading gradients for their norm and clearing them touches all gradients, the step the rank's shard.
    clear = 6.0 if run.zero_stage != 3 else 6.0 / shards
    passed_s = constants.optimizer * parameters / memory
    if not run.software.offloads_optimizer:
        return passed_s * (OPTIMIZER_BYTES / shards + clear)
    share = run.software.optimizer_on_host
    on_device_s = (1.0 - share) * passed_s * OPTIMIZER_BYTES / shards
    return passed_s * clear + _host_step_s(run, constants, share * parameters / shards, beside_s=on_device_s)


def _host_step_s(run: TrainingRun, constants: Constants, parameters: float, *, beside_s: float) -> float:
    """Seconds of a step of `parameters` on the host: gradients in fp32 to it, Adam there, weights back.

    One after the other, as Megatron does without --overlap-cpu-optimizer-d2h-h2d. The device steps its own
    part in `beside_s` seconds while the host computes, and takes weights back behind that
    (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py).
    """
    device = run.cluster.device
    copied_s = (GRADIENT_COPY_BYTES + run.element_bytes) / device.resolved_host_link_bytes_per_s
    adam_s = constants.optimizer * OPTIMIZER_BYTES / device.resolved_host_memory_bytes_per_s
    return parameters * (copied_s + adam_s) + max(0.0, beside_s - parameters * adam_s)


def tensors_of_layer(run: TrainingRun) -> int:
    """Weight tensors of a layer: attention and an FFN have half of a transformer layer's each."""
    has_biases = run.shape.position_embedding == "learned_absolute"
    of_scan = 0 if run.scan is None else SCAN_TENSORS
    return (TENSORS if has_biases else PLAIN_TENSORS) * run.num_sublayers // 2 + of_scan


def tensor_start_s(run: TrainingRun, constants: Constants) -> float:
    """Seconds to start the optimizer's kernels of one weight tensor; 0 where weights are stepped together."""
    if not run.software.eager_gradients:
        return 0.0
    ratio = constants.optimizer_start if isinstance(constants, ClusterConstants) else 1.0
    return constants.launch_s * ratio / run.optimizer_shards[0]


def experts_start_s(run: TrainingRun, constants: Constants, experts: Experts | None) -> float:
    """Seconds more to start these kernels of a layer with experts than of a dense one.

    It has a router, and in place of an FFN one for each expert of the rank, and the shared one's.
    """
    start_s = tensor_start_s(run, constants)
    if experts is None or not start_s:
        return 0.0
    shards, expert_shards = run.optimizer_shards
    of_ffn = tensors_of_layer(replace(run, sublayers=Sublayers.BOTH)) // 3
    num_local = max(1.0, experts.num_experts / run.layout.expert_parallel)
    num_shared = 1 if experts.shared_ffn_hidden_size else 0
    tensors = 1 + (num_shared - 1) * of_ffn + num_local * of_ffn * shards / expert_shards
    return tensors * start_s


def clearing_s(run: TrainingRun, constants: Constants, held: Weights) -> float:
    """Seconds to clear the sums of gradients: the part of `optimizer_s` outside the optimizer's step."""
    shards, expert_shards = run.optimizer_shards if run.zero_stage == 3 else (1.0, 1.0)
    memory = run.cluster.device.memory_bandwidth_bytes_per_s * compute.MEMORY_RATE
    dense_s = constants.optimizer * held.num_dense * CLEARED_BYTES / shards / memory
    return dense_s + constants.optimizer * held.num_expert * CLEARED_BYTES / expert_shards / memory
