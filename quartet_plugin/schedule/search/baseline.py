"""Named schedules as candidates: every one that fits, with the same search of the split."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.kernel import check_memory, compiled, run_orders, steady_period
from quartet_plugin.schedule.named import NAMED, named, refusal_of
from quartet_plugin.schedule.placement import Placement
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.search.climb import _move_layers, stage_arrays
from quartet_plugin.schedule.search.problem import ScheduleProblem
from quartet_plugin.schedule.simulate import flatten
from quartet_plugin.split.entries import Entries, minimum_entries

_TOO_BIG = 1e30


@compiled
def fixed_score(
    orders: IntArray,
    offsets: IntArray,
    counts: IntArray,
    placement: IntArray,
    prefix: FloatArray,
    slowdown: FloatArray,
    transfer: FloatArray,
    limit: FloatArray,
    held: float,
    num_microbatches: int,
    want_period: bool,
) -> float:
    """Makespan or period of a fixed order under a split; over 1e30 by the excess when memory does not fit."""
    num_devices = len(slowdown)
    num_stages = len(counts)
    cost = np.empty((4, num_stages))
    send = np.empty((2, num_stages))
    sizes = np.empty(num_stages)
    stage_arrays(counts, placement, prefix, slowdown, transfer, cost, send, sizes)
    route = np.zeros(num_microbatches, dtype=np.int64)
    peak = np.zeros(num_devices)
    check_memory(
        orders, offsets, num_stages, num_microbatches, sizes, held, route, np.full(num_devices, np.inf), peak
    )
    excess = 0.0
    for device in range(num_devices):
        if peak[device] > limit[device] * (1.0 + 1e-9):
            excess += peak[device] / max(limit[device], 1e-300) - 1.0
    if excess > 0.0:
        return 1e30 * (1.0 + excess)
    start = np.empty(len(orders))
    end = np.empty(len(orders))
    sequence = np.empty(len(orders), dtype=np.int64)
    ran = run_orders(
        orders, offsets, num_stages, num_microbatches, placement, cost, send, route, start, end, sequence
    )
    if ran < len(orders):
        return np.inf
    if want_period:
        return steady_period(orders, offsets, sequence, num_stages, num_microbatches, cost, send, route, 8)
    return end.max()


@compiled
def climb_split(
    orders: IntArray,
    offsets: IntArray,
    counts: IntArray,
    least: IntArray,
    placement: IntArray,
    prefix: FloatArray,
    slowdown: FloatArray,
    transfer: FloatArray,
    limit: FloatArray,
    held: float,
    num_microbatches: int,
    want_period: bool,
    steps: int,
    seed: int,
) -> float:
    """Improve `counts` in place by `steps` random moves of layers; return the best score."""
    np.random.seed(seed)
    score = fixed_score(
        orders,
        offsets,
        counts,
        placement,
        prefix,
        slowdown,
        transfer,
        limit,
        held,
        num_microbatches,
        want_period,
    )
    trial = counts.copy()
    for _ in range(steps):
        trial[:] = counts
        _move_layers(trial, least)
        value = fixed_score(
            orders,
            offsets,
            trial,
            placement,
            prefix,
            slowdown,
            transfer,
            limit,
            held,
            num_microbatches,
            want_period,
        )
        if value <= score:
            score = value
            counts[:] = trial
    return score


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedStart:
    """A named schedule with a split; `score` in seconds, at least 1e30 while it does not fit."""

    schedule: Schedule
    split: Entries
    score: float

    @property
    def fits(self) -> bool:
        """Whether it runs and fits the memory limit."""
        return self.score < _TOO_BIG

    @property
    def label(self) -> str:
        """The name, with chunks and group where it has them."""
        origin = self.schedule.origin
        chunks = self.schedule.num_stages // self.schedule.num_devices
        text = str(origin["name"]) + (f" v{chunks}" if chunks > 2 else "")
        return text + (f" g{origin['group']}" if "group" in origin else "")

    def climbed(self, problem: ScheduleProblem, *, steps: int, seed: int) -> "NamedStart":
        """The same schedule after `steps` moves of layers."""
        orders, offsets = flatten(self.schedule)
        counts = np.array(self.split, dtype=np.int64)
        least = minimum_entries(problem.costs, len(counts), allow_empty=problem.allow_empty)
        score = climb_split(
            orders,
            offsets,
            counts,
            np.array(least, dtype=np.int64),
            np.array(self.schedule.placement, dtype=np.int64),
            problem.prefix,
            problem.slowdown,
            problem.transfer,
            problem.limit_bytes,
            problem.costs.weight_grad_held_fraction,
            problem.costs.num_microbatches,
            problem.want_period,
            steps,
            seed,
        )
        return replace(self, split=tuple(counts.tolist()), score=float(score))


def named_schedules(
    placements: Sequence[Placement], *, num_devices: int, num_microbatches: int
) -> Iterator[Schedule]:
    """Every executable named schedule on one of `placements`, interleaved ones with several groups."""
    by_chunks = sorted({len(placement) // num_devices for placement in placements})
    groups = sorted({min(g, num_microbatches) for g in (num_devices, 2 * num_devices)})
    for name, spec in NAMED.items():
        for chunks in by_chunks if spec.executable else []:
            for group in groups if spec.has_group else [None]:
                size = {"num_devices": num_devices, "num_microbatches": num_microbatches, "chunks": chunks}
                if refusal_of(name, **size, group=group) is not None:
                    continue
                schedule = named(name, **size, group=group)
                if schedule.placement in placements:
                    yield schedule


def unscored(schedule: Schedule, split: Entries) -> NamedStart:
    """A candidate that has not been simulated yet."""
    return NamedStart(schedule=schedule, split=split, score=math.inf)
