"""The best layouts of a job: bounds first, the full prediction only where a bound does not rule it out.

Equal devices are ranked in the launcher's order of ranks; on a cluster that is described in full every layout
is ranked with a mapping of its own, solved with little effort. `refine` then solves those of the best.

A layout is planned with its balanced split, and where that does not fit in memory with the split near it that
does (`fitting_split`). The bounds of the former order all layouts; then those that have no plan yet are
ordered by bounds on every split that fits (`fitting_bounds`).
"""

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.cost.cluster import best_case_cluster
from quartet_plugin.cost.constants import Constants, fitted
from quartet_plugin.cost.memory import Memory, available_bytes, distinct_numbers, peak_memory
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import ScheduleKind, TrainingRun
from quartet_plugin.errors import InfeasibleError
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.custom_schedule import CustomSchedule
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import STOCK, Split
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.assignment_search import (
    EQUAL,
    THOROUGH,
    Assignment,
    AssignmentProblem,
    AssignmentSolver,
    NoPlan,
    SolverEffort,
    assign,
)
from quartet_plugin.planner.bounds import LowerBounds, bounds_of
from quartet_plugin.planner.described_rules import rules_of
from quartet_plugin.planner.fitting_bounds import fitting_bounds, mean_rank_seconds
from quartet_plugin.planner.fitting_split import fitting_split
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.layout_table import (
    BALANCED,
    GIB,
    PP,
    SPLIT,
    LayoutTable,
    Refusal,
    TooLarge,
    layout_table_of,
    refused_degrees,
)
from quartet_plugin.planner.no_layout import no_layout_words
from quartet_plugin.planner.table_schedules import placement_of
from quartet_plugin.scaling.shapes import BudgetRule, equal_shapes
from quartet_plugin.space.expert_stages import fault_of_split
from quartet_plugin.space.knobs.mtp_stage import BEFORE_LAST, LAST, MTP_STAGE
from quartet_plugin.space.layouts import unused_mtp_stage

# Layouts of a cluster whose mappings are solved with more effort than for ranking.
REFINED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One planned layout and schedule. `equal_work_s` is its time for the FLOPs of the requested model.

    `group` is that of an interleaved schedule. `slots[r]` plays RANK r, None in the launcher's order;
    `stock_s` has the seconds of Megatron's stock orders where they were compared. `order` is a searched
    order, `gap` the makespan over a bound on every order with this split and placement, less one, where it is
    known. `is_mtp_before_last`: multi-token prediction lies on the stage before the last one.
    """

    shape: ModelShape
    layout: Layout
    split: tuple[int, ...]
    schedule: ScheduleKind
    group: int | None
    iteration_s: float
    equal_work_s: float
    terms: Mapping[str, float]
    memory: Memory
    slots: tuple[int, ...] | None = None
    stock_s: Mapping[str, float] | None = None
    order: CustomSchedule | None = None
    gap: float | None = None
    is_mtp_before_last: bool = False

    @property
    def stage_split(self) -> Split:
        """The split with the stage of multi-token prediction."""
        return Split.of(self.split, is_mtp_before_last=self.is_mtp_before_last)

    @property
    def schedule_label(self) -> str:
        """The schedule's name, with its group where there is one."""
        if self.order is not None:
            # A search may end with a named order, also with one that is not planned by itself.
            return "searched" if self.order.named is None else self.order.label
        return self.schedule.value if self.group is None else f"{self.schedule.value} g{self.group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The best layouts first, and how many of all were predicted, too large for memory, or pruned.

    A layout is too large where neither its first split fits nor another one that was tried. `limits` says
    what was cut off, one line each.
    """

    best: tuple[Ranked, ...]
    num_considered: int
    num_predicted: int
    num_too_large: int
    num_pruned: int
    too_large: tuple[TooLarge, ...] = ()
    limits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShapeLayouts:
    """The layouts of one shape; `scale` makes their times those for the FLOPs of the requested shape.

    `job` is the request for one stage of multi-token prediction.
    """

    job: PlanRequest
    shape: ModelShape
    table: LayoutTable
    bounds: LowerBounds
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnplannedRows:
    """The rows of a shape that have no plan with their first split, but may have a better one with another.

    `time_s` are lower bounds for equal work, and `memory_bytes` of any split. `is_unfit`: the first split is
    known not to fit.
    """

    rows: IntArray
    time_s: FloatArray
    memory_bytes: FloatArray
    is_unfit: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        layouts: _ShapeLayouts,
        is_planned: NDArray[np.bool_],
        is_over: NDArray[np.bool_],
        *,
        limit_bytes: float,
        limit_s: float,
    ) -> "_UnplannedRows":
        """Those of pipelines with a free split, that are not bounded by more than `limit_s` seconds."""
        columns, bounds = layouts.table.columns, layouts.bounds
        least_s = mean_rank_seconds(bounds, layouts.table) * layouts.scale
        rows = np.flatnonzero(_is_free(columns) & ~is_planned & (least_s <= limit_s))
        time_s, memory_bytes = fitting_bounds(
            bounds,
            layouts.shape,
            layouts.table,
            rows,
            limit_bytes=limit_bytes,
            limit_s=limit_s / layouts.scale,
        )
        if bounds.inputs.slowest > 1.0:
            # On unequal devices the row's own bound is of any split.
            time_s = np.maximum(time_s, bounds.time_s[rows])
        return cls(
            rows=rows, time_s=time_s * layouts.scale, memory_bytes=memory_bytes, is_unfit=is_over[rows]
        )

    def entries(self, *, limit_s: float, is_exhaustive: bool) -> Iterable[tuple[float, int, bool]]:
        """The bound of each row that is to be planned, the row, and whether its first split is unfit."""
        bounds = np.zeros(len(self.rows)) if is_exhaustive else self.time_s
        kept = np.isfinite(bounds) & (bounds <= limit_s)
        return zip(bounds[kept].tolist(), self.rows[kept].tolist(), self.is_unfit[kept].tolist(), strict=True)


@dataclass(slots=True, kw_only=True)
class _BestPlans:
    """The `top` best plans, the fastest first, and the number of all that were predicted."""

    top: int
    is_exhaustive: bool
    entries: list[tuple[float, int, int, Ranked]] = field(default_factory=list)
    num_predicted: int = 0

    @property
    def limit_s(self) -> float:
        """The most seconds for equal work that a further plan may take."""
        is_full = len(self.entries) == self.top and not self.is_exhaustive
        return self.entries[-1][0] if is_full else math.inf

    def add(self, index: int, row: int, ranked: Ranked) -> None:
        """Insert the plan of a row of the shape `index`."""
        self.num_predicted += 1
        bisect.insort(self.entries, (ranked.equal_work_s, index, row, ranked), key=lambda entry: entry[:3])
        del self.entries[self.top :]


def rank(
    job: PlanRequest,
    *,
    top: int = 1,
    exhaustive: bool = False,
    constants: Constants | None = None,
    moves_layers: bool = True,
) -> Ranking:
    """The `top` layouts that fit in memory, by predicted time for equal work.

    Layouts are predicted in the order of their bounds until no bound is under the last of the best, so the
    ranking is that of predicting all, which `exhaustive` does. `moves_layers`: a layout whose balanced split
    does not fit is planned with the split near it that does. Raises InfeasibleError when none is legal or
    none fits; it names the layout whose balanced split needs the least memory.
    """
    used = constants or fitted()
    layouts_by_shape = [
        _shape_layouts(of_stage, shape, used) for of_stage in _jobs_of(job) for shape in shapes_of(job)
    ]
    total = sum(len(layouts.table) for layouts in layouts_by_shape)
    if not total:
        raise InfeasibleError(no_layout_words(job))
    _check_mtp_stages(job, layouts_by_shape)
    solvers: dict[str, AssignmentSolver] = {}
    if job.cluster is not None:
        topology = job.topology(used)
        solvers = {each.mtp_stages[0]: AssignmentSolver(each, used, topology) for each in _jobs_of(job)}
    best = _BestPlans(top=top, is_exhaustive=exhaustive)
    limit_bytes = _available_bytes(job)
    is_over = [layouts.bounds.memory_bytes > limit_bytes for layouts in layouts_by_shape]
    is_planned = [np.zeros(len(layouts.table), dtype=np.bool_) for layouts in layouts_by_shape]
    for bound, index, row in _ordered(layouts_by_shape, limit_bytes=math.inf if exhaustive else limit_bytes):
        if bound > best.limit_s:
            break
        layouts = layouts_by_shape[index]
        solver = solvers.get(layouts.job.mtp_stages[0])
        ranked = _planned(layouts, row, used, solver, limit_s=best.limit_s / layouts.scale)
        is_over[index][row] = ranked is NoPlan.UNFIT
        if isinstance(ranked, Ranked):
            is_planned[index][row] = True
            best.add(index, row, ranked)
    least_bytes = [layouts.bounds.memory_bytes.copy() for layouts in layouts_by_shape]
    if moves_layers:
        others = [
            _UnplannedRows.of(layouts, planned, over, limit_bytes=limit_bytes, limit_s=best.limit_s)
            for layouts, planned, over in zip(layouts_by_shape, is_planned, is_over, strict=True)
        ]
        for index, rows in enumerate(others):
            least_bytes[index][rows.rows] = rows.memory_bytes
            # Those that are neither over nor planned cannot be faster.
            is_over[index][rows.rows] = np.isinf(rows.time_s)
        for bound, index, row, is_unfit in sorted(
            (bound, index, row, is_unfit)
            for index, rows in enumerate(others)
            for bound, row, is_unfit in rows.entries(limit_s=best.limit_s, is_exhaustive=exhaustive)
        ):
            if bound > best.limit_s:
                break
            layouts = layouts_by_shape[index]
            solver = solvers.get(layouts.job.mtp_stages[0])
            ranked = _planned_otherwise(
                layouts, row, used, solver, limit_s=best.limit_s / layouts.scale, is_unfit=is_unfit
            )
            is_over[index][row] = ranked is NoPlan.UNFIT
            if isinstance(ranked, Ranked):
                best.add(index, row, ranked)
    if not best.entries:
        raise InfeasibleError(_nearest(job, layouts_by_shape))
    num_too_large = sum(int(over.sum()) for over in is_over)
    return Ranking(
        best=tuple(entry[3] for entry in best.entries),
        num_considered=total,
        num_predicted=best.num_predicted,
        num_too_large=num_too_large,
        num_pruned=total - best.num_predicted - num_too_large,
        too_large=tuple(
            group
            for layouts, over, num_bytes in zip(layouts_by_shape, is_over, least_bytes, strict=True)
            for group in TooLarge.by_degrees(layouts.table.columns[over], num_bytes[over])
        ),
    )


def _jobs_of(job: PlanRequest) -> list[PlanRequest]:
    """The request for each stage that multi-token prediction may have: their layouts have other bounds."""
    return [job.of_mtp_stage(stage) for stage in job.mtp_stages]


def _check_mtp_stages(job: PlanRequest, layouts_by_shape: Iterable[_ShapeLayouts]) -> None:
    """Raises InfeasibleError for a requested stage of multi-token prediction that no layout has."""
    num_rows = dict.fromkeys(job.mtp_stages, 0)
    for layouts in layouts_by_shape:
        num_rows[layouts.job.mtp_stages[0]] += len(layouts.table)
    if job.search.mtp_stage is None or 0 not in num_rows.values():
        return
    tables = {layouts.shape: layouts.table for layouts in layouts_by_shape if len(layouts.table)}
    each = {shape: (table.layout(row) for row in range(len(table))) for shape, table in tables.items()}
    unused = next(stage for stage, num in num_rows.items() if not num)
    words = unused_mtp_stage(each, rules=rules_of(job)) if unused == BEFORE_LAST else None
    raise InfeasibleError(words or f"search.{MTP_STAGE.name}: {unused}; no layout of the job has it")


def best_plans(
    job: PlanRequest,
    *,
    top: int = 1,
    exhaustive: bool = False,
    constants: Constants | None = None,
    moves_layers: bool = True,
) -> Ranking:
    """The `top` layouts, mappings solved; more are ranked first where that can change their order."""
    more = top if job.cluster is None else max(top, REFINED)
    ranking = rank(job, top=more, exhaustive=exhaustive, constants=constants, moves_layers=moves_layers)
    refined = refine(job, ranking, constants=constants)
    return replace(refined, best=refined.best[:top], limits=tuple(_limits(job, ranking)))


def _limits(job: PlanRequest, ranking: Ranking) -> Iterator[str]:
    """The layouts of a described cluster whose mappings are not solved one by one."""
    num_fitting = ranking.num_considered - ranking.num_too_large
    if job.cluster is not None and may_solve(job) and num_fitting > len(ranking.best):
        yield (
            f"mappings: solved one by one only for the best {len(ranking.best)} of {num_fitting} layouts; "
            "the others share those of their degrees"
        )


def may_solve(job: PlanRequest) -> bool:
    """Whether mappings, or splits where devices differ, are solved for the job."""
    return job.search.mapping is None or job.has_unequal_devices


def refine(
    job: PlanRequest,
    ranking: Ranking,
    *,
    constants: Constants | None = None,
    effort: SolverEffort | None = None,
) -> Ranking:
    """The same layouts with mappings (and splits where devices differ) of their own, ranked again.

    Unchanged where the job names its orders and devices are equal.
    """
    if not may_solve(job):
        return ranking
    used = constants or fitted()
    effort = effort or (EQUAL if job.cluster is None else THOROUGH)
    topology = job.topology(used)
    refined = []
    for ranked in ranking.best:
        problem = AssignmentProblem(
            job=job.of_mtp_stage(BEFORE_LAST if ranked.is_mtp_before_last else LAST),
            shape=ranked.shape,
            layout=ranked.layout,
            split=ranked.split,
            schedule=ranked.schedule,
            group=ranked.group,
            constants=used,
            topology=topology,
            may_split=job.search.split is None,
        )
        better = assign(problem, effort=effort)
        if better is not None and _lacks_experts(job, ranked.layout, better.split, ranked.schedule):
            better = None
        if better is not None and better.prediction.iter_time_s <= ranked.iteration_s * (1 + 1e-12):
            ranked = _with(ranked, better)
        refined.append(ranked)
    refined.sort(key=lambda ranked: ranked.equal_work_s)
    return replace(ranking, best=tuple(refined))


def refusals(job: PlanRequest, ranking: Ranking | None) -> list[Refusal]:
    """Why layouts were refused, the reason that refused most first: degrees, then memory."""
    too_large, available = () if ranking is None else ranking.too_large, _available_bytes(job)
    return [
        *refused_degrees(job, job.shape),
        *(group.refusal(available) for group in sorted(too_large, key=lambda group: -group.num_layouts)),
    ]


def shapes_of(job: PlanRequest) -> tuple[ModelShape, ...]:
    """The shapes of the job: the requested one, or those of an equal budget that it searches."""
    scaling = job.search.scaling
    if scaling is None:
        return (job.shape,)
    rule = BudgetRule(**scaling.model_dump())
    rule.check_proportions(job.shape)
    return equal_shapes(job.shape, rule=rule)


def _shape_layouts(job: PlanRequest, shape: ModelShape, constants: Constants) -> _ShapeLayouts:
    table = layout_table_of(job, shape)
    bounded, used = job, constants
    if job.cluster is not None:
        machines, used = best_case_cluster(job.cluster, constants)
        bounded = replace(job, machines=machines)
    return _ShapeLayouts(
        job=job,
        shape=shape,
        table=table,
        bounds=bounds_of(
            bounded,
            shape,
            table,
            constants=used,
            slowdown=slowdown_of(job),
            limit_bytes=_available_bytes(job),
        ),
        scale=job.shape.model_flops_per_sequence / shape.model_flops_per_sequence,
    )


def least_seconds(
    job: PlanRequest, *, constants: Constants
) -> Iterator[tuple[ModelShape, LayoutTable, FloatArray]]:
    """Each shape with its table, and seconds for equal work that a row is not under with its first split.

    Where that does not fit in memory, no split that fits is under them; they are infinite where none fits.
    Of several stages of multi-token prediction each has a table.
    """
    limit_bytes = _available_bytes(job)
    for of_stage, shape in itertools.product(_jobs_of(job), shapes_of(job)):
        layouts = _shape_layouts(of_stage, shape, constants)
        bounds, columns = layouts.bounds, layouts.table.columns
        is_over = bounds.memory_bytes > limit_bytes
        time_s = np.where(is_over, np.inf, bounds.time_s)
        others = np.flatnonzero(is_over & _is_free(columns))
        time_s[others], _ = fitting_bounds(bounds, shape, layouts.table, others, limit_bytes=limit_bytes)
        yield shape, layouts.table, time_s * layouts.scale


def _is_free(columns: IntArray) -> NDArray[np.bool_]:
    """Whether layers of a row may move: its split is not given, and it has several pipeline ranks."""
    is_free: NDArray[np.bool_] = (columns[:, SPLIT] == BALANCED) & (columns[:, PP] > 1)
    return is_free


def slowdown_of(job: PlanRequest) -> FloatArray | None:
    """The slowdown of each slot [num_slots]; None where all devices are equal."""
    return job.cluster.slowdown if job.cluster is not None and job.has_unequal_devices else None


def _ordered(layouts_by_shape: list[_ShapeLayouts], *, limit_bytes: float) -> list[tuple[float, int, int]]:
    """(bound, index of shape, row) by rising bound, of layouts whose memory may be under `limit_bytes`."""
    scaled = np.concatenate([layouts.bounds.time_s * layouts.scale for layouts in layouts_by_shape])
    memory = np.concatenate([layouts.bounds.memory_bytes for layouts in layouts_by_shape])
    owner = np.repeat(np.arange(len(layouts_by_shape)), [len(layouts.table) for layouts in layouts_by_shape])
    rows = np.concatenate([np.arange(len(layouts.table)) for layouts in layouts_by_shape])
    order = np.argsort(scaled, kind="stable")
    order = order[memory[order] <= limit_bytes]
    return list(zip(scaled[order].tolist(), owner[order].tolist(), rows[order].tolist(), strict=True))


def _planned(
    layouts: _ShapeLayouts,
    row: int,
    constants: Constants,
    solver: AssignmentSolver | None,
    *,
    limit_s: float = math.inf,
) -> Ranked | NoPlan:
    """The row with its best group's prediction, or why there is none; none over `limit_s` need be made."""
    refused = None if limit_s == math.inf else lru_cache(partial(_refused, layouts, row, limit_s))
    split = layouts.bounds.split(layouts.job, layouts.shape, layouts.table, row)
    return _best_of(
        _planned_with(layouts, row, group, split, constants, solver, limit_s, refused)
        for group in layouts.table.groups(row)
    )


def _planned_otherwise(
    layouts: _ShapeLayouts,
    row: int,
    constants: Constants,
    solver: AssignmentSolver | None,
    *,
    limit_s: float,
    is_unfit: bool,
) -> Ranked | NoPlan:
    """The row as `_planned`, with the split near its first one that fits.

    There is none where the first split fits, with any group: it is too slow. `is_unfit`: it does not.
    """
    job, shape, table, bounds = layouts.job, layouts.shape, layouts.table, layouts.bounds
    layout, schedule, groups = table.layout(row), table.schedule(row), table.groups(row)
    split, end_loads = bounds.split(job, shape, table, row), bounds.end_loads(row)
    refused = None if limit_s == math.inf else lru_cache(partial(_refused, layouts, row, limit_s))

    def run_of(counts: tuple[int, ...], group: int | None) -> TrainingRun:
        return job.run(shape, layout, counts, schedule=schedule, group=group)

    if solver is not None and not is_unfit:
        tried = solver.splits(shape, layout, split, schedule=schedule)
        if any(peak_memory(run_of(counts, group)).fits for counts in tried for group in groups):
            return NoPlan.TOO_SLOW
    near: dict[int | None, tuple[int, ...] | None] = {}
    for group in groups:
        near[group] = fitting_split(split, run_of=partial(run_of, group=group), end_loads=end_loads)
        if solver is None and not is_unfit and near[group] == split:
            return NoPlan.TOO_SLOW

    def planned(group: int | None) -> Ranked | NoPlan:
        moved = near[group]
        if moved is None:
            return NoPlan.UNFIT
        reason = None if refused is None else refused(moved)
        return reason or _planned_with(
            layouts, row, group, moved, constants, solver, limit_s, refused, is_alone=True
        )

    return _best_of(planned(group) for group in groups)


def _best_of(planned_groups: Iterable[Ranked | NoPlan]) -> Ranked | NoPlan:
    """The fastest plan of a row's groups, or why there is none."""
    planned = list(planned_groups)
    able = [ranked for ranked in planned if isinstance(ranked, Ranked)]
    if able:
        return min(able, key=lambda ranked: ranked.iteration_s)
    return NoPlan.TOO_SLOW if NoPlan.TOO_SLOW in planned else NoPlan.UNFIT


def _refused(layouts: _ShapeLayouts, row: int, limit_s: float, split: tuple[int, ...]) -> NoPlan | None:
    """Why the row cannot be planned with a split, by its bounds; None where it may."""
    time, memory = layouts.bounds.of_split(layouts.table, row, split)
    if memory > _available_bytes(layouts.job):
        return NoPlan.UNFIT
    return NoPlan.TOO_SLOW if time > limit_s else None


def _planned_with(
    layouts: _ShapeLayouts,
    row: int,
    group: int | None,
    split: tuple[int, ...],
    constants: Constants,
    solver: AssignmentSolver | None,
    limit_s: float,
    refused: Callable[[tuple[int, ...]], NoPlan | None] | None,
    *,
    is_alone: bool = False,
) -> Ranked | NoPlan:
    """The row's prediction with one group and split.

    On a described cluster a free split is tried beside another one, unless it `is_alone`; splits that are
    `refused` are not tried.
    """
    job, layout, schedule = layouts.job, layouts.table.layout(row), layouts.table.schedule(row)
    if _lacks_experts(job, layout, split, schedule):
        return NoPlan.UNFIT
    ranked = partial(
        Ranked,
        shape=layouts.shape,
        layout=layout,
        split=split,
        schedule=schedule,
        group=group,
        is_mtp_before_last=job.has_mtp_before_last,
    )
    if solver is None:
        run = job.run(layouts.shape, layout, split, schedule=schedule, group=group)
        # Memory takes less to compute: it goes first while no time is too long.
        memory = peak_memory(run) if limit_s == math.inf else None
        if memory is not None and not memory.fits:
            return NoPlan.UNFIT
        prediction = predict(run, constants)
        time = prediction.iter_time_s
        if time > limit_s:
            return NoPlan.TOO_SLOW
        memory = memory or peak_memory(run)
        if not memory.fits:
            return NoPlan.UNFIT
        return ranked(
            iteration_s=time, equal_work_s=time * layouts.scale, terms=prediction.terms, memory=memory
        )
    is_free = int(layouts.table.columns[row, SPLIT]) == BALANCED
    assignment = solver.assign(
        layouts.shape,
        layout,
        split,
        may_split=is_free,
        schedule=schedule,
        group=group,
        limit_s=limit_s,
        refused=refused,
        is_alone=is_alone,
    )
    if isinstance(assignment, NoPlan):
        return assignment
    if _lacks_experts(job, layout, assignment.split, schedule):
        return NoPlan.UNFIT
    bare = ranked(iteration_s=1.0, equal_work_s=layouts.scale, terms={}, memory=assignment.memory)
    return _with(bare, assignment)


def _lacks_experts(job: PlanRequest, layout: Layout, split: tuple[int, ...], schedule: ScheduleKind) -> bool:
    """Whether a pipeline rank has none of the layers of which each needs one."""
    if not job.logged_expert_layers:
        return False
    devices, chunks = layout.pipeline_parallel, layout.virtual_stages
    placement = placement_of(schedule, num_devices=devices, num_chunks=chunks)
    return fault_of_split(split, placement=placement, expert_layers=job.logged_expert_layers) is not None


def _with(ranked: Ranked, assignment: Assignment) -> Ranked:
    """The layout with an assignment; the scale of its shape stays."""
    time = assignment.prediction.iter_time_s
    return replace(
        ranked,
        split=assignment.split,
        iteration_s=time,
        equal_work_s=time * ranked.equal_work_s / ranked.iteration_s,
        terms=assignment.prediction.terms,
        memory=assignment.memory,
        slots=None if list(assignment.slots) == sorted(assignment.slots) else assignment.slots,
        stock_s=assignment.stock_s,
    )


def _available_bytes(job: PlanRequest) -> float:
    return available_bytes(float(job.machines.memory_bytes))


def _nearest(job: PlanRequest, layouts_by_shape: list[_ShapeLayouts]) -> str:
    """Which layout needs the least memory, and how much too much that is."""
    order = sorted(
        (float(layouts.bounds.memory_bytes[row]), index, row)
        for index, layouts in enumerate(layouts_by_shape)
        for row in range(len(layouts.table))
    )
    best: tuple[float, Layout, Memory] | None = None
    for bound, index, row in order:
        if best is not None and bound >= best[0]:
            break
        layouts = layouts_by_shape[index]
        layout = layouts.table.layout(row)
        split = layouts.bounds.split(layouts.job, layouts.shape, layouts.table, row)
        schedule = layouts.table.schedule(row)
        group = layouts.table.groups(row)[0]
        memory = peak_memory(layouts.job.run(layouts.shape, layout, split, schedule=schedule, group=group))
        if best is None or memory.total_bytes < best[0]:
            best = (memory.total_bytes, layout, memory)
    assert best is not None
    total, layout, memory = best
    orders = job.search.mapping or (STOCK,)
    if memory.fits and STOCK not in orders:
        asked = ", ".join(orders)
        return f"search.mapping: {asked}; none of {len(order)} layouts can have it; choose auto or stock"
    if memory.fits:
        groups = ", ".join(job.search.inside) or "tensor"
        return (
            f"mapping: none of {len(order)} layouts has an order of ranks with its {groups} parallel groups "
            "inside a scale-up domain and RANK 0 on the first node; allow smaller degrees"
        )
    largest = max(memory.terms, key=lambda name: memory.terms[name]).removesuffix("_bytes")
    needed, available = distinct_numbers(total / GIB, memory.available_bytes / GIB, digits=1)
    return (
        f"memory: none of {len(order)} layouts fits; the nearest, {layout.label} recompute {layout.recompute}"
        f"{' distributed optimizer' if layout.distributed_optimizer else ''}, needs {needed} GiB of the "
        f"{available} GiB that are usable on pipeline rank {memory.device} (most: {largest}); use more or "
        "larger devices, or allow more of search"
    )
