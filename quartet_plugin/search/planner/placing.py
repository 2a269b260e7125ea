"""The mapping, and where devices differ the split that goes with it, of one planned layout.

The solver's closed form proposes; what is kept is decided by the whole prediction, among its proposals and
Megatron's stock orders, so the result is never predicted slower than either of them.
"""

from dataclasses import dataclass, replace

import numpy as np

from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.jobs import run_of
from quartet_plugin.cost.memory import Memory, peak_memory
from quartet_plugin.cost.predict import Prediction, stage_parts
from quartet_plugin.cost.run import Run
from quartet_plugin.errors import PlanError
from quartet_plugin.mapping.places import Places, blocks_of
from quartet_plugin.mapping.solve import STOCK_ORDERS, solve, stock_arrangement
from quartet_plugin.model.costs import Costs, FloatArray, LayerCost
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.search.planner.bounds import probe
from quartet_plugin.search.planner.cluster import places_of, places_of_machines
from quartet_plugin.search.planner.job import PlanJob
from quartet_plugin.search.planner.placed import COLLECTIVES, PlacedRun
from quartet_plugin.split.layers import balanced_split

# Rounds of solving the mapping for a split and the split for a mapping.
MAX_ROUNDS = 4
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is spent on one layout's mapping: fewer `evaluations` where more than `blocks` are placed."""

    evaluations: int
    exact_limit: int
    blocks: int = 32

    def evaluations_of(self, num_blocks: int) -> int:
        """Steps of local search."""
        return self.evaluations * min(self.blocks, num_blocks) // num_blocks


QUICK = Effort(evaluations=30, exact_limit=60)
THOROUGH = Effort(evaluations=1500, exact_limit=5000, blocks=256)
# Equal devices and links: beyond a few arrangements the regular tilings are all that need be tried.
EQUAL = Effort(evaluations=0, exact_limit=120)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a layout's ranks are: slot `slots[r]` plays RANK r; `stock_s` has the stock orders' times."""

    split: tuple[int, ...]
    slots: tuple[int, ...]
    found: Prediction
    memory: Memory
    stock_s: dict[str, float]


def planned_run(job: PlanJob, shape: ModelShape, layout: Layout, split: tuple[int, ...]) -> Run:
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


def places_of_job(job: PlanJob, constants: Constants) -> Places:
    """The slots of the job's cluster."""
    if job.cluster is None:
        return places_of_machines(job.machines, constants)
    return places_of(job.cluster, constants)


def place(
    job: PlanJob,
    shape: ModelShape,
    layout: Layout,
    split: tuple[int, ...],
    *,
    constants: Constants,
    places: Places,
    effort: Effort = THOROUGH,
    may_split: bool = True,
) -> Placement | None:
    """The best placement found of a layout with `split`, or, where devices differ, with a split of its own.

    None where no order is legal or nothing fits in memory.
    """
    splits = [split]
    if may_split and job.has_unequal_devices and layout.pipeline_parallel > 1:
        splits += _first_splits(job, shape, layout, split, constants)
    best: Placement | None = None
    tried: set[tuple[int, ...]] = set()
    for start in splits:
        current = start
        for _ in range(MAX_ROUNDS if len(splits) > 1 else 1):
            if current in tried:
                break
            tried.add(current)
            run = planned_run(job, shape, layout, current)
            memory = peak_memory(run)
            if not memory.fits:
                break
            placed = PlacedRun(run, constants, places)
            found = _placed(job, placed, memory, effort)
            if found is None:
                break
            if best is None or found.found.iter_time_s < best.found.iter_time_s:
                best = found
            if len(splits) > 1:
                current = _split_for(job, shape, layout, constants, placed.paces(found.slots))
    return best


def _placed(job: PlanJob, placed: PlacedRun, memory: Memory, effort: Effort) -> Placement | None:
    """The best order of one run's ranks."""
    run, places = placed.run, placed.places
    orders = stock_orders(run.layout, places)
    if _may_move(job):
        try:
            solved = solve(
                placed.step_costs(),
                places,
                inside=frozenset(job.search.inside),
                evaluations=effort.evaluations_of(run.layout.world_size // run.layout.tensor_parallel),
                exact_limit=effort.exact_limit,
            )
        except PlanError:
            return None
        orders = {"solved": solved.slots, **{name: orders[name] for name in solved.stock_s if name in orders}}
    else:
        orders = {name: slots for name, slots in orders.items() if name == STOCK_ORDERS[0]}
    if not orders:
        return None
    found = {name: placed.predict(slots) for name, slots in orders.items()}
    # Of equals, rounding aside, the launcher's own order.
    rank_of = {name: at for at, name in enumerate((*STOCK_ORDERS, "solved"))}
    least = min(value.iter_time_s for value in found.values()) * (1 + ROUNDING)
    best = min((name for name in found if found[name].iter_time_s <= least), key=rank_of.__getitem__)
    return Placement(
        split=run.layers_per_stage,
        slots=orders[best],
        found=found[best],
        memory=memory,
        stock_s={name: value.iter_time_s for name, value in found.items() if name != "solved"},
    )


def stock_orders(layout: Layout, places: Places) -> dict[str, tuple[int, ...]]:
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


def _may_move(job: PlanJob) -> bool:
    """Whether ranks may leave the launcher's order: the job allows it and nodes are of equal size."""
    return job.search.mapping is None and (job.cluster is None or job.cluster.has_equal_nodes)


def _first_splits(
    job: PlanJob, shape: ModelShape, layout: Layout, split: tuple[int, ...], constants: Constants
) -> list[tuple[int, ...]]:
    """Splits for the slowest devices together on one pipeline rank: the last one, the first one."""
    assert job.cluster is not None
    slowest = np.sort(job.cluster.slowdown).reshape(layout.pipeline_parallel, -1).max(axis=1)
    found = [_split_for(job, shape, layout, constants, paces) for paces in (slowest, slowest[::-1])]
    return [one for one in found if one != split]


def _split_for(
    job: PlanJob, shape: ModelShape, layout: Layout, constants: Constants, paces: FloatArray
) -> tuple[int, ...]:
    """The balanced split when pipeline rank k is `paces[k]` times slower."""
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
    counts = list(balanced_split(costs, placement))
    counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
    return tuple(counts)


def _layer_seconds(
    job: PlanJob, shape: ModelShape, layout: Layout, constants: Constants
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
