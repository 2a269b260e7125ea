"""Integer programs that bound the makespan over all splits, or over all placements.

Both minimise T under inequalities that every legal schedule satisfies, over a superset of the legal
splits or placements; HiGHS's dual bound is a lower bound on T however early it stops. Per entry l the
relaxed costs f, i', w' are used (`relaxation.relaxed_costs` an entry at a time: sums of minima are no
larger than minima of sums). Solvers meet constraints to 1e-6, so the bound is lowered by that much.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from quartet_plugin.model.costs import Costs, FloatArray

SOLVER_TOLERANCE = 1e-6
MAX_CUTS = 2_500  # above, the solver does not keep to its time limit


class Entries(NamedTuple):
    """Relaxed costs of every entry of the table on a device of slowdown 1, seconds [num_entries]."""

    f_s: FloatArray
    i_s: FloatArray
    w_s: FloatArray

    @property
    def load_s(self) -> FloatArray:
        """All of a microbatch's work."""
        return self.f_s + self.i_s + self.w_s


class SplitBound(NamedTuple):
    """A lower bound over splits, and the split the program found, if any."""

    makespan_s: float
    layers_per_stage: tuple[int, ...] | None


def entries(costs: Costs) -> Entries:
    """The relaxed costs of the table's entries."""
    f, i, w = (
        np.array([getattr(layer, name) for layer in costs.layers], dtype=np.float64)
        for name in ("forward_s", "input_grad_s", "weight_grad_s")
    )
    full = i + w if costs.backward_fused_s is None else np.array(costs.backward_fused_s, dtype=np.float64)
    relaxed = np.minimum(i, full)
    return Entries(f, relaxed, np.maximum(np.minimum(i + w, full) - relaxed, 0.0))


class _Program:
    """min T, rows `T >= constant + coefficients . x`, and plain rows `lower <= coefficients . x <= upper`."""

    def __init__(self, num_variables: int, *, upper: FloatArray, scale_s: float) -> None:
        self._num = num_variables
        self._upper = upper
        self._scale = scale_s
        self._cells: list[tuple[int, int, float]] = []
        self._lower: list[float] = []
        self._high: list[float] = []

    def row(self, cells: dict[int, float], *, lower: float = -math.inf, upper: float = math.inf) -> None:
        """Bound a linear form."""
        self._cells += [(len(self._lower), column, value) for column, value in cells.items() if value]
        self._lower.append(lower)
        self._high.append(upper)

    def at_least(self, constant_s: float, seconds: dict[int, float]) -> None:
        """T is at least this many seconds."""
        cells = {column: -value / self._scale for column, value in seconds.items()}
        self.row({**cells, self._num: 1.0}, lower=constant_s / self._scale)

    def solve(self, *, time_limit_s: float, max_nodes: int | None) -> tuple[float, FloatArray | None]:
        """The proven bound on T in seconds and the best point; T alone is continuous.

        `max_nodes` ends the solver after these nodes of its tree, wherever the clock stands: 0 solves the
        linear relaxation alone. None sets no limit.
        """
        # A fifth of the time of a tuner's imports, and few of its processes come here.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        limits = {"time_limit": time_limit_s} if max_nodes is None else {"node_limit": max_nodes}
        index, column, value = (list(part) for part in zip(*self._cells, strict=True))
        shape = (len(self._lower), self._num + 1)
        matrix = coo_array((value, (index, column)), shape=shape).tocsr()
        integral = np.ones(self._num + 1)
        integral[-1] = 0
        cost = np.zeros(self._num + 1)
        cost[-1] = 1.0
        result = milp(
            cost,
            constraints=LinearConstraint(matrix, self._lower, self._high),
            bounds=Bounds(0.0, np.append(self._upper, np.inf)),
            integrality=integral,
            options={"mip_rel_gap": 1e-7, **limits},
        )
        dual = result.mip_dual_bound
        bound = 0.0 if dual is None or not math.isfinite(dual) else float(dual)
        return max(bound - SOLVER_TOLERANCE, 0.0) * self._scale, result.x


def _average_s(costs: Costs, listed: Entries) -> float:
    """All work spread at will over all devices: a bound that needs no solver."""
    return float(costs.num_microbatches * listed.load_s.sum() / (1.0 / costs.device_slowdown).sum())


def _times(values: dict[int, float], factor: float) -> dict[int, float]:
    return {column: value * factor for column, value in values.items()}


def _plus(*parts: dict[int, float]) -> dict[int, float]:
    total: dict[int, float] = {}
    for part in parts:
        for column, value in part.items():
            total[column] = total.get(column, 0.0) + value
    return total


def over_splits(
    costs: Costs, *, placement: Sequence[int], allow_empty: bool, time_limit_s: float
) -> SplitBound:
    """Bound over all splits of a fixed placement.

    y[s, l] = 1 where entry l lies in stage s or before. With a device's stages S, its first one a and its
    last one z: work begins when the first microbatch has come through the stages before a, and goes on for
    m (F + I + W) of S; or for m (F + I), after which the last I still has to reach stage 0; backwards
    cannot begin before the first microbatch has come back to z. The last forward of any stage is behind m
    of them and still has the way to the end and back before it.
    """
    listed, m = entries(costs), costs.num_microbatches
    average_s = _average_s(costs, listed)
    stages = _StageForms(costs, placement, listed)
    if stages.num_cuts > MAX_CUTS:
        return SplitBound(average_s, None)
    program = _Program(stages.num_cuts, upper=np.ones(stages.num_cuts), scale_s=average_s or 1.0)
    stages.constrain(program, allow_empty=allow_empty)
    f, i, w = stages.forms
    send, back = stages.send_s, stages.back_s
    last = len(placement) - 1
    for d in range(costs.num_devices):
        on_device = [s for s, device in enumerate(placement) if device == d]
        a, z = on_device[0], on_device[-1]
        head = _plus(*f[:a])
        come_back = _plus(*f, *i[z + 1 :])
        tail = _plus(*i[:a], w[0]) if a else {}
        tail_s = sum(back[1 : a + 1])
        way_s = sum(send) + sum(back[z + 1 :])
        all_f, all_i, all_w = (_plus(*(form[s] for s in on_device)) for form in (f, i, w))
        program.at_least(sum(send[:a]), _plus(head, _times(_plus(all_f, all_i, all_w), m)))
        program.at_least(sum(send[:a]) + tail_s, _plus(head, _times(_plus(all_f, all_i), m), tail))
        program.at_least(way_s, _plus(come_back, _times(_plus(all_i, all_w), m)))
        program.at_least(way_s + tail_s, _plus(come_back, _times(all_i, m), tail))
    for s in range(last + 1):
        way = _plus(*f[:s], _times(f[s], m), *f[s + 1 :], *i, w[0])
        program.at_least(sum(send) + sum(back), way)
    bound, point = program.solve(time_limit_s=time_limit_s, max_nodes=None)
    return SplitBound(max(bound, average_s), None if point is None else stages.split(point))


class _StageForms:
    """A split as binaries, and each stage's F, I and W seconds as linear forms of them."""

    def __init__(self, costs: Costs, placement: Sequence[int], listed: Entries) -> None:
        self._costs = costs
        self._num_stages, self._num_entries = len(placement), len(costs.layers)
        self.num_cuts = self._num_stages * self._num_entries
        slow = costs.device_slowdown
        self.forms = tuple(
            [self._form(s, values * slow[placement[s]]) for s in range(self._num_stages)] for values in listed
        )
        pairs = list(pairwise(placement))
        self.send_s = [float(costs.transfer_s[a, b]) for a, b in pairs]
        self.back_s = [0.0, *(float(costs.transfer_s[b, a]) for a, b in pairs)]

    def _cut(self, stage: int, entry: int) -> int:
        return stage * self._num_entries + entry

    def _form(self, stage: int, values: FloatArray) -> dict[int, float]:
        form = {self._cut(stage, n): float(v) for n, v in enumerate(values)}
        if stage:
            form.update({self._cut(stage - 1, n): -float(v) for n, v in enumerate(values)})
        return form

    def constrain(self, program: _Program, *, allow_empty: bool) -> None:
        """Require cuts that rise with the stage and fall with the entry, and stages that are not empty."""
        last = self._num_stages - 1
        for n in range(self._num_entries):
            program.row({self._cut(last, n): 1.0}, lower=1.0)
            for s in range(self._num_stages):
                if s:
                    program.row({self._cut(s, n): 1.0, self._cut(s - 1, n): -1.0}, lower=0.0)
                if n:
                    program.row({self._cut(s, n - 1): 1.0, self._cut(s, n): -1.0}, lower=0.0)
        if self._costs.has_embedding:
            program.row({self._cut(0, 0): 1.0}, lower=1.0)
        if self._costs.has_head and last:
            program.row({self._cut(last - 1, self._num_entries - 1): 1.0}, upper=0.0)
        if not allow_empty:
            ones = np.ones(self._num_entries)
            for s in range(self._num_stages):
                program.row(self._form(s, ones), lower=1.0)

    def split(self, point: FloatArray) -> tuple[int, ...]:
        """The counts of a point."""
        cuts = np.round(point[: self.num_cuts]).reshape(self._num_stages, self._num_entries).sum(axis=1)
        return tuple(np.diff(cuts, prepend=0).astype(int).tolist())


def over_placements(
    costs: Costs,
    *,
    layers_per_stage: Sequence[int] | None,
    num_chunks: int | None,
    allow_empty: bool,
    time_limit_s: float,
    max_nodes: int | None = None,
) -> float:
    """Bound over all placements, of a given split or of every split.

    n[d, g] counts the items of kind g on device d; items are entries, or the given stages. Item 0 lies on
    device 0 where stage 0 must hold it. Take the devices in the order of their first stage: before the
    k-th (from 0) can start, the first microbatch has passed item 0 and at least one item on each of the
    k - 1 devices between, and made k transfers; its last I takes the same way back. o[d, k] says device d
    is k-th. One microbatch's whole way is a bound too.
    """
    items, ends_fixed = _items(costs, layers_per_stage, allow_empty)
    kinds, kind_of = np.unique(np.stack(items, axis=1)[1:], axis=0, return_inverse=True)
    kinds = np.concatenate((np.stack(items, axis=1)[:1], kinds))
    counts = np.concatenate(([1], np.bincount(kind_of.ravel(), minlength=len(kinds) - 1)))
    p = costs.num_devices
    num_items = p * len(kinds)
    average_s = _average_s(costs, entries(costs))
    upper = np.concatenate((np.tile(counts, p).astype(np.float64), np.ones(p * p)))
    program = _Program(num_items + p * p, upper=upper, scale_s=average_s or 1.0)
    least = 0 if allow_empty else (num_chunks or 1)
    if layers_per_stage is not None:
        least = len(layers_per_stage) // p
    for g, count in enumerate(counts):
        program.row({d * len(kinds) + g: 1.0 for d in range(p)}, lower=count, upper=count)
    for d in range(p):
        exactly = math.inf if layers_per_stage is None else least
        program.row({d * len(kinds) + g: 1.0 for g in range(len(kinds))}, lower=least, upper=exactly)
        program.row({num_items + d * p + k: 1.0 for k in range(p)}, lower=1.0, upper=1.0)
        program.row({num_items + k * p + d: 1.0 for k in range(p)}, lower=1.0, upper=1.0)
    program.row({num_items: 1.0}, lower=1.0)
    if ends_fixed:
        program.row({0: 1.0}, lower=1.0)
    _require_time(program, costs, kinds, ends_fixed=ends_fixed, between=1 if least else 0)
    bound, _ = program.solve(time_limit_s=time_limit_s, max_nodes=max_nodes)
    return max(bound, average_s)


def _items(costs: Costs, split: Sequence[int] | None, allow_empty: bool) -> tuple[Entries, bool]:
    """Entries or given stages, and whether the first one is sure to lie on device 0."""
    listed = entries(costs)
    if split is None:
        return listed, costs.has_embedding or not allow_empty
    ends = np.cumsum(split)
    sums = [np.concatenate(([0.0], np.cumsum(values))) for values in listed]
    f, i, w = (total[ends] - total[ends - np.asarray(split)] for total in sums)
    return Entries(f, i, w), True


def _require_time(
    program: _Program, costs: Costs, kinds: FloatArray, *, ends_fixed: bool, between: int
) -> None:
    """Rows `T >= ...` of `over_placements`; `between` is 1 when every device holds an item."""
    p, m, slow = costs.num_devices, costs.num_microbatches, costs.device_slowdown
    first = kinds[0] * slow[0] if ends_fixed else np.zeros(3)
    least = kinds.min(axis=0) * between
    hop = float(costs.transfer_s[~np.eye(p, dtype=np.bool_)].min()) if p > 1 else 0.0
    others = np.concatenate(([0.0], np.cumsum(np.sort(slow[1:]))))
    rank = np.arange(p)
    inner = others[np.maximum(rank - 1, 0)] * (rank > 0)
    head = np.where(rank > 0, first[0] + inner * least[0] + rank * hop, 0.0)
    tail = np.where(rank > 0, first[1] + first[2] + inner * least[1] + rank * hop, 0.0)
    num_items = p * len(kinds)
    way: dict[int, float] = {}
    for d in range(p):
        columns = [d * len(kinds) + g for g in range(len(kinds))]
        place = [num_items + d * p + k for k in range(p)]
        work = dict(zip(columns, (kinds.sum(axis=1) * slow[d] * m).tolist(), strict=True))
        without_w = dict(zip(columns, (kinds[:, :2].sum(axis=1) * slow[d] * m).tolist(), strict=True))
        program.at_least(0.0, {**work, **dict(zip(place, head.tolist(), strict=True))})
        program.at_least(0.0, {**without_w, **dict(zip(place, (head + tail).tolist(), strict=True))})
        way.update(_times(without_w, 1 / m))
    program.at_least(2 * (p - 1) * hop + float(first[2]), way)
