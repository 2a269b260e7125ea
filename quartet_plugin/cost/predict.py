"""The time of one iteration of a run, as named terms that add up, and the memory that it needs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from quartet_plugin.cost import communication, compute
from quartet_plugin.cost.compute import LayerTimes, Rates, Times
from quartet_plugin.cost.constants import ClusterConstants, Constants, fitted
from quartet_plugin.cost.devices import DeviceSpec
from quartet_plugin.cost.memory import Memory, Weights, distinct_numbers, peak_memory, weights_of_stages
from quartet_plugin.cost.pipeline import StageTimes, device_of_stages, makespan_s, stages_of_devices
from quartet_plugin.cost.rows import Resolved, check_keys, read_row, resolve
from quartet_plugin.cost.run import Experts, ScheduleKind, Software, TrainingRun, UniformCluster
from quartet_plugin.errors import ConfigError, QuartetError
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.layout import Recompute

# Bytes a parameter that an Adam step reads and writes: fp32 weight and moments twice, gradient, new weight.
OPTIMIZER_BYTES = 28.0
# Of the six more for the gradients' norm and for clearing them, what clearing writes.
CLEARED_BYTES = 4.0
# Weight tensors of a layer with biases and without, and of the ends.
TENSORS, PLAIN_TENSORS, END_TENSORS = 12, 6, 4
# Causes of a stage's time that are compute, by the key of `StageParts`.
COMPUTE = ("gemm", "attention", "elementwise", "launch", "head")
# Megatron overlaps transfers in interleaved schedules only; zero-bubble runtimes send asynchronously.
BLOCKING = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE)
OVERLAPPABLE = (ScheduleKind.INTERLEAVED,)
# Schedules whose backwards are split, and those that the plugin's runtime executes.
SPLIT = (ScheduleKind.ZB_H1, ScheduleKind.ZB_H2, ScheduleKind.ZB_V)
CUSTOM = (*SPLIT, ScheduleKind.GPIPE)
StageParts = dict[str, Times]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPrediction:
    """Seconds an iteration; `terms` sum to it, `compute_terms` to the term `compute_s`."""

    iter_time_s: float
    terms: Mapping[str, float]
    compute_terms: Mapping[str, float]


def predict(run: TrainingRun, constants: Constants) -> RowPrediction:
    """The iteration's time by cause, seen from the busiest pipeline device, whose waiting is the bubble."""
    parts = stage_parts(run, constants)
    sums = [Times.sum_of(part.values()) for part in parts]
    weights = weights_of_stages(run)
    p, m = run.layout.pipeline_parallel, run.num_microbatches
    stages = stages_of_devices(run)
    device = max(range(p), key=lambda d: sum(sums[k].total for k in stages[d]))
    by_cause: dict[str, float] = {}
    for k in stages[device]:
        for name, times in parts[k].items():
            by_cause[name] = by_cause.get(name, 0.0) + m * times.total
    compute_terms = {f"{name}_s": by_cause.pop(name, 0.0) for name in COMPUTE}
    terms = {"compute_s": sum(compute_terms.values())} | {f"{k}_s": v for k, v in by_cause.items()}
    busy = sum(terms.values())
    span, blocked, idle = _span(run, constants, sums, device)
    terms["pp_comm_s"] = blocked
    terms["pp_bubble_s"] = max(0.0, span - busy - blocked) if p > 1 else 0.0
    gain = contention_gain(run.software, run.machines, constants) * idle
    if gain:
        terms["pp_alone_s"] = -gain * span
    forward = sum(sums[k].forward for k in stages[device])
    backward = sum(sums[k].input_grad + sums[k].weight_grad for k in stages[device])
    terms["fsdp_comm_s"] = m * communication.sharded_parameters(
        run, constants, parameters=sum(w.total for w in weights), forward_s=forward, backward_s=backward
    )
    fullest = max(range(p), key=lambda d: sum(weights[k].total for k in stages[d]))
    held = held_weights(run, fullest)
    terms["dp_comm_s"] = communication.data_parallel(
        run, constants, dense=held.dense, expert=held.expert, forward_s=forward, backward_s=backward
    )
    tied_ends = communication.tied_ends_s(run, constants)
    if tied_ends:
        terms["ends_comm_s"] = tied_ends
    terms["optimizer_s"] = optimizer_s(run, constants, held, num_layers=held_layers(run, fullest))
    terms["step_overhead_s"] = 0.0 if run.software.logs_step_only else constants.step_s
    nodes = run.machines.num_devices / run.machines.devices_per_node
    terms["straggler_s"] = constants.straggler * max(0.0, math.log2(nodes)) * sum(terms.values())
    if isinstance(constants, ClusterConstants):
        terms["residual_s"] = (constants.residual - 1.0) * sum(terms.values())
    return RowPrediction(iter_time_s=sum(terms.values()), terms=terms, compute_terms=compute_terms)


def predict_rows(
    data: Any,
    *,
    where: str,
    constants: Constants | None = None,
    devices: Mapping[str, DeviceSpec] | None = None,
) -> list[dict[str, Any]]:
    """`predict_row` for every row.

    Raises ConfigError where `data` is no array of objects, or an object has a key that no row has.
    """
    if not isinstance(data, list):
        raise ConfigError(f"{where}: must be an array of rows, not {type(data).__name__}")
    for index, row in enumerate(data):
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: {index}: must be an object, not {type(row).__name__}")
        check_keys(row, where=f"{where}: [{index}]")
    return [predict_row(row, constants=constants, devices=devices) for row in data]


def predict_row(
    data: Mapping[str, Any],
    *,
    constants: Constants | None = None,
    devices: Mapping[str, DeviceSpec] | None = None,
) -> dict[str, Any]:
    """The output entry of one row of `ROWS.json`: prediction and assumptions, or the row's `error`."""
    label = data.get("id")
    try:
        resolved = resolve(read_row(data), devices=devices)
        memory = _fitting(resolved)
        prediction = predict(resolved.run, constants or fitted())
    except QuartetError as error:
        return {"id": label, "error": str(error)}
    return {
        "id": label,
        "iter_time_s": prediction.iter_time_s,
        "peak_memory_bytes": memory.total,
        "fits": memory.fits,
        "terms": dict(prediction.terms),
        "compute_terms": dict(prediction.compute_terms),
        "memory_terms": memory.terms,
        "assumed": resolved.assumed,
        "warnings": [*resolved.warnings, *_unread_knobs(data)],
    }


def _unread_knobs(data: Mapping[str, Any]) -> list[str]:
    """A warning for a recipe's own settings, none of which changes a prediction."""
    knobs = data.get("knobs")
    return (
        [f"knobs: {', '.join(map(str, knobs))[:200]}: not read"] if knobs and isinstance(knobs, dict) else []
    )


def stage_parts(run: TrainingRun, constants: Constants) -> list[StageParts]:
    """The time of one microbatch on each stage, by cause."""
    rates = Rates(run, constants)
    dense = layer_parts(run, constants, rates)
    moe = dense if run.experts is None else layer_parts(run, constants, rates, experts=run.experts)
    num_dense = run.experts.num_dense_layers if run.experts else run.shape.num_layers
    embedding_comm, head_comm = communication.tensor_parallel_ends(run, constants)
    stages: list[StageParts] = []
    first, last = 0, len(run.layers_per_stage) - 1
    for stage, count in enumerate(run.layers_per_stage):
        plain = max(0, min(count, num_dense - first))
        first += count
        parts = {name: dense[name].scaled(plain).plus(moe[name].scaled(count - plain)) for name in dense}
        if stage == 0:
            _add(parts, compute.embedding_times(run, rates))
            parts["tp_comm"] = parts["tp_comm"].plus(embedding_comm)
        if stage == last:
            head = compute.head_times(run, constants, rates)
            _add(parts, replace(head, gemm=Times()))
            parts["head"] = head.gemm
            parts["tp_comm"] = parts["tp_comm"].plus(head_comm)
        if isinstance(constants, ClusterConstants):
            parts["action"] = _action_times(run, constants)
        stages.append(parts)
    return stages


def _action_times(run: TrainingRun, constants: ClusterConstants) -> Times:
    """Seconds of a stage's actions beside its layers; weight gradients are actions in split backwards."""
    runtime_s = constants.runtime_s if run.schedule in CUSTOM else 0.0
    action_s = constants.action_s + runtime_s
    return Times(action_s, action_s, runtime_s if run.schedule in SPLIT else 0.0)


def layer_parts(
    run: TrainingRun, constants: Constants, rates: Rates, *, experts: Experts | None = None
) -> StageParts:
    """One layer's time for a microbatch by cause, with `experts` or a dense FFN."""
    layer = compute.layer_times(run, constants, rates, experts=experts)
    tensor, repeated = communication.tensor_parallel(run, constants)
    if run.layout.recompute == "full":
        tensor = Times(tensor.forward, tensor.input_grad + repeated, 0.0)
    return {
        "gemm": layer.gemm,
        "attention": layer.attention,
        "elementwise": layer.elementwise,
        "launch": layer.launch,
        "recompute": Times(0.0, layer.recompute, 0.0),
        "tp_comm": tensor.plus(communication.skew(run, constants, layer)),
        "cp_comm": communication.context_parallel(run, constants, layer.attention),
        "ep_comm": communication.expert_parallel(run, constants, experts) if experts else Times(),
    }


def _add(parts: StageParts, end: LayerTimes) -> None:
    for name in ("gemm", "elementwise", "launch"):
        parts[name] = parts[name].plus(getattr(end, name))


def contention_gain(software: Software, machines: UniformCluster, constants: Constants) -> float:
    """The share of a rank's compute time that it saves while all other ranks wait.

    It is 0 unless a node's ranks share one memory and all ranks are on one node.
    """
    is_shared = software.shares_memory and machines.num_devices <= machines.devices_per_node
    if not (is_shared and isinstance(constants, ClusterConstants)):
        return 0.0
    return constants.contention / (1.0 + constants.contention)


def _span(
    run: TrainingRun, constants: Constants, sums: Sequence[Times], device: int
) -> tuple[float, float, float]:
    """The pipeline's makespan, the seconds that `device` is blocked by its sends, and the share of the other
    ranks that wait for an action while one computes.
    """
    transfers = _transfers(run, constants)
    back = np.concatenate(([0.0], transfers[:-1]))
    span, blocked, sums = pipeline_span(run, sums, device, forward_s=transfers, backward_s=back)
    ranks = run.layout.world_size
    if ranks == 1 or span <= 0:
        return span, blocked, 0.0
    busy = run.num_microbatches * sum(stage.total for stage in sums) / (run.layout.pipeline_parallel * span)
    return span, blocked, min(1.0, max(0.0, 1.0 - busy) * ranks / (ranks - 1))


def blocks_on_sends(run: TrainingRun) -> bool:
    """Whether a rank waits until its sends have arrived."""
    return run.schedule in BLOCKING or (run.software.blocking_transfers and run.schedule in OVERLAPPABLE)


def pipeline_span(
    run: TrainingRun, sums: Sequence[Times], device: int, *, forward_s: FloatArray, backward_s: FloatArray
) -> tuple[float, float, Sequence[Times]]:
    """The pipeline's makespan in seconds, those that `device` is blocked by its sends, and the stages' times.

    `sums` are the stages' times without their sends, those returned have them where they block. `forward_s`
    and `backward_s` [num_stages] are the seconds of a stage's transfers to the next and to the one before.
    """
    blocked = 0.0
    if blocks_on_sends(run):
        sums = [
            Times(stage.forward + out, stage.input_grad + into, stage.weight_grad)
            for stage, out, into in zip(sums, forward_s.tolist(), backward_s.tolist(), strict=True)
        ]
        stages = list(stages_of_devices(run)[device])
        blocked = run.num_microbatches * float(forward_s[stages].sum() + backward_s[stages].sum())
        forward_s = np.zeros_like(forward_s)
    times = StageTimes(
        forward_s=np.array([stage.forward for stage in sums]),
        input_grad_s=np.array([stage.input_grad for stage in sums]),
        weight_grad_s=np.array([stage.weight_grad for stage in sums]),
        transfer_s=forward_s,
    )
    return makespan_s(run, times), blocked, sums


def _transfers(run: TrainingRun, constants: Constants) -> FloatArray:
    device = device_of_stages(run)
    seconds = np.zeros(len(device))
    for stage, (sender, receiver) in enumerate(pairwise(device)):
        if sender != receiver:
            seconds[stage] = communication.transfer_s(run, constants, sender=sender, receiver=receiver)
    return seconds


def held_weights(run: TrainingRun, device: int) -> Weights:
    """Parameters that a rank of pipeline rank `device` holds."""
    weights = weights_of_stages(run)
    return Weights.total_of(weights[stage] for stage in stages_of_devices(run)[device])


def held_layers(run: TrainingRun, device: int) -> int:
    """Transformer layers that a rank of pipeline rank `device` holds."""
    return sum(run.layers_per_stage[stage] for stage in stages_of_devices(run)[device])


def optimizer_s(
    run: TrainingRun, constants: Constants, held: Weights, *, num_layers: int | None = None
) -> float:
    """Seconds of the optimizer's step on a rank that holds these parameters, and of clearing its gradients.

    Where weights are stepped one by one, each weight of `num_layers` layers (by default an even share) starts
    kernels.
    """
    shards = {0: 1, 3: run.shard_group}.get(run.zero_stage, run.optimizer_group)
    memory = run.machines.device.memory_bandwidth_bytes_per_s * compute.MEMORY_RATE
    # Reading gradients for their norm and clearing them touches all gradients, the step the rank's shard.
    clear = 6.0 if run.zero_stage != 3 else 6.0 / shards
    stepped = constants.optimizer * held.total * (OPTIMIZER_BYTES / shards + clear) / memory
    if not run.software.eager_gradients:
        return stepped
    count = -(-run.shape.num_layers // run.layout.pipeline_parallel) if num_layers is None else num_layers
    has_biases = run.shape.position_embedding == "learned_absolute"
    tensors = count * (TENSORS if has_biases else PLAIN_TENSORS) + END_TENSORS
    ratio = constants.optimizer_start if isinstance(constants, ClusterConstants) else 1.0
    return stepped + tensors * constants.launch_s * ratio / shards


def clearing_s(run: TrainingRun, constants: Constants, held: Weights) -> float:
    """Seconds to clear the sums of gradients: the part of `optimizer_s` outside the optimizer's step."""
    shards = run.shard_group if run.zero_stage == 3 else 1
    memory = run.machines.device.memory_bandwidth_bytes_per_s * compute.MEMORY_RATE
    return constants.optimizer * held.total * CLEARED_BYTES / shards / memory


def _fitting(resolved: Resolved) -> Memory:
    """The run's memory; where a row does not state recompute, with the least recompute that fits."""
    memory = peak_memory(resolved.run)
    if not memory.fits and "recompute" in resolved.assumed:
        modes: tuple[Recompute, ...] = ("selective", "full")
        for mode in modes:
            run = replace(resolved.run, layout=replace(resolved.run.layout, recompute=mode))
            memory_with_mode = peak_memory(run)
            if memory_with_mode.fits:
                resolved.run, resolved.assumed["recompute"] = run, mode
                return memory_with_mode
    if not memory.fits:
        needed, available = distinct_numbers(memory.total / 2**30, memory.available / 2**30, digits=1)
        resolved.warnings.append(
            f"memory: {needed} GiB needed on pipeline rank {memory.device}, "
            f"{available} GiB available; it does not fit"
        )
    return memory
