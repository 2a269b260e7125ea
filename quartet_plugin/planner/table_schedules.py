"""Joins a table of layouts with their schedules: one row is a layout with a schedule."""

import numpy as np

from quartet_plugin.cost.run import ScheduleKind
from quartet_plugin.model.costs import IntArray
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.table_rows import layout_of, unique_rows
from quartet_plugin.schedule import placement as places
from quartet_plugin.schedule.placement import Placement, PlacementKind
from quartet_plugin.space.config import SEARCHED, STOCK_NAMES, TABLE_SCHEDULES
from quartet_plugin.space.features import objective_axes
from quartet_plugin.space.layouts import is_requested, schedules_of
from quartet_plugin.space.rules import LayoutRules

# The schedules by the number that stands for them in a table.
KINDS: tuple[ScheduleKind, ...] = (
    ScheduleKind.NONE,
    *(ScheduleKind(name) for name in TABLE_SCHEDULES if name != STOCK_NAMES[0]),
)


def has_v_placement(kind: ScheduleKind) -> bool:
    """Whether the schedule's placement is a V: device 0 holds both ends of the model."""
    return kind.spec is not None and kind.spec.placement is PlacementKind.V


def placement_of(kind: ScheduleKind, *, num_devices: int, num_chunks: int) -> Placement:
    """The pipeline rank of each stage under the schedule."""
    is_snake = kind.spec is not None and kind.spec.placement in (PlacementKind.V, PlacementKind.SNAKE)
    return places.snake(num_devices, num_chunks) if is_snake else places.loop(num_devices, num_chunks)


def is_searched(job: PlanRequest) -> bool:
    """Whether the job allows orders that are searched for."""
    return is_requested(job.search.schedule, SEARCHED)


def schedules_of_rows(
    rules: LayoutRules, shape: ModelShape, columns: IntArray, *, num_microbatches: IntArray
) -> tuple[IntArray, IntArray]:
    """The rows that have a schedule, once for each of them, and the numbers of the schedules in `KINDS`.

    `columns` are those of the table without schedules. The stock schedule of a row comes first.
    """
    # What schedules depend on: PP, virtual stages, microbatches and recompute; in a job whose loss depends on
    # its microbatches also DP and the micro-batch.
    depends = [2, 5, 8, 3, 4] if objective_axes(rules.job.features) else [2, 5, 8]
    keys = np.column_stack([columns[:, depends], num_microbatches])
    _, first, inverse = unique_rows(keys)
    offered = []
    for row in first.tolist():
        tp, cp, pp, dp, size, virtual, ep, _, mode, sharded = columns[row].tolist()
        layout = layout_of(tp, cp, pp, dp, size, virtual, mode, sharded, ep=ep)
        # Searched orders are no rows: to ask whether one may have any takes longer than the rest.
        names = schedules_of(layout, shape=shape, rules=rules, most_actions=0)
        offered.append([TABLE_SCHEDULES.index(name) for name in names if name != SEARCHED])
    counts = np.array([len(kinds) for kinds in offered], dtype=np.int64)
    starts = np.cumsum(counts) - counts
    every = np.repeat(np.arange(len(columns)), counts[inverse])
    within = np.arange(len(every)) - np.repeat(np.cumsum(counts[inverse]) - counts[inverse], counts[inverse])
    flat = np.array([kind for kinds in offered for kind in kinds], dtype=np.int64)
    return every, flat[starts[inverse[every]] + within]
