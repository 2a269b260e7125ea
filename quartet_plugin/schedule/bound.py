"""A proven lower bound on the makespan, whatever the order, and on request whatever the split and placement.

Split and placement fixed. `relaxation` gives every action a head (no schedule starts it earlier: paths,
class order, memory) and a tail (no schedule finishes earlier after its end: the same, and the load of
other devices). The bound is the largest, over devices, of the preemptive one-machine optimum with these
heads and tails, and the longest path. The relaxed actions are never more work than the legal ones, so it
holds for every mixture of full and split backwards.

Split free. The bound is the least, over splits, of the bound above; splits are skipped only when a cheaper
bound of theirs reaches the least found. Where too many remain, an integer program over the cut positions
bounds every split at once (`bound_program`), and its dual bound counts.

Placement free. Only the properties of every legal placement are assumed: the first stage on device 0, every
device holding equally many stages (and, unless empty stages are allowed, at least one entry). An integer
program hands entries, or given stages, to devices; see `bound_program.over_placements`.

A schedule that carries two copies of the model is not covered.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.costs import Costs, FloatArray, IntArray, stage_costs, without_exchanges
from quartet_plugin.schedule.bound_program import entries, over_placements, over_splits
from quartet_plugin.schedule.compilation import compiled
from quartet_plugin.schedule.relaxation import relaxation, root_bounds

ROUNDING = 1e-10
MAX_SPLITS = 4_000
MAX_NODES = 2_000_000
TIME_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """No schedule is shorter than `makespan_s` seconds; `reason` says in words why."""

    makespan_s: float
    reason: str


def lower_bound(
    costs: Costs,
    *,
    placement: Sequence[int] | None = None,
    layers_per_stage: Sequence[int] | None = None,
    num_chunks: int | None = None,
    allow_empty: bool = False,
    max_splits: int = MAX_SPLITS,
    time_limit_s: float = TIME_LIMIT_S,
    max_nodes: int | None = None,
) -> Bound:
    """Bound the makespan from below over everything that is not given.

    `placement` [num_stages] is the device of each stage; None stands for every placement with device 0
    first and every device equally often, of `num_chunks` stages a device if that is given.
    `layers_per_stage` [num_stages] counts entries; None stands for every split in which stage 0 holds an
    `embedding` entry, the last stage a `head` entry, and no stage is empty unless `allow_empty`. At most
    `max_splits` splits are bounded one by one; `time_limit_s` is for each integer program, whose bound is
    valid however early it stops; `max_nodes` limits the program over placements by the nodes of its tree
    instead, which gives the same bound on every machine. All-to-all that pairs can hide counts as no time.
    Raises ConfigError for sizes that do not agree.
    """
    costs = without_exchanges(costs)
    _check(costs, placement=placement, split=layers_per_stage, num_chunks=num_chunks, allow_empty=allow_empty)
    if placement is None:
        return _rounded(
            over_placements(
                costs,
                layers_per_stage=layers_per_stage,
                num_chunks=num_chunks,
                allow_empty=allow_empty,
                time_limit_s=time_limit_s,
                max_nodes=max_nodes,
            ),
            "total work divided by the number of devices",
        )
    if layers_per_stage is not None:
        return _fixed(costs, placement, layers_per_stage)
    least = over_splits(costs, placement=placement, allow_empty=allow_empty, time_limit_s=time_limit_s)
    one_by_one = _over_listed_splits(costs, placement, least.layers_per_stage, allow_empty, max_splits)
    if one_by_one is not None:
        return one_by_one
    anywhere_s = over_placements(
        costs,
        layers_per_stage=None,
        num_chunks=len(placement) // costs.num_devices,
        allow_empty=allow_empty,
        time_limit_s=time_limit_s,
    )
    return _rounded(
        max(least.makespan_s, anywhere_s),
        "load of the busiest device plus the shortest path before and after it, with the best split",
    )


def _check(
    costs: Costs,
    *,
    placement: Sequence[int] | None,
    split: Sequence[int] | None,
    num_chunks: int | None,
    allow_empty: bool,
) -> None:
    num_devices = costs.num_devices
    sizes = {
        "placement": None if placement is None else len(placement),
        "layers_per_stage": None if split is None else len(split),
        "num_chunks * num_devices": None if num_chunks is None else num_chunks * num_devices,
    }
    known = {name: size for name, size in sizes.items() if size is not None}
    if len(set(known.values())) > 1:
        raise ConfigError(f"{known}: these are numbers of stages and must be equal")
    for name, size in known.items():
        if size < 1 or size % num_devices:
            raise ConfigError(f"{name}: {size} stages do not fill {num_devices} devices; give a multiple")
        if size > len(costs.layers) and not allow_empty:
            raise ConfigError(
                f"{name}: {size} stages for {len(costs.layers)} layers leave one empty; use fewer"
            )
    if placement is not None:
        counts = np.bincount(placement, minlength=num_devices)
        if placement[0] != 0 or len(counts) != num_devices or len(set(counts.tolist())) != 1:
            raise ConfigError(
                f"placement: {list(placement)[:16]} must begin with 0 and hold every device equally often"
            )


def _rounded(makespan_s: float, reason: str) -> Bound:
    return Bound(makespan_s=makespan_s * (1 - ROUNDING), reason=reason)


def _fixed(costs: Costs, placement: Sequence[int], split: Sequence[int]) -> Bound:
    stages = stage_costs(costs, placement=placement, layers_per_stage=split)
    device_s, path_s = root_bounds(relaxation(costs, stages))
    worst = int(device_s.argmax())
    if path_s > device_s[worst]:
        return _rounded(path_s, "the longest path")
    reason = f"device {worst}: earliest start + its load + least time that must follow"
    return _rounded(float(device_s[worst]), reason)


def _over_listed_splits(
    costs: Costs, placement: Sequence[int], first: Sequence[int] | None, allow_empty: bool, max_splits: int
) -> Bound | None:
    """The least bound over all splits, or None when more than `max_splits` could have it."""
    best = None if first is None else _fixed(costs, placement, first)
    below = math.inf if best is None else best.makespan_s
    splits = promising_splits(
        costs, placement=placement, below_s=below, allow_empty=allow_empty, max_splits=max_splits
    )
    if splits is None:
        return None
    for split in splits:
        bound = _fixed(costs, placement, split)
        if best is None or bound.makespan_s < best.makespan_s:
            best = bound
    return best


def promising_splits(
    costs: Costs, *, placement: Sequence[int], below_s: float, allow_empty: bool, max_splits: int
) -> list[tuple[int, ...]] | None:
    """All splits in which no device's first arrival plus load reaches `below_s` seconds, or None if too many.

    Stage 0 holds an embedding entry and the last stage a head entry; no stage is empty unless `allow_empty`.
    """
    device = np.asarray(placement, dtype=np.int64)
    listed = entries(costs)
    forward = np.concatenate(([0.0], np.cumsum(listed.f_s)))
    load = np.concatenate(([0.0], np.cumsum(listed.load_s)))
    least = np.full(len(device), 0 if allow_empty else 1, dtype=np.int64)
    if costs.has_embedding:
        least[0] = 1
    if costs.has_head:
        least[-1] = max(least[-1], 1)
    send = np.append(costs.transfer_s[device[:-1], device[1:]], 0.0)
    splits = np.zeros((max_splits + 1, len(device)), dtype=np.int64)
    num, finished = _list_splits(
        device, costs.device_slowdown, send, forward, load, least, costs.num_microbatches, below_s, splits
    )
    if not finished or num > max_splits:
        return None
    return [tuple(row) for row in splits[:num].tolist()]


@compiled
def _list_splits(
    device: IntArray,
    slowdown: FloatArray,
    send: FloatArray,
    forward: FloatArray,
    load: FloatArray,
    least: IntArray,
    m: int,
    below_s: float,
    splits: IntArray,
) -> tuple[int, bool]:
    """Depth first over the stages' ends; fills `splits`, returns how many and whether that is all of them."""
    stages, total = len(device), len(forward) - 1
    after = np.zeros(stages + 1, dtype=np.int64)  # entries that later stages need at least
    for s in range(stages - 1, -1, -1):
        after[s] = after[s + 1] + least[s]
    begin = np.zeros(stages + 1, dtype=np.int64)
    end = np.zeros(stages, dtype=np.int64)
    arrival = np.zeros(stages + 1)
    busy = np.zeros(stages)
    num, nodes, s = 0, 0, 0
    end[0] = (total if stages == 1 else least[0]) - 1
    while s >= 0:
        end[s] += 1
        nodes += 1
        if nodes > MAX_NODES:
            return num, False
        if end[s] + after[s + 1] > total:
            s -= 1
            continue
        d = device[s]
        work, first = (load[end[s]] - load[begin[s]]) * slowdown[d], arrival[s]
        for u in range(s - 1, -1, -1):
            if device[u] == d:
                work += busy[u]
                first = arrival[u]
        if first + m * work >= below_s:
            s -= 1
            continue
        busy[s] = (load[end[s]] - load[begin[s]]) * slowdown[d]
        if s == stages - 1:
            if end[s] == total:
                if num == len(splits):
                    return num, False
                for u in range(stages):
                    splits[num, u] = end[u] - begin[u]
                num += 1
            continue
        arrival[s + 1] = arrival[s] + (forward[end[s]] - forward[begin[s]]) * slowdown[d] + send[s]
        s += 1
        begin[s] = end[s - 1]
        end[s] = (total if s == stages - 1 else begin[s] + least[s]) - 1
    return num, True
