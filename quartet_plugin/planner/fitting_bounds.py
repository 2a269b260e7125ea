"""Lower bounds on the seconds of a layout over all splits whose pipeline ranks fit in memory.

A pipeline takes at least fill_d + num_microbatches * busy_d for each rank d (`bounds`), whatever its split.
In a given time a rank therefore runs a number of whole layers at most, and its memory holds a number of them
at most. A time in which all ranks together cannot have the model's layers is a lower bound. Where layers are
of several kinds, each counts as a part of one of the last kind, and layers need not be whole.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.cost.run import ScheduleKind
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.bound_units import UnitRows
from quartet_plugin.planner.bounds import (
    ROUNDING,
    BoundInputs,
    LowerBounds,
    extrapolation,
    in_flight_at_least,
)
from quartet_plugin.planner.layout_table import PP, SCHEDULE, VIRTUAL, LayoutTable
from quartet_plugin.planner.table_rows import unique_rows
from quartet_plugin.planner.table_schedules import KINDS, has_v_placement

# Steps of the search for the least time.
_HALVINGS = 16


def mean_rank_seconds(bounds: LowerBounds, table: LayoutTable) -> FloatArray:
    """Seconds that no split of each row is under: those of the mean rank's work, without waiting."""
    inputs, pp = bounds.inputs, table.columns[:, PP]
    rows = np.arange(len(table))
    work = _work_s(inputs.units, rows)
    return inputs.seconds(rows, inputs.microbatches * work / pp * extrapolation(inputs.microbatches, pp))


def fitting_bounds(
    bounds: LowerBounds,
    shape: ModelShape,
    table: LayoutTable,
    rows: IntArray,
    *,
    limit_bytes: float,
    limit_s: float = math.inf,
) -> tuple[FloatArray, FloatArray]:
    """The seconds and bytes that no split of `rows` is under, for any order of ranks.

    The seconds are those of splits whose ranks fit in `limit_bytes`, infinite where none does. A bound over
    `limit_s` is not made tighter.
    """
    time_s, memory_bytes = np.full(len(rows), np.inf), np.zeros(len(rows))
    keys, _, groups = unique_rows(table.columns[rows][:, [PP, VIRTUAL, SCHEDULE]])
    order = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(len(keys) + 1))
    for group, (pp, virtual, number) in enumerate(keys.tolist()):
        here = order[edges[group] : edges[group + 1]]
        pipeline = _Pipeline(
            inputs=bounds.inputs,
            rows=rows[here],
            num_layers=shape.num_layers,
            pp=pp,
            virtual=virtual,
            schedule=KINDS[number],
        )
        time_s[here], memory_bytes[here] = pipeline.bounds(limit_bytes=limit_bytes, limit_s=limit_s)
    return time_s, memory_bytes


def _work_s(units: UnitRows, rows: IntArray) -> FloatArray:
    """Seconds of a microbatch on all ranks together [rows]."""
    work: FloatArray = units.least[rows, 2:6].sum(axis=1) + units.least[rows, 17]
    for kind, num in zip(units.kinds, units.totals, strict=True):
        work = work + num * kind[rows, :2].sum(axis=1)
    return work


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipeline:
    """Rows with one number of ranks and stages and one schedule."""

    inputs: BoundInputs
    rows: IntArray
    num_layers: int
    pp: int
    virtual: int
    schedule: ScheduleKind

    def bounds(self, *, limit_bytes: float, limit_s: float) -> tuple[FloatArray, FloatArray]:
        """The bounds of each row's seconds and of its splits, as `fitting_bounds` returns them."""
        inputs, rows = self.inputs, self.rows
        microbatches = inputs.microbatches[rows]
        memory_bytes, most, part = self._memory(limit_bytes)
        smallest = np.minimum(1.0, part.min(axis=1, keepdims=True))
        fits = (memory_bytes <= limit_bytes) & (most >= self._least_layers * smallest).all(axis=1)
        left = extrapolation(microbatches, self.pp)
        mean_s = microbatches * _work_s(inputs.units, rows) / self.pp
        time_s = inputs.seconds(rows, mean_s * left)
        near = np.flatnonzero(fits & (time_s <= limit_s))
        if len(near):
            span = self._least_span(near, most[near], part[near], least_s=mean_s[near])
            time_s[near] = inputs.seconds(rows[near], span * left[near])
        return np.where(fits, time_s, np.inf), memory_bytes

    @property
    def _is_of_one_kind(self) -> bool:
        return len(self.inputs.units.kinds) == 1

    def _num_layers_by_parts(self, part: FloatArray) -> FloatArray:
        """The model's layers in those of the last kind [rows]; each counts as `part` [rows, num_kinds]."""
        *others, last = self.inputs.units.totals
        num: FloatArray = last + (part[:, :-1] * np.array(others)).sum(axis=1)
        return num

    @property
    def _least_layers(self) -> IntArray:
        """The layers of each rank at least [pp]: one a stage, but for the first and the last stage.

        With multi-token prediction on the stage before the last one, that stage may have none, too.
        """
        least = np.full(self.pp, self.virtual, dtype=np.int64)
        least[0] -= 1
        least[0 if has_v_placement(self.schedule) else -1] -= 1
        if self.inputs.units.is_mtp_before_last:
            least[-2] -= 1
        return np.maximum(0, least)

    def _memory(self, limit_bytes: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The least peak in bytes [rows], the most layers of ranks [rows, pp], and the parts of the kinds.

        Layers are counted in those of the last kind. A part [rows, num_kinds] is the bytes of a layer of the
        kind over those of one of the last kind, the least of all ranks.
        """
        units, rows, ranks = self.inputs.units, self.rows, np.arange(self.pp)
        each, total = in_flight_at_least(self.schedule, self.virtual, self.pp, self.inputs.microbatches[rows])
        least = units.least[rows]
        # Every stage but the first and the last one holds a layer, of `each` microbatches at least.
        is_inner = self._least_layers == self.virtual
        fixed = least[:, 7:8] * total + least[:, 6:7] * (total - self.virtual * each) * is_inner
        fixed = fixed + least[:, 9:10] * (ranks == 0)
        *_, last = num_bytes = [kind[rows, 8:9] + kind[rows, 6:7] * each for kind in units.kinds]
        part = np.stack([(of_kind / last).min(axis=1) for of_kind in num_bytes], axis=1)
        num = self._num_layers_by_parts(part)
        peak = (num + (fixed / last).sum(axis=1)) / (1.0 / last).sum(axis=1)
        most = (limit_bytes - fixed) / last * (1 + ROUNDING)
        if self._is_of_one_kind:
            most = np.floor(most)
            peak = np.where(most.sum(axis=1) >= num, peak, np.maximum(peak, limit_bytes * (1 + 2 * ROUNDING)))
        return peak * (1 - ROUNDING), most, part

    def _least_span(
        self, near: IntArray, most: FloatArray, part: FloatArray, *, least_s: FloatArray
    ) -> FloatArray:
        """Seconds that the pipelines of some rows take at least, with `most` layers on the ranks.

        They are `least_s` at least. An interval that holds the least span is halved until it is narrow.
        """
        inputs, rows, kinds = self.inputs, self.rows[near], self.inputs.units.kinds
        microbatches = inputs.microbatches[rows][:, None]
        *_, layer_s = seconds = [kind[rows, :2].sum(axis=1, keepdims=True) for kind in kinds]
        part = np.minimum(part, np.concatenate([of_kind / layer_s for of_kind in seconds], axis=1))
        num = self._num_layers_by_parts(part)
        least = self._least_layers * np.minimum(1.0, part.min(axis=1, keepdims=True))
        each_s, once_s = inputs.transfer_waits(rows, self.pp, self.virtual, self.schedule)
        ends_s, fill_s = self._ends_and_fill(inputs.units.least[rows])
        fixed_s, once_s = ends_s + each_s, fill_s + once_s

        def is_enough(span: FloatArray) -> NDArray[np.bool_]:
            layers = ((span[:, None] - once_s) / microbatches - fixed_s) / layer_s + ROUNDING
            layers = np.floor(layers) if self._is_of_one_kind else layers
            has_all: NDArray[np.bool_] = np.minimum(layers, most).sum(axis=1) >= num * (1 - ROUNDING)
            return has_all & (layers >= least).all(axis=1)

        low = least_s
        longest_s = np.concatenate(seconds, axis=1).max(axis=1) * (self.num_layers + 1)
        high = once_s.max(axis=1) + microbatches[:, 0] * (fixed_s.max(axis=1) + longest_s)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            enough = is_enough(middle)
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return low

    def _ends_and_fill(self, units: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Seconds of a microbatch in each rank's ends, and before and after the rank [rows, pp].

        Every stage before a rank's first one holds a layer, but for the model's first stage, and one with
        multi-token prediction. Where backwards are split nothing has to follow.
        """
        ranks = np.arange(self.pp)
        embedding, head = units[:, 2:6].reshape(-1, 2, 2).sum(axis=2).T
        ends = np.zeros((len(units), self.pp))
        ends[:, 0] += embedding
        ends[:, 0 if has_v_placement(self.schedule) else -1] += head
        if self.inputs.units.is_mtp_before_last:
            ends[:, -2] += units[:, 17]
        passes = slice(0, 1) if self.schedule.splits_backward else slice(0, 2)
        of_layer, of_embedding = units[:, :2][:, passes].sum(axis=1), units[:, 2:4][:, passes].sum(axis=1)
        num_before = np.maximum(0, ranks - 1)
        if self.inputs.units.is_mtp_before_last:
            num_before = np.maximum(0, np.minimum(ranks, self.pp - 2) - 1)
        fill = of_layer[:, None] * num_before + of_embedding[:, None] * (ranks > 0)
        return ends, fill
