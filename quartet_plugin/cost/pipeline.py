"""The pipeline's part of a step: simulated, and extrapolated where many microbatches only repeat.

Beyond a few rounds of p microbatches a named order repeats, so its makespan grows by the same time every
round: two short simulations give the makespan of any number of microbatches. On very unequal stages the
rhythm may be no divisor of a round, or change later; tests/cost/test_pipeline.py states the error.
"""

import functools
from dataclasses import dataclass, replace

import numpy as np

from quartet_plugin.cost.critical_path import folded_counts
from quartet_plugin.cost.run import ScheduleKind, TrainingRun
from quartet_plugin.model.costs import FloatArray, IntArray, StageCosts
from quartet_plugin.schedule import kernel
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import flatten, lanes_of, one_route, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one microbatch on each stage, and of its boundary tensor to the next [num_stages]."""

    forward_s: FloatArray
    input_grad_s: FloatArray
    weight_grad_s: FloatArray
    transfer_s: FloatArray


def device_of_stages(run: TrainingRun) -> tuple[int, ...]:
    """The pipeline rank of each stage under the run's schedule."""
    return _placement(run.layout.pipeline_parallel, run.layout.num_stages, run.schedule is ScheduleKind.ZB_V)


def stages_of_devices(run: TrainingRun) -> tuple[tuple[int, ...], ...]:
    """The stages of each pipeline rank, in model order."""
    return _stages(run.layout.pipeline_parallel, device_of_stages(run))


@functools.lru_cache(maxsize=512)
def _placement(devices: int, stages: int, is_v_placement: bool) -> tuple[int, ...]:
    return tuple(
        2 * devices - 1 - k if is_v_placement and k >= devices else k % devices for k in range(stages)
    )


@functools.lru_cache(maxsize=512)
def _stages(devices: int, placement: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(k for k, holder in enumerate(placement) if holder == device) for device in range(devices)
    )


@functools.lru_cache(maxsize=512)
def order(
    kind: ScheduleKind, devices: int, chunks: int, microbatches: int
) -> tuple[Schedule, IntArray, IntArray]:
    """The named schedule, and its orders in one array with the offsets of the devices."""
    schedule = named(
        kind.value,
        num_devices=devices,
        num_microbatches=microbatches,
        chunks=chunks if chunks > 1 else None,
    )
    return schedule, *flatten(schedule)


def makespan_s(run: TrainingRun, times: StageTimes) -> float:
    """Seconds from the first forward to the last gradient of a step.

    With post-validation the steady interval instead: the optimizer's barrier is gone (Qi et al. 2024).
    """
    count = run.num_microbatches
    devices = run.layout.pipeline_parallel
    if count == 0:
        return 0.0
    if devices == 1:
        return count * float(times.forward_s.sum() + times.input_grad_s.sum() + times.weight_grad_s.sum())
    rest = count % devices
    if rest and run.schedule is ScheduleKind.INTERLEAVED:
        # Interleaved groups are whole; between two such counts the time is taken as linear.
        lower, upper = (
            makespan_s(replace(run, num_microbatches=count - rest + n), times) for n in (0, devices)
        )
        return lower + (upper - lower) * rest / devices if lower else upper
    counts = folded_counts(count, unit=devices)
    if counts is None:
        return simulated_s(run, times, count)
    shorter, longer = counts
    first, second = simulated_s(run, times, shorter), simulated_s(run, times, longer)
    return second + (second - first) * (count - longer) / (longer - shorter)


def activation_peak(run: TrainingRun, stage_bytes: FloatArray, held_fraction: float) -> FloatArray:
    """The schedule's peak activation bytes on each device."""
    devices = run.layout.pipeline_parallel
    if devices == 1:
        return np.array([float(stage_bytes.sum())])
    count = min(run.num_microbatches, 3 * devices + run.num_microbatches % devices)
    if run.schedule is ScheduleKind.INTERLEAVED:
        count = -(-count // devices) * devices
    schedule, orders, offsets = order(run.schedule, devices, run.layout.virtual_stages, count)
    peak = np.zeros(devices)
    lanes = one_route(schedule.placement, count)._replace(
        num_bytes=np.ascontiguousarray(stage_bytes, dtype=np.float64), held_fraction=float(held_fraction)
    )
    kernel.check_memory(orders, offsets, lanes, np.full(devices, np.inf), peak)
    return peak


def simulated_s(run: TrainingRun, times: StageTimes, count: int) -> float:
    """The makespan of `count` microbatches in seconds, every action simulated."""
    devices = run.layout.pipeline_parallel
    schedule, orders, offsets = order(run.schedule, devices, run.layout.virtual_stages, count)
    costs = StageCosts(
        device_of_stage=np.asarray(schedule.placement, dtype=np.int64),
        forward_s=times.forward_s,
        input_grad_s=times.input_grad_s,
        weight_grad_s=times.weight_grad_s,
        backward_s=times.input_grad_s + times.weight_grad_s,
        activation_bytes=np.ones(schedule.num_stages),
        forward_transfer_s=times.transfer_s,
        backward_transfer_s=np.concatenate(([0.0], times.transfer_s[:-1])),
        held_fraction=1.0,
    )
    if run.software.post_validation and run.schedule is ScheduleKind.ZB_H2:
        return simulate(schedule, costs).period_s
    ran, _, end, _ = kernel.run_orders(orders, offsets, lanes_of(schedule, costs))
    assert ran == len(orders)
    return float(end.max())
