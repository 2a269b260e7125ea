"""The mapping, and where devices differ the split that goes with it, of one planned layout.

The solver's closed form proposes orders of slots; the whole prediction decides among its proposals and
Megatron's stock orders, so the result is never predicted slower than either of those.
"""

import functools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from quartet_plugin.cost.cluster import best_case_cluster
from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.iteration.assigned import AssignedRun
from quartet_plugin.cost.iteration.step import RowPrediction, contention_gain
from quartet_plugin.cost.iteration.terms import COLLECTIVES, StageParts, stage_parts, unit_parts
from quartet_plugin.cost.memory import Memory, peak_memory
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import ScheduleKind, TrainingRun
from quartet_plugin.errors import PlanError
from quartet_plugin.mapping.solve import NEVER_S, STOCK_ORDERS, Solution, stock_arrangement
from quartet_plugin.mapping.topology import Topology, blocks_of, crossings_in_order, degrees_alone
from quartet_plugin.model.costs import Costs, FloatArray, LayerCost
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import STOCK
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.bound_units import jobs_of_kinds, layers_before_of, small_run
from quartet_plugin.planner.bounds import EXTRAPOLATION
from quartet_plugin.planner.closed_form import solve_step, step_costs, step_s
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.limited_orders import limited_orders_of, requested_orders
from quartet_plugin.planner.table_schedules import has_v_placement
from quartet_plugin.schedule import placement as places
from quartet_plugin.space.expert_stages import split_with_experts
from quartet_plugin.split.entries import balanced_entries
from quartet_plugin.split.kinds import KindLoads, balanced_by_kinds, least_by_stage
from quartet_plugin.split.layers import layers_of

# Rounds of solving the mapping for a split and the split for a mapping.
MAX_ROUNDS = 4
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverEffort:
    """The effort spent on one layout's mapping.

    `evaluations` of local search are fewer where more than `blocks` are assigned. The whole prediction judges
    `num_predicted` of the solver's orders.
    """

    evaluations: int
    exact_limit: int
    blocks: int = 32
    num_predicted: int = 1

    def evaluations_of(self, num_blocks: int) -> int:
        """Steps of local search."""
        return self.evaluations * min(self.blocks, num_blocks) // num_blocks


QUICK = SolverEffort(evaluations=40, exact_limit=60)
THOROUGH = SolverEffort(evaluations=1500, exact_limit=5000, num_predicted=12)
# Equal devices and links: beyond a few arrangements the regular tilings are all that need be tried.
EQUAL = SolverEffort(evaluations=0, exact_limit=120)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A layout's split and slots: slot `slots[r]` plays RANK r; `stock_s` has the stock orders' seconds."""

    split: tuple[int, ...]
    slots: tuple[int, ...]
    prediction: RowPrediction
    memory: Memory
    stock_s: dict[str, float]


class NoPlan(Enum):
    """Why a layout is not planned."""

    UNFIT = "no order of ranks is legal, or nothing fits in memory"
    TOO_SLOW = "it takes more seconds than were allowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedFormAssignment:
    """A split and an order of slots by the solver's closed form; `slowdowns` as `AssignedRun.slowdowns`."""

    split: tuple[int, ...]
    slots: tuple[int, ...]
    slowdowns: tuple[float, ...]
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentProblem:
    """One layout whose ranks are assigned to the slots of `topology`.

    Where devices differ and `may_split`, other splits than `split` are tried as well. `schedule` None is the
    stock one.
    """

    job: PlanRequest
    shape: ModelShape
    layout: Layout
    split: tuple[int, ...]
    constants: Constants
    topology: Topology
    schedule: ScheduleKind | None = None
    group: int | None = None
    may_split: bool = True

    def assignments[A: Assignment | ClosedFormAssignment](
        self, assignment_of: Callable[[AssignedRun], A | None]
    ) -> Iterator[A]:
        """The assignments of the splits to try: each next split follows from the slots of the one before."""
        job, layout = self.job, self.layout
        splits = [self.split]
        if self.may_split and job.has_unequal_devices and layout.pipeline_parallel > 1:
            splits += self._first_splits()
        tried: set[tuple[int, ...]] = set()
        for start in splits:
            split = start
            for _ in range(MAX_ROUNDS if len(splits) > 1 else 1):
                if split in tried:
                    break
                tried.add(split)
                planned = job.run(self.shape, layout, split, schedule=self.schedule, group=self.group)
                run = AssignedRun(planned, self.constants, self.topology)
                assignment = assignment_of(run)
                if assignment is None:
                    break
                yield assignment
                if len(splits) > 1:
                    slowdowns = run.slowdowns(assignment.slots)
                    split = self._balanced(slowdowns)

    def _balanced(self, slowdowns: FloatArray) -> tuple[int, ...]:
        return balanced_split(
            self.job, self.shape, self.layout, self.constants, slowdowns, schedule=self.schedule
        )

    def _first_splits(self) -> list[tuple[int, ...]]:
        """Splits for the slowest devices together on one pipeline rank: the last one, the first one."""
        job, layout = self.job, self.layout
        assert job.cluster is not None
        slowest = np.sort(job.cluster.slowdown).reshape(layout.pipeline_parallel, -1).max(axis=1)
        splits = [self._balanced(slowdowns) for slowdowns in (slowest, slowest[::-1])]
        return [split for split in splits if split != self.split]


def assign(problem: AssignmentProblem, *, effort: SolverEffort = THOROUGH) -> Assignment | None:
    """The assignment of least predicted time; None where no order is legal or nothing fits in memory."""

    def assignment_of(run: AssignedRun) -> Assignment | None:
        memory = peak_memory(run.run)
        return _best_solved(problem.job, run, memory, effort) if memory.fits else None

    return min(
        problem.assignments(assignment_of),
        key=lambda assignment: assignment.prediction.iter_time_s,
        default=None,
    )


def closed_form_assignment(
    problem: AssignmentProblem, *, effort: SolverEffort = QUICK
) -> ClosedFormAssignment | None:
    """The assignment with the least closed-form step, whatever memory it needs: many times faster."""

    def assignment_of(run: AssignedRun) -> ClosedFormAssignment | None:
        solved = _solved(problem.job, run, effort)
        if solved is None:
            return None
        return ClosedFormAssignment(
            split=run.run.layers_per_stage,
            slots=solved.slots,
            slowdowns=tuple(run.slowdowns(solved.slots).tolist()),
            step_s=solved.step_s,
        )

    return min(problem.assignments(assignment_of), key=lambda assignment: assignment.step_s, default=None)


class AssignmentSolver:
    """Assignments of many layouts: layouts of equal degrees form an equivalence class and share a mapping.

    The mapping is solved once a class, at micro-batch 1 without recompute and virtual stages, together with
    the split. Each layout takes the best, by its own prediction, of its own split and the split for that
    mapping, in that mapping and in the stock orders. The result does not depend on the order of the calls.
    """

    def __init__(
        self, job: PlanRequest, constants: Constants, topology: Topology, *, effort: SolverEffort = QUICK
    ) -> None:
        self._job, self._constants, self._topology, self._effort = job, constants, topology, effort
        assert job.cluster is not None, "equal devices keep the launcher's order while they are ranked"
        self._ideal = best_case_cluster(job.cluster, constants, is_one_domain=True)
        self._classes: dict[
            tuple[ModelShape, Layout, tuple[int, ...] | None], ClosedFormAssignment | None
        ] = {}
        self._splits: dict[tuple[ModelShape, Layout, bool], tuple[int, ...]] = {}

    def assign(
        self,
        shape: ModelShape,
        layout: Layout,
        split: tuple[int, ...],
        *,
        may_split: bool,
        schedule: ScheduleKind,
        group: int | None = None,
        limit_s: float = math.inf,
        refused: Callable[[tuple[int, ...]], NoPlan | None] | None = None,
        is_alone: bool = False,
    ) -> Assignment | NoPlan:
        """What the function `assign` gives, with the split and the mapping of the layout's equivalence class.

        Splits that take over `limit_s` seconds in every order of ranks are left out, and those that are
        `refused` by a bound. `is_alone`: no other split than `split` is tried, although others are allowed.
        """
        job = self._job
        plain = _plain(layout)
        shared = self._equivalence_class(shape, plain, None if may_split else split)
        if shared is None:
            return NoPlan.UNFIT
        splits: tuple[tuple[int, ...], ...] = (split,)
        if may_split and not is_alone:
            splits = self.splits(shape, layout, split, schedule=schedule)
        orders = {"solved": shared.slots} if may_move(job) else requested_orders(job, layout, self._topology)
        best: Assignment | None = None
        refusal = NoPlan.UNFIT
        for tried in splits:
            reason = None if refused is None else refused(tried)
            if reason is not None:
                refusal = NoPlan.TOO_SLOW if reason is NoPlan.TOO_SLOW else refusal
                continue
            run = job.run(shape, layout, tried, schedule=schedule, group=group)
            memory = peak_memory(run)
            if not memory.fits:
                continue
            if self._least_s(run, limit_s) > limit_s:
                refusal = NoPlan.TOO_SLOW
                continue
            assigned = AssignedRun(run, self._constants, self._topology)
            if self._is_over(assigned, orders, limit_s):
                refusal = NoPlan.TOO_SLOW
                continue
            assignment = _best_of(job, assigned, memory, orders)
            if assignment is not None and (
                best is None or assignment.prediction.iter_time_s < best.prediction.iter_time_s
            ):
                best = assignment
        return best or refusal

    def splits(
        self, shape: ModelShape, layout: Layout, split: tuple[int, ...], *, schedule: ScheduleKind
    ) -> tuple[tuple[int, ...], ...]:
        """The splits that are tried where it is free; none without a class.

        On equal devices it is `split` alone, whose bounds rank the layouts; else also that of the class.
        """
        plain = _plain(layout)
        shared = self._equivalence_class(shape, plain, None)
        if shared is None:
            return ()
        if not self._job.has_unequal_devices:
            return (split,)
        return tuple(dict.fromkeys([split, self._split(shape, plain, shared, schedule)]))

    def _is_over(self, run: AssignedRun, orders: Mapping[str, tuple[int, ...]], limit_s: float) -> bool:
        """Whether every order that may be taken needs over `limit_s` seconds."""
        if limit_s == math.inf:
            return False
        every = [*stock_orders(run.run.layout, run.topology).values(), *orders.values()]
        return bool(every) and min(run.least_s(slots) for slots in every) > limit_s

    def _least_s(self, run: TrainingRun, limit_s: float) -> float:
        """Seconds that the run takes at least on any order of ranks: on the best devices and links alone."""
        if limit_s == math.inf or contention_gain(run.software, run.cluster, self._constants):
            return 0.0
        cluster, constants = self._ideal
        least = predict(replace(run, cluster=cluster), constants).iter_time_s
        return least * (1 - 2 * EXTRAPOLATION)

    def _equivalence_class(
        self, shape: ModelShape, layout: Layout, split: tuple[int, ...] | None
    ) -> ClosedFormAssignment | None:
        """The mapping of a written split, or that of all layouts of these degrees."""
        shared = layout if split is not None else replace(layout, virtual_stages=1)
        key = (shape, shared, split)
        if key not in self._classes:
            equal = np.ones(layout.pipeline_parallel)
            problem = AssignmentProblem(
                job=self._job,
                shape=shape,
                layout=shared,
                split=split or balanced_split(self._job, shape, shared, self._constants, equal),
                constants=self._constants,
                topology=self._topology,
                may_split=split is None,
            )
            self._classes[key] = closed_form_assignment(problem, effort=self._effort)
        return self._classes[key]

    def _split(
        self, shape: ModelShape, layout: Layout, shared: ClosedFormAssignment, schedule: ScheduleKind
    ) -> tuple[int, ...]:
        """The split for the class's mapping, in this layout's number of stages."""
        if layout.virtual_stages == 1:
            return shared.split
        key = (shape, layout, has_v_placement(schedule))
        if key not in self._splits:
            slowdowns = np.array(shared.slowdowns)
            self._splits[key] = balanced_split(
                self._job, shape, layout, self._constants, slowdowns, schedule=schedule
            )
        return self._splits[key]


def _plain(layout: Layout) -> Layout:
    """The layout with what does not matter for its equivalence class at its first choice."""
    return replace(layout, micro_batch_size=1, recompute="none", distributed_optimizer=False)


def _best_solved(
    job: PlanRequest, run: AssignedRun, memory: Memory, effort: SolverEffort
) -> Assignment | None:
    """The best order of one run's ranks by prediction."""
    if not may_move(job):
        return _best_of(job, run, memory, requested_orders(job, run.run.layout, run.topology))
    solved = _solved(job, run, effort)
    if solved is None:
        return None
    orders = {f"solved {index}": slots for index, slots in enumerate((solved.slots, *solved.others))}
    return _best_of(job, run, memory, orders)


def _solved(job: PlanRequest, run: AssignedRun, effort: SolverEffort) -> Solution | None:
    """The solver's order, where ranks may not move the best that is allowed; None where none is legal."""
    layout, topology = run.run.layout, run.topology
    if not may_move(job):
        orders = [*_stock_orders_of(job, run).values(), *requested_orders(job, layout, topology).values()]
        if not orders:
            return None
        seconds = [step_s(step_costs(run), topology, order) for order in orders]
        best = seconds.index(min(seconds))
        return Solution(slots=orders[best], step_s=seconds[best], stock_s={}, exact=False)
    costs, inside, num_others = step_costs(run), frozenset(job.search.inside), effort.num_predicted - 1
    evaluations = effort.evaluations_of(layout.world_size // layout.tensor_parallel)
    try:
        solution = solve_step(
            costs,
            topology,
            inside=inside,
            evaluations=evaluations,
            exact_limit=effort.exact_limit,
            num_others=num_others,
        )
    except PlanError:
        return None
    return limited_orders_of(job, topology, layout=layout).best(
        solution, costs, inside=inside, evaluations=evaluations, num_others=num_others
    )


def _best_of(
    job: PlanRequest, run: AssignedRun, memory: Memory, orders: dict[str, tuple[int, ...]]
) -> Assignment | None:
    """The best by prediction of `orders` and the stock orders that the job allows; None without any."""
    limited = limited_orders_of(job, run.topology, layout=run.run.layout)
    legal = {
        name: slots
        for name, slots in _stock_orders_of(job, run).items()
        if _keeps_inside(job, run, slots) and limited.is_legal(slots, layout=run.run.layout)
    }
    every = {**legal, **orders}
    if not every:
        return None
    predictions = _predictions(run, every, needed=legal)
    # Of equals, rounding aside, the order with the fewest crossings, then the launcher's own: it comes first.
    least = min(prediction.iter_time_s for prediction in predictions.values()) * (1 + ROUNDING)
    best = min(
        (name for name in every if name in predictions and predictions[name].iter_time_s <= least),
        key=lambda name: crossings_in_order(run.topology, every[name], layout=run.degrees),
    )
    return Assignment(
        split=run.run.layers_per_stage,
        slots=every[best],
        prediction=predictions[best],
        memory=memory,
        stock_s={name: predictions[name].iter_time_s for name in legal},
    )


def _stock_orders_of(job: PlanRequest, run: AssignedRun) -> dict[str, tuple[int, ...]]:
    """Megatron's stock orders that the job allows: where ranks may not move, the launcher's alone."""
    allowed: tuple[str, ...] = STOCK_ORDERS if may_move(job) else STOCK_ORDERS[:1]
    if job.search.mapping is not None and STOCK not in job.search.mapping:
        allowed = ()
    stock = stock_orders(run.run.layout, run.topology)
    return {name: slots for name, slots in stock.items() if name in allowed}


def _predictions(
    run: AssignedRun, orders: Mapping[str, tuple[int, ...]], *, needed: Container[str]
) -> dict[str, RowPrediction]:
    """The predictions of those that are `needed`, and of all other orders that may be the best."""
    predictions = {name: run.predict(slots) for name, slots in orders.items() if name in needed}
    best_s = min((prediction.iter_time_s for prediction in predictions.values()), default=math.inf)
    others = {name: run.least_s(slots) for name, slots in orders.items() if name not in predictions}
    for name in sorted(others, key=lambda name: others[name]):
        if others[name] > best_s * (1 + ROUNDING):
            break
        predictions[name] = run.predict(orders[name])
        best_s = min(best_s, predictions[name].iter_time_s)
    return predictions


def _keeps_inside(job: PlanRequest, run: AssignedRun, slots: tuple[int, ...]) -> bool:
    """Whether an order keeps the groups that may not leave a domain inside one."""
    inside = frozenset(job.search.inside)
    return not inside or step_s(step_costs(run), run.topology, slots, inside=inside) < NEVER_S


def stock_orders(layout: Layout, topology: Topology) -> Mapping[str, tuple[int, ...]]:
    """The slots of Megatron's stock orders; none where they break up a tensor-parallel group."""
    return _stock_orders(topology, degrees_alone(layout))


@functools.lru_cache(maxsize=256)
def _stock_orders(topology: Topology, layout: Layout) -> Mapping[str, tuple[int, ...]]:
    try:
        blocks = blocks_of(topology, size=layout.tensor_parallel, sort=False)
    except PlanError:
        return {}
    orders = {}
    for name in STOCK_ORDERS:
        order = stock_arrangement(layout, name)
        orders[name] = tuple(slot for block in order.ravel().tolist() for slot in blocks.slots[block])
    return orders


def may_move(job: PlanRequest) -> bool:
    """Whether ranks may leave the launcher's order: the job allows it and nodes are of equal size."""
    return job.search.mapping is None and (job.cluster is None or job.cluster.has_equal_nodes)


def balanced_split(
    job: PlanRequest,
    shape: ModelShape,
    layout: Layout,
    constants: Constants,
    slowdowns: FloatArray,
    *,
    schedule: ScheduleKind | None = None,
) -> tuple[int, ...]:
    """The balanced split when pipeline rank k is `slowdowns[k]` times slower [pp]."""
    if layout.num_stages == 1:
        return (shape.num_layers,)
    pp = layout.pipeline_parallel
    is_v = schedule is not None and has_v_placement(schedule)
    placement = places.v_shape(pp) if is_v else places.loop(pp, layout.virtual_stages)
    if job.has_mtp_before_last:
        return _balanced_before_last(job, shape, layout, constants, slowdowns)
    if shape.pattern:
        return _balanced_by_kinds(
            job, shape, layout, constants, np.asarray(slowdowns)[list(placement)], placement
        )
    first, layer, last = _layer_seconds(job, shape, layout, constants)
    costs = Costs(
        num_devices=layout.pipeline_parallel,
        num_microbatches=1,
        layers=(
            _cost("embedding", first),
            *(_cost(f"layer.{index}", layer) for index in range(shape.num_layers)),
            _cost("head", last),
        ),
        device_slowdown=np.asarray(slowdowns, dtype=np.float64),
        transfer_s=np.zeros((layout.pipeline_parallel, layout.pipeline_parallel)),
        memory_limit_bytes=None,
        weight_grad_held_fraction=1.0,
        backward_fused_s=None,
    )
    return layers_of(balanced_entries(costs, placement))


def _balanced_by_kinds(
    job: PlanRequest,
    shape: ModelShape,
    layout: Layout,
    constants: Constants,
    slowdowns: FloatArray,
    placement: Sequence[int],
) -> tuple[int, ...]:
    """The balanced split of a hybrid model's pattern, whose stages are `slowdowns` [S] times slower."""
    jobs = list(jobs_of_kinds(job, shape))
    seconds = [_layer_seconds(*kind_job, layout, constants) for kind_job in jobs]
    fixed = np.zeros(len(placement))
    fixed[0] += seconds[0][0]
    fixed[-1] += seconds[0][2]
    loads = KindLoads(
        fixed=fixed * slowdowns,
        layer=np.array([layer for _, layer, _ in seconds])[:, None] * slowdowns,
        before=layers_before_of(job, shape),
        placement=placement,
    )
    balanced = balanced_by_kinds(loads, least_by_stage(len(placement), shape.num_layers))
    return split_with_experts(balanced, placement=tuple(placement), expert_layers=job.logged_expert_layers)


def _balanced_before_last(
    job: PlanRequest, shape: ModelShape, layout: Layout, constants: Constants, slowdowns: FloatArray
) -> tuple[int, ...]:
    """Layers of each stage [num_stages], balanced; the last stage has 0.

    Multi-token prediction is on the stage before the last one.
    """
    placement = places.loop(layout.pipeline_parallel, layout.virtual_stages)
    unit = unit_parts(replace(_small_run(job, shape, layout), is_mtp_before_last=True), constants)
    layer, embedding, mtp, head = (
        _compute_s(parts) for parts in (unit.layers[-1], unit.embedding, unit.further, unit.head)
    )
    *others, last = placement
    fixed, num_stages = np.zeros(len(others)), len(others)
    fixed[0] += embedding
    fixed[-1] += mtp
    if last in others:
        # The head's device has other stages, which it takes the time of.
        fixed[num_stages - 1 - others[::-1].index(last)] += head
    of_stages = np.asarray(slowdowns)[others]
    loads = KindLoads(
        fixed=fixed * of_stages,
        layer=np.array([[layer]]) * of_stages,
        before=np.arange(shape.num_layers + 1)[None],
        placement=others,
    )
    return (*balanced_by_kinds(loads, [0, *[1] * (num_stages - 2), 0][:num_stages]), 0)


def _small_run(job: PlanRequest, shape: ModelShape, layout: Layout) -> TrainingRun:
    """A run of three stages with a layer each, all alike."""
    alike = None if job.experts is None else replace(job.experts, num_dense_layers=0)
    three = replace(layout, pipeline_parallel=3, virtual_stages=1)
    return small_run(replace(job, experts=alike), shape, three)


def _compute_s(parts: StageParts) -> float:
    """Compute of one microbatch in seconds, without collectives."""
    return float(sum(times.total_s for name, times in parts.items() if name not in COLLECTIVES))


def _layer_seconds(
    job: PlanRequest, shape: ModelShape, layout: Layout, constants: Constants
) -> tuple[float, float, float]:
    """Compute of one microbatch in the embedding, a transformer layer and the head, in seconds."""
    run = _small_run(job, shape, layout)
    first, layer, last = (_compute_s(part) for part in stage_parts(run, constants))
    return max(0.0, first - layer), layer, max(0.0, last - layer)


def _cost(name: str, seconds: float) -> LayerCost:
    return LayerCost(
        name=name,
        forward_s=seconds / 3,
        input_grad_s=seconds / 3,
        weight_grad_s=seconds / 3,
        activation_bytes=0.0,
    )
