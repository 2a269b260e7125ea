"""The mapping, and where devices differ the split that goes with it, of one planned layout.

The solver's closed form proposes; what is kept is decided by the whole prediction, among its proposals and
Megatron's stock orders, so the result is never predicted slower than either of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from quartet_plugin.cost.cluster import topology_of, uniform_topology_of
from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.jobs import run_of
from quartet_plugin.cost.memory import Memory, peak_memory
from quartet_plugin.cost.predict import RowPrediction, stage_parts
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.errors import PlanError
from quartet_plugin.mapping.solve import STOCK_ORDERS, Solution, solve, stock_arrangement
from quartet_plugin.mapping.step import NEVER_S, step_s
from quartet_plugin.mapping.topology import Topology, blocks_of
from quartet_plugin.model.costs import Costs, FloatArray, LayerCost
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.assigned_prediction import COLLECTIVES, AssignedRun
from quartet_plugin.planner.bounds import probe
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.split.entries import balanced_entries
from quartet_plugin.split.layers import layers_of

# Rounds of solving the mapping for a split and the split for a mapping.
MAX_ROUNDS = 4
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverEffort:
    """How much is spent on one layout's mapping: fewer `evaluations` where more than `blocks` are placed.

    `predicted` of the solver's orders are judged by the whole prediction.
    """

    evaluations: int
    exact_limit: int
    blocks: int = 32
    predicted: int = 1

    def evaluations_of(self, num_blocks: int) -> int:
        """Steps of local search."""
        return self.evaluations * min(self.blocks, num_blocks) // num_blocks


QUICK = SolverEffort(evaluations=40, exact_limit=60)
THOROUGH = SolverEffort(evaluations=1500, exact_limit=5000, blocks=256, predicted=12)
# Equal devices and links: beyond a few arrangements the regular tilings are all that need be tried.
EQUAL = SolverEffort(evaluations=0, exact_limit=120)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Where a layout's ranks are: slot `slots[r]` plays RANK r; `stock_s` has the stock orders' times."""

    split: tuple[int, ...]
    slots: tuple[int, ...]
    found: RowPrediction
    memory: Memory
    stock_s: dict[str, float]


def planned_run(job: PlanRequest, shape: ModelShape, layout: Layout, split: tuple[int, ...]) -> TrainingRun:
    """The run that a planned layout stands for."""
    run = run_of(
        shape,
        layout,
        global_batch_size=job.global_batch_size,
        layers_per_stage=split,
        machines=job.machines,
        precision=job.half,
        software=job.software,
    )
    return replace(run, matmul=job.precision, experts=job.experts)


def places_of_job(job: PlanRequest, constants: Constants) -> Topology:
    """The slots of the job's cluster."""
    if job.cluster is None:
        return uniform_topology_of(job.machines, constants)
    return topology_of(job.cluster, constants)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedFormAssignment:
    """A split and an order of slots, by the solver's closed form; `paces` as `AssignedRun.paces`."""

    split: tuple[int, ...]
    slots: tuple[int, ...]
    paces: tuple[float, ...]
    step_s: float


def assign(
    job: PlanRequest,
    shape: ModelShape,
    layout: Layout,
    split: tuple[int, ...],
    *,
    constants: Constants,
    places: Topology,
    effort: SolverEffort = THOROUGH,
    may_split: bool = True,
) -> Assignment | None:
    """The best placement found of a layout with `split`, or, where devices differ, with a split of its own.

    None where no order is legal or nothing fits in memory.
    """
    best: list[Assignment] = []

    def consider(placed: AssignedRun) -> tuple[int, ...] | None:
        memory = peak_memory(placed.run)
        if not memory.fits:
            return None
        found = _placed(job, placed, memory, effort)
        if found is None:
            return None
        best.append(found)
        return found.slots

    _alternate(job, shape, layout, split, constants, places, consider, may_split=may_split)
    return min(best, key=lambda one: one.found.iter_time_s, default=None)


def closed_form_assignment(
    job: PlanRequest,
    shape: ModelShape,
    layout: Layout,
    split: tuple[int, ...],
    *,
    constants: Constants,
    places: Topology,
    effort: SolverEffort = QUICK,
    may_split: bool = True,
) -> ClosedFormAssignment | None:
    """The same by the closed form alone, whatever memory it needs: many times faster."""
    best: list[ClosedFormAssignment] = []

    def consider(placed: AssignedRun) -> tuple[int, ...] | None:
        solved = _solved(job, placed, effort)
        if solved is None:
            return None
        best.append(
            ClosedFormAssignment(
                split=placed.run.layers_per_stage,
                slots=solved.slots,
                paces=tuple(placed.paces(solved.slots).tolist()),
                step_s=solved.step_s,
            )
        )
        return solved.slots

    _alternate(job, shape, layout, split, constants, places, consider, may_split=may_split)
    return min(best, key=lambda one: one.step_s, default=None)


def _alternate(
    job: PlanRequest,
    shape: ModelShape,
    layout: Layout,
    split: tuple[int, ...],
    constants: Constants,
    places: Topology,
    consider: Callable[[AssignedRun], tuple[int, ...] | None],
    *,
    may_split: bool,
) -> None:
    """Show `consider` the run of every split that follows from the order of slots it answered before."""
    splits = [split]
    if may_split and job.has_unequal_devices and layout.pipeline_parallel > 1:
        splits += _first_splits(job, shape, layout, split, constants)
    tried: set[tuple[int, ...]] = set()
    for start in splits:
        current = start
        for _ in range(MAX_ROUNDS if len(splits) > 1 else 1):
            if current in tried:
                break
            tried.add(current)
            placed = AssignedRun(planned_run(job, shape, layout, current), constants, places)
            slots = consider(placed)
            if slots is None:
                break
            if len(splits) > 1:
                current = _split_for(job, shape, layout, constants, placed.paces(slots))


class AssignmentSolver:
    """Placements of many layouts: those of equal degrees share a mapping.

    It is solved once for such a family, at micro-batch 1 without recompute and virtual stages, together with
    the split. Every member takes the best by its own prediction of its own split and the one for that
    mapping, in that mapping and in the stock orders. What a member gets does not depend on the order in which
    members are asked for.
    """

    def __init__(
        self, job: PlanRequest, constants: Constants, places: Topology, *, effort: SolverEffort = QUICK
    ) -> None:
        self._job, self._constants, self._places, self._effort = job, constants, places, effort
        self._families: dict[
            tuple[ModelShape, Layout, tuple[int, ...] | None], ClosedFormAssignment | None
        ] = {}
        self._splits: dict[tuple[ModelShape, Layout], tuple[int, ...]] = {}

    def assign(
        self, shape: ModelShape, layout: Layout, split: tuple[int, ...], *, may_split: bool
    ) -> Assignment | None:
        """As `assign`, with the family's split and mapping."""
        job = self._job
        plain = replace(layout, micro_batch_size=1, recompute="none", distributed_optimizer=False)
        family = self._family(shape, plain, None if may_split else split)
        if family is None:
            return None
        splits = dict.fromkeys([split, self._split(shape, plain, family)] if may_split else [split])
        orders = {"solved": family.slots} if may_move(job) else {}
        best: Assignment | None = None
        for one in splits:
            run = planned_run(job, shape, layout, one)
            memory = peak_memory(run)
            if not memory.fits:
                continue
            found = _best_of(job, AssignedRun(run, self._constants, self._places), memory, orders)
            if found is not None and (best is None or found.found.iter_time_s < best.found.iter_time_s):
                best = found
        return best

    def _family(
        self, shape: ModelShape, layout: Layout, split: tuple[int, ...] | None
    ) -> ClosedFormAssignment | None:
        """The mapping of a written split, or that of all layouts of these degrees."""
        shared = layout if split is not None else replace(layout, virtual_stages=1)
        key = (shape, shared, split)
        if key not in self._families:
            equal = np.ones(layout.pipeline_parallel)
            self._families[key] = closed_form_assignment(
                self._job,
                shape,
                shared,
                split or _split_for(self._job, shape, shared, self._constants, equal),
                constants=self._constants,
                places=self._places,
                effort=self._effort,
                may_split=split is None,
            )
        return self._families[key]

    def _split(self, shape: ModelShape, layout: Layout, family: ClosedFormAssignment) -> tuple[int, ...]:
        """The split for the family's mapping, in this layout's number of stages."""
        if layout.virtual_stages == 1:
            return family.split
        key = (shape, layout)
        if key not in self._splits:
            paces = np.array(family.paces)
            self._splits[key] = _split_for(self._job, shape, layout, self._constants, paces)
        return self._splits[key]


def _placed(job: PlanRequest, placed: AssignedRun, memory: Memory, effort: SolverEffort) -> Assignment | None:
    """The best order of one run's ranks by prediction."""
    if not may_move(job):
        return _best_of(job, placed, memory, {})
    solved = _solved(job, placed, effort)
    if solved is None:
        return None
    orders = {f"solved {at}": slots for at, slots in enumerate((solved.slots, *solved.others))}
    return _best_of(job, placed, memory, orders)


def _solved(job: PlanRequest, placed: AssignedRun, effort: SolverEffort) -> Solution | None:
    """The solver's order, where ranks may not move the launcher's; None where none is legal."""
    layout, places = placed.run.layout, placed.places
    if not may_move(job):
        own = stock_orders(layout, places).get(STOCK_ORDERS[0])
        if own is None:
            return None
        time = step_s(placed.step_costs(), places, own)
        return Solution(slots=own, step_s=time, stock_s={}, exact=False, num_evaluated=1)
    try:
        return solve(
            placed.step_costs(),
            places,
            inside=frozenset(job.search.inside),
            evaluations=effort.evaluations_of(layout.world_size // layout.tensor_parallel),
            exact_limit=effort.exact_limit,
            num_others=effort.predicted - 1,
        )
    except PlanError:
        return None


def _best_of(
    job: PlanRequest, placed: AssignedRun, memory: Memory, orders: dict[str, tuple[int, ...]]
) -> Assignment | None:
    """The best by prediction of `orders` and the stock orders that the job allows; None without any."""
    stock = stock_orders(placed.run.layout, placed.places)
    allowed = STOCK_ORDERS if may_move(job) else STOCK_ORDERS[:1]
    legal = {name: slots for name, slots in stock.items() if name in allowed and _keeps(job, placed, slots)}
    found = {name: placed.predict(slots) for name, slots in {**legal, **orders}.items()}
    if not found:
        return None
    # Of equals, rounding aside, the launcher's own order: it comes first.
    least = min(value.iter_time_s for value in found.values()) * (1 + ROUNDING)
    best = next(name for name in found if found[name].iter_time_s <= least)
    return Assignment(
        split=placed.run.layers_per_stage,
        slots={**legal, **orders}[best],
        found=found[best],
        memory=memory,
        stock_s={name: found[name].iter_time_s for name in legal},
    )


def _keeps(job: PlanRequest, placed: AssignedRun, slots: tuple[int, ...]) -> bool:
    """Whether an order keeps the groups that may not leave a domain inside one."""
    inside = frozenset(job.search.inside)
    return not inside or step_s(placed.step_costs(), placed.places, slots, inside=inside) < NEVER_S


def stock_orders(layout: Layout, places: Topology) -> dict[str, tuple[int, ...]]:
    """The slots of Megatron's stock orders; none where they break up a tensor-parallel group."""
    try:
        blocks = blocks_of(places, size=layout.tensor_parallel, sort=False)
    except PlanError:
        return {}
    found = {}
    for name in STOCK_ORDERS:
        order = stock_arrangement(layout, name).ravel().tolist()
        found[name] = tuple(slot for block in order for slot in blocks.slots[block])
    return found


def may_move(job: PlanRequest) -> bool:
    """Whether ranks may leave the launcher's order: the job allows it and nodes are of equal size."""
    return job.search.mapping is None and (job.cluster is None or job.cluster.has_equal_nodes)


def _first_splits(
    job: PlanRequest, shape: ModelShape, layout: Layout, split: tuple[int, ...], constants: Constants
) -> list[tuple[int, ...]]:
    """Splits for the slowest devices together on one pipeline rank: the last one, the first one."""
    assert job.cluster is not None
    slowest = np.sort(job.cluster.slowdown).reshape(layout.pipeline_parallel, -1).max(axis=1)
    found = [_split_for(job, shape, layout, constants, paces) for paces in (slowest, slowest[::-1])]
    return [one for one in found if one != split]


def _split_for(
    job: PlanRequest, shape: ModelShape, layout: Layout, constants: Constants, paces: FloatArray
) -> tuple[int, ...]:
    """The balanced split when pipeline rank k is `paces[k]` times slower."""
    if layout.num_stages == 1:
        return (shape.num_layers,)
    first, layer, last = _layer_seconds(job, shape, layout, constants)
    costs = Costs(
        num_devices=layout.pipeline_parallel,
        num_microbatches=1,
        layers=(
            _cost("embedding", first),
            *(_cost(f"layer.{at}", layer) for at in range(shape.num_layers)),
            _cost("head", last),
        ),
        device_slowdown=np.asarray(paces, dtype=np.float64),
        transfer_s=np.zeros((layout.pipeline_parallel, layout.pipeline_parallel)),
        memory_limit_bytes=None,
        weight_grad_held_fraction=1.0,
        backward_fused_s=None,
    )
    placement = list(range(layout.pipeline_parallel)) * layout.virtual_stages
    return layers_of(balanced_entries(costs, placement))


def _layer_seconds(
    job: PlanRequest, shape: ModelShape, layout: Layout, constants: Constants
) -> tuple[float, float, float]:
    """Compute of one microbatch in seconds: of the embedding, of a transformer layer, of the head."""
    alike = None if job.experts is None else replace(job.experts, num_dense_layers=0)
    three = replace(layout, pipeline_parallel=3, virtual_stages=1)
    run = probe(replace(job, experts=alike), replace(shape, num_layers=3), three)
    first, layer, last = (
        sum(times.total for name, times in part.items() if name not in COLLECTIVES)
        for part in stage_parts(run, constants)
    )
    return max(0.0, first - layer), layer, max(0.0, last - layer)


def _cost(name: str, seconds: float) -> LayerCost:
    return LayerCost(
        name=name,
        forward_s=seconds / 3,
        input_grad_s=seconds / 3,
        weight_grad_s=seconds / 3,
        activation_bytes=0.0,
    )
