"""The schedules of a table of layouts: one row a layout and schedule, and the groups of interleaved ones."""

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.cost.run import ScheduleKind
from quartet_plugin.model.costs import IntArray
from quartet_plugin.model.layout import Layout
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.table_rows import RECOMPUTE, layout_of, unique_rows
from quartet_plugin.schedule.named import lookup
from quartet_plugin.schedule.placement import PlacementKind
from quartet_plugin.space.config import SEARCHED, STOCK_NAMES, TABLE_SCHEDULES
from quartet_plugin.space.layouts import is_legal_group, is_requested, legal_groups
from quartet_plugin.space.schedules import custom_schedules_of

# The schedules by the number that stands for them in a table.
KINDS: tuple[ScheduleKind, ...] = (
    ScheduleKind.NONE,
    *(ScheduleKind(name) for name in TABLE_SCHEDULES if name != STOCK_NAMES[0]),
)
INTERLEAVED = KINDS.index(ScheduleKind.INTERLEAVED)


def is_turning(kind: ScheduleKind) -> bool:
    """Whether the second chunks run back over the devices: device 0 holds both ends of the model."""
    return kind.spec is not None and kind.spec.placement is PlacementKind.V


def is_searched(job: PlanRequest) -> bool:
    """Whether the job allows orders that are searched for."""
    return is_requested(job.search.schedule, SEARCHED)


def named_request(job: PlanRequest) -> tuple[str, ...] | None:
    """The schedules that the job asks for by name; None for all, also where only searched ones are."""
    requested = job.search.schedule
    return None if requested in (None, (SEARCHED,)) else requested


def schedules_of_rows(
    job: PlanRequest, *, pp: IntArray, virtual: IntArray, microbatches: IntArray, modes: IntArray
) -> tuple[IntArray, IntArray]:
    """The rows that have a schedule, once for each of them, and the numbers of the schedules in `KINDS`.

    Arguments are columns of the table, `modes` of indices of `RECOMPUTE`. The stock schedule of a row comes
    first.
    """
    stock = np.where(pp == 1, 0, np.where(virtual == 1, 1, 2))
    requested = named_request(job)
    allowed = np.array(
        [requested is None or "stock" in requested or name in requested for name in STOCK_NAMES]
    )
    runs = allowed[stock] & ((stock < INTERLEAVED) | _has_group(job, pp, microbatches))
    rows = [np.flatnonzero(runs)]
    kinds = [stock[runs]]
    for name, able in _custom_rows(job, pp, virtual, microbatches, modes).items():
        rows.append(np.flatnonzero(able))
        kinds.append(np.full(len(rows[-1]), KINDS.index(ScheduleKind(name)), dtype=np.int64))
    every, kind = np.concatenate(rows), np.concatenate(kinds)
    order = np.argsort(every, kind="stable")
    return every[order], kind[order]


def groups_of(job: PlanRequest, layout: Layout, kind: ScheduleKind) -> tuple[int | None, ...]:
    """The groups that a layout's schedule may have, the smallest first; (None,) where it has none."""
    if kind is not ScheduleKind.INTERLEAVED:
        return (None,)
    microbatches = layout.num_microbatches(job.global_batch_size)
    if job.search.group is None:
        return legal_groups(layout, num_microbatches=microbatches)
    return tuple(
        sorted(x for x in job.search.group if is_legal_group(x, layout, num_microbatches=microbatches))
    )


def _has_group(job: PlanRequest, pp: IntArray, microbatches: IntArray) -> NDArray[np.bool_]:
    """Whether an interleaved order of each row has a legal group; all microbatches are one."""
    requested = job.search.group
    legal = microbatches >= pp
    if requested is None:
        return legal
    fits = np.zeros(len(pp), dtype=np.bool_)
    for group in requested:
        rest = microbatches % group
        fits |= (pp <= group) & (group <= microbatches) & ((rest == 0) | (rest >= pp))
    return fits


def _custom_rows(
    job: PlanRequest, pp: IntArray, virtual: IntArray, microbatches: IntArray, modes: IntArray
) -> dict[str, NDArray[np.bool_]]:
    """Whether each row can have each custom schedule, by its name."""
    requested = named_request(job)
    custom = TABLE_SCHEDULES[len(STOCK_NAMES) :]
    offered = custom if requested is None else tuple(name for name in custom if name in requested)
    chunks = {lookup(name).chunks for name in offered}
    able = {name: np.zeros(len(pp), dtype=np.bool_) for name in offered}
    if not offered:
        return able
    may = (pp > 1) & (np.isin(virtual, [x for x in chunks if x]) | ((None in chunks) & (virtual > 1)))
    if job.search.group is not None and requested is None:
        # A requested group requests the interleaved schedule.
        may &= virtual == 1
    places = np.flatnonzero(may)
    keys, _, inverse = unique_rows(np.column_stack([pp, virtual, microbatches, modes])[places])
    is_able = np.zeros((len(keys), len(offered)), dtype=np.bool_)
    for number, (p, v, m, mode) in enumerate(keys.tolist()):
        layout = layout_of(1, 1, p, 1, 1, v, mode, 0)
        names = custom_schedules_of(
            layout,
            num_microbatches=m,
            requested=requested,
            splits_backward=RECOMPUTE[mode] != "full" and job.experts is None,
        )
        is_able[number] = [name in names for name in offered]
    for column, name in enumerate(offered):
        able[name][places] = is_able[inverse, column]
    return able
