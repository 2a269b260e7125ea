"""One level of the exact search: partial schedules with one action more, bounded and compared.

A state is a partial schedule: how many actions of each class (stage, kind) are done, when each device is
free, when each forward and input gradient ended. Rows of `table` arrays are states.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.compilation import compiled, inner
from quartet_plugin.schedule.kernel import MEMORY_TOLERANCE
from quartet_plugin.schedule.relaxation import (
    Classes,
    CountArray,
    Relaxation,
    class_duration,
    heads,
    one_machine,
)

TIME_TOLERANCE = 1e-12
BoolArray = NDArray[np.bool_]


class ExactProblem(NamedTuple):
    """An instance: its relaxation with exact durations and its tails, and memory per stage and device.

    `limit` [num_devices] is inf where there is none; a device of `may_wait` may have to leave a forward
    that fits for later.
    """

    relaxed: Relaxation
    tail: Classes
    num_bytes: FloatArray
    held: FloatArray
    limit: FloatArray
    may_wait: BoolArray


class Level(NamedTuple):
    """States after the same number of actions; the first axis of every array is the state.

    `counts` [n, stages, 3]; `ready` [n, devices]; `end_f`, `end_i` [n, stages, m]; `waiting` [n, stages]:
    forwards that must not be their device's next action; `bound` [n]; `parent` and `action` [n]: the
    state and the class (stage * 3 + kind) each came from.
    """

    counts: CountArray
    ready: FloatArray
    end_f: FloatArray
    end_i: FloatArray
    waiting: BoolArray
    bound: FloatArray
    parent: NDArray[np.int32]
    action: NDArray[np.int32]


def empty_level(capacity: int, *, num_stages: int, num_microbatches: int, num_devices: int) -> Level:
    """Room for `capacity` states."""
    return Level(
        counts=np.zeros((capacity, num_stages, 3), dtype=np.int16),
        ready=np.zeros((capacity, num_devices)),
        end_f=np.zeros((capacity, num_stages, num_microbatches)),
        end_i=np.zeros((capacity, num_stages, num_microbatches)),
        waiting=np.zeros((capacity, num_stages), dtype=np.bool_),
        bound=np.zeros(capacity),
        parent=np.zeros(capacity, dtype=np.int32),
        action=np.zeros(capacity, dtype=np.int32),
    )


@inner
def _fits(problem: ExactProblem, counts: CountArray, s: int) -> bool:
    """Whether one more forward of stage s fits its device's limit."""
    d = problem.relaxed.device[s]
    if problem.num_bytes[s] <= 0 or problem.limit[d] == np.inf:
        return True
    total = problem.num_bytes[s]
    for u in range(len(problem.relaxed.device)):
        if problem.relaxed.device[u] == d:
            kept = (1 - problem.held[u]) * (counts[u, 0] - counts[u, 1])
            kept += problem.held[u] * (counts[u, 0] - counts[u, 2])
            total += kept * problem.num_bytes[u]
    return bool(total <= problem.limit[d] * (1 + MEMORY_TOLERANCE))


@inner
def _can_start(problem: ExactProblem, state: Level, row: int, s: int, k: int) -> float:
    """Earliest start of the class's next action in this state, or -1 when it cannot be scheduled yet."""
    counts, relaxed = state.counts[row], problem.relaxed
    i = counts[s, k]
    if i >= relaxed.num_microbatches:
        return -1.0
    start = float(state.ready[row, relaxed.device[s]])
    if k == 0:
        if state.waiting[row, s]:
            return -1.0
        if s > 0:
            if counts[s - 1, 0] <= i:
                return -1.0
            start = max(start, state.end_f[row, s - 1, i] + relaxed.send_f_s[s - 1])
        return start if _fits(problem, counts, s) else -1.0
    if counts[s, k - 1] <= i:
        return -1.0
    if k == 1 and s + 1 < len(relaxed.device):
        if counts[s + 1, 1] <= i:
            return -1.0
        start = max(start, state.end_i[row, s + 1, i] + relaxed.send_i_s[s + 1])
    return start


@inner
def _dominates(relaxed: Relaxation, level: Level, a: int, b: int) -> bool:
    """Whether all that is to come can happen in state a no later than in b; both did the same actions."""
    stages = len(relaxed.device)
    for d in range(relaxed.num_devices):
        if level.ready[a, d] > level.ready[b, d] + TIME_TOLERANCE:
            return False
    for s in range(stages):
        free = level.ready[b, relaxed.device[s]] + TIME_TOLERANCE
        if s > 0:
            for i in range(level.counts[b, s, 0], level.counts[b, s - 1, 0]):
                late = level.end_f[a, s - 1, i] > level.end_f[b, s - 1, i] + TIME_TOLERANCE
                if late and level.end_f[a, s - 1, i] + relaxed.send_f_s[s - 1] > free:
                    return False
        if s + 1 < stages:
            for i in range(level.counts[b, s, 1], level.counts[b, s + 1, 1]):
                late = level.end_i[a, s + 1, i] > level.end_i[b, s + 1, i] + TIME_TOLERANCE
                if late and level.end_i[a, s + 1, i] + relaxed.send_i_s[s + 1] > free:
                    return False
    return True


@inner
def _same_actions(level: Level, a: int, b: int) -> bool:
    for s in range(level.counts.shape[1]):
        if level.waiting[a, s] != level.waiting[b, s]:
            return False
        for k in range(3):
            if level.counts[a, s, k] != level.counts[b, s, k]:
                return False
    return True


@inner
def _bucket(level: Level, row: int, num_buckets: int) -> int:
    """Where states with the same actions meet; `num_buckets` is a power of two."""
    value = np.uint64(1469598103934665603)
    for s in range(level.counts.shape[1]):
        part = level.counts[row, s, 0] * 16384 + level.counts[row, s, 1] * 128 + level.counts[row, s, 2]
        part = part * 2 + (1 if level.waiting[row, s] else 0)
        value = (value ^ np.uint64(part + 1)) * np.uint64(1099511628211)
        value ^= value >> np.uint64(29)
    return int(value & np.uint64(num_buckets - 1))


@inner
def _copy(source_level: Level, source: int, target_level: Level, target: int) -> None:
    # Element by element, here and elsewhere: to compile an assignment of a row takes numba long.
    for device in range(source_level.ready.shape[1]):
        target_level.ready[target, device] = source_level.ready[source, device]
    for stage in range(source_level.counts.shape[1]):
        target_level.waiting[target, stage] = source_level.waiting[source, stage]
        for kind in range(3):
            target_level.counts[target, stage, kind] = source_level.counts[source, stage, kind]
        for i in range(source_level.end_f.shape[2]):
            target_level.end_f[target, stage, i] = source_level.end_f[source, stage, i]
            target_level.end_i[target, stage, i] = source_level.end_i[source, stage, i]
    target_level.bound[target] = source_level.bound[source]
    target_level.parent[target] = source_level.parent[source]
    target_level.action[target] = source_level.action[source]


@inner
def _add_action(problem: ExactProblem, child: Level, row: int, s: int, k: int, start: float) -> None:
    """Do the class's next action at `start` in the state `row`."""
    d = problem.relaxed.device[s]
    i = child.counts[row, s, k]
    child.counts[row, s, k] += 1
    child.ready[row, d] = start + class_duration(problem.relaxed, s, k)
    if k == 0:
        child.end_f[row, s, i] = child.ready[row, d]
    elif k == 1:
        child.end_i[row, s, i] = child.ready[row, d]
    for u in range(len(problem.relaxed.device)):
        if problem.relaxed.device[u] == d:
            child.waiting[row, u] = False
    child.action[row] = s * 3 + k


@inner
def _set_bound(problem: ExactProblem, child: Level, row: int, end: Classes) -> None:
    """Bound the state; also move each device's free time up to the earliest start of its next action."""
    relaxed, counts = problem.relaxed, child.counts[row]
    for s in range(len(relaxed.device)):
        for i in range(relaxed.num_microbatches):
            end.f[s, i] = child.end_f[row, s, i]
            end.i[s, i] = child.end_i[row, s, i]
            end.w[s, i] = 0.0
    heads(relaxed, counts, child.ready[row], end)
    bound = 0.0
    earliest = np.full(relaxed.num_devices, np.inf)
    for s in range(len(relaxed.device)):
        d = relaxed.device[s]
        if counts[s, 0] < relaxed.num_microbatches:
            earliest[d] = min(earliest[d], end.f[s, counts[s, 0]] - relaxed.f_s[s])
        if counts[s, 1] < relaxed.num_microbatches:
            earliest[d] = min(earliest[d], end.i[s, counts[s, 1]] - relaxed.i_s[s])
        if counts[s, 2] < relaxed.num_microbatches:
            earliest[d] = min(earliest[d], end.w[s, counts[s, 2]] - relaxed.w_s[s])
    for d in range(relaxed.num_devices):
        if earliest[d] < np.inf:
            child.ready[row, d] = max(child.ready[row, d], earliest[d])
            bound = max(bound, one_machine(relaxed, d, counts, end, problem.tail))
        bound = max(bound, child.ready[row, d])
    child.bound[row] = bound


@inner
def _keep(relaxed: Relaxation, child: Level, num: int, buckets: IntArray, chain: IntArray) -> int:
    """Keep row `num` unless a state with the same actions dominates it; returns the new number of rows."""
    slot = _bucket(child, num, len(buckets))
    other = buckets[slot]
    while other >= 0:
        if _same_actions(child, other, num):
            if _dominates(relaxed, child, other, num):
                return num
            if _dominates(relaxed, child, num, other):
                _copy(child, num, child, other)
                return num
        other = chain[other]
    chain[num] = buckets[slot]
    buckets[slot] = num
    return num + 1


@inner
def _first_to_end(
    problem: ExactProblem, level: Level, row: int, starts: FloatArray
) -> tuple[int, int, float]:
    """Fill `starts` [stages, 3]; return stage (-1: none), kind and end of the action that can end first."""
    best_s, best_k, best_end = -1, -1, np.inf
    for s in range(len(problem.relaxed.device)):
        for k in range(3):
            starts[s, k] = _can_start(problem, level, row, s, k)
            end = starts[s, k] + class_duration(problem.relaxed, s, k)
            if starts[s, k] >= 0 and end < best_end - TIME_TOLERANCE:
                best_s, best_k, best_end = s, k, end
    return best_s, best_k, best_end


@compiled
def expand(
    problem: ExactProblem,
    level: Level,
    first: int,
    last: int,
    child: Level,
    num: int,
    upper: float,
    buckets: IntArray,
    chain: IntArray,
) -> tuple[int, int]:
    """Expand rows [first, last) of `level` into `child`, which already holds `num` rows.

    Returns the new number of rows and the first row not expanded for lack of room. States whose bound
    reaches `upper` are left out. Branching as Giffler and Thompson: take the action that could end first,
    at C, on device d; the next action of d is it or one that could start before C - otherwise that action
    would fit in front and, moved there, delay nothing. Moving a forward ahead can break the memory of
    another stage of d; where that may happen, a last branch marks d's candidates as waiting, until d has
    done something else.
    """
    relaxed = problem.relaxed
    shape = (len(relaxed.device), relaxed.num_microbatches)
    starts = np.zeros((shape[0], 3))
    kept_waiting = np.empty(shape[0], dtype=np.bool_)
    end = Classes(np.zeros(shape), np.zeros(shape), np.zeros(shape))
    for row in range(first, last):
        if num + shape[0] * shape[0] * 3 + 1 >= len(child.bound):
            return num, row
        for s in range(shape[0]):
            kept_waiting[s] = level.waiting[row, s]
        while True:
            best_s, best_k, best_end = _first_to_end(problem, level, row, starts)
            if best_s < 0:
                break
            d = relaxed.device[best_s]
            for s in range(shape[0]):
                for k in range(3):
                    chosen = s == best_s and k == best_k
                    late = not chosen and starts[s, k] >= best_end - TIME_TOLERANCE
                    if relaxed.device[s] != d or starts[s, k] < 0 or late:
                        continue
                    _copy(level, row, child, num)
                    child.parent[num] = row
                    _add_action(problem, child, num, s, k, starts[s, k])
                    _set_bound(problem, child, num, end)
                    if child.bound[num] < upper:
                        num = _keep(relaxed, child, num, buckets, chain)
            if best_k != 0 or not problem.may_wait[d]:
                break
            for s in range(shape[0]):
                if relaxed.device[s] == d and (s == best_s or 0 <= starts[s, 0] < best_end):
                    level.waiting[row, s] = True
        for s in range(shape[0]):
            level.waiting[row, s] = kept_waiting[s]
    return num, last
