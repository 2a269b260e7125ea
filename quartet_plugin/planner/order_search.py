"""Searched orders of the best planned layouts, with the cost model's own stage times, transfers and memory.

The split and the placement of a plan stay. The order that is kept is the faster of the plan's own and the
searched one by the full prediction; what is left to a bound on every order is said with it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from quartet_plugin.cost.constants import Constants, fitted
from quartet_plugin.cost.iteration.assigned import AssignedRun
from quartet_plugin.cost.iteration.orders import device_of_stages
from quartet_plugin.cost.iteration.replay import pipeline_span
from quartet_plugin.cost.iteration.step import RowPrediction, transfers_s
from quartet_plugin.cost.iteration.terms import stage_parts
from quartet_plugin.cost.memory import available_bytes, memory_by_device, peak_memory, stage_activations
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import ScheduleKind, TrainingRun, schedule_group, schedule_kind
from quartet_plugin.cost.times import Times
from quartet_plugin.errors import InfeasibleError
from quartet_plugin.mapping.topology import Topology
from quartet_plugin.model.costs import Costs, FloatArray, LayerCost, StageCosts, stage_costs
from quartet_plugin.model.custom_schedule import CustomSchedule
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import STOCK, ScheduleChoice
from quartet_plugin.planner.described_rules import rules_of
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.ranking import Ranked, Ranking, best_plans
from quartet_plugin.planner.table_schedules import has_v_placement, is_searched
from quartet_plugin.schedule.bound import lower_bound
from quartet_plugin.schedule.choice import choice_of
from quartet_plugin.schedule.compilation import compilation_time
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.placement import Placement
from quartet_plugin.schedule.search.engine import search
from quartet_plugin.schedule.search.limits import FREE, FamilyLimits
from quartet_plugin.space.config import SEARCHED, STOCK_NAMES
from quartet_plugin.space.layouts import runs_custom_schedules
from quartet_plugin.space.schedules import MAX_PLANNED_ACTIONS, num_actions_of

# Layouts whose orders are searched, and the work on each: evaluations x actions.
MAX_SEARCHED, WORK = 10, 400_000
MAX_EVALUATIONS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedOrder:
    """An order with its makespan, and a lower bound on that of every order with its split and placement.

    `is_cut`: a time limit has ended the search.
    """

    custom: CustomSchedule
    makespan_s: float
    bound_s: float
    is_cut: bool


@dataclass(slots=True, kw_only=True)
class SearchTime:
    """The seconds that the searches of a command may take together, None for no limit.

    Compilations do not count: `compiling` tells their seconds. `num_cut` searches were cut short,
    `num_left_out` plans were left out.
    """

    limit_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    compiling: Callable[[], float] = float
    num_cut: int = 0
    num_left_out: int = 0
    _began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    @property
    def left_s(self) -> float | None:
        """The seconds that are left, 0 where the limit has passed; None without a limit."""
        if self.limit_s is None:
            return None
        return max(0.0, self.limit_s - (self.clock() - self._began_s - self.compiling()))

    @property
    def lines(self) -> Iterator[str]:
        """What the limit has cut off, one line each."""
        if self.num_cut:
            yield (
                f"searched orders: the time limit of {self.limit_s:g} s has cut the search short for "
                f"{self.num_cut} of the best plans"
            )
        if self.num_left_out:
            yield (
                f"searched orders: none for {self.num_left_out} of the best plans, because of the time limit "
                f"of {self.limit_s:g} s"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTimes:
    """The times of a microbatch on each stage, and its transfers to the next stage and the one before."""

    stages: list[Times]
    forward_s: FloatArray
    backward_s: FloatArray


def with_searched_orders(
    job: PlanRequest,
    best: Iterable[Ranked],
    *,
    constants: Constants,
    seed: int = 0,
    search_time: SearchTime | None = None,
) -> tuple[Ranked, ...]:
    """The plans, the fastest first, with searched orders where those are faster.

    Where the job asks for searched orders alone, only plans that have one. The same seed gives the same
    plans, as long as the `search_time` suffices. Raises InfeasibleError where none is left.
    """
    search_time = search_time or SearchTime()
    is_required = job.search.schedule == (SEARCHED,)
    topology = job.topology(constants)
    done: set[object] = set()
    plans: list[Ranked] = []
    for ranked in best:
        key = _searched_key(ranked)
        if key not in done and len(done) < MAX_SEARCHED and may_search(job, ranked):
            done.add(key)
            # An order is searched for one plan at least where each plan must have one.
            if search_time.left_s == 0.0 and not (is_required and not plans):
                search_time.num_left_out += 1
            else:
                ranked = searched(
                    job,
                    ranked,
                    topology=topology,
                    constants=constants,
                    seed=seed,
                    is_required=is_required,
                    search_time=search_time,
                )
        if not is_required or ranked.order is not None:
            plans.append(ranked)
    if not plans:
        raise InfeasibleError(
            "search.schedule: searched; none of the best layouts has a pipeline whose order can be searched; "
            "allow other schedules"
        )
    return tuple(sorted(plans, key=lambda ranked: ranked.equal_work_s))


def may_search(job: PlanRequest, ranked: Ranked) -> bool:
    """Whether an order may be searched for the layout: as for custom schedules, and not too long."""
    return _has_free_order(job, ranked) and not _is_too_long(job, ranked)


def _has_free_order(job: PlanRequest, ranked: Ranked) -> bool:
    """Whether the job leaves the order of the plan's actions to a search."""
    layout = ranked.layout
    is_asked = job.search.schedule is not None
    rules = rules_of(job)
    splits_backward = layout.recompute != "full" and rules.job.full_backward is None
    # A requested group requests the interleaved schedule.
    is_grouped = layout.virtual_stages > 1 and job.search.group is not None
    return (
        layout.pipeline_parallel > 1
        # The plugin's schedules run multi-token prediction on the last stage.
        and not ranked.is_mtp_before_last
        and is_searched(job)
        and (is_asked or (splits_backward and not is_grouped))
        and rules.no_custom_schedules is None
        and runs_custom_schedules(layout, shape=ranked.shape, rules=rules)
    )


def _is_too_long(job: PlanRequest, ranked: Ranked) -> bool:
    num_microbatches = ranked.layout.num_microbatches(job.global_batch_size)
    return num_actions_of(ranked.layout, num_microbatches=num_microbatches) > MAX_PLANNED_ACTIONS


def _searched_key(ranked: Ranked) -> object:
    """What the searched order of a plan depends on."""
    return ranked.shape, ranked.layout, ranked.split, ranked.slots, has_v_placement(ranked.schedule)


def _limits(job: PlanRequest, best: Sequence[Ranked]) -> Iterator[str]:
    """The best plans that get no searched order."""
    free = [ranked for ranked in best if _has_free_order(job, ranked)]
    num_long = sum(_is_too_long(job, ranked) for ranked in free)
    if num_long:
        yield (
            f"searched orders: none for {num_long} of the best {len(best)} plans, whose steps have more than "
            f"{MAX_PLANNED_ACTIONS:,} actions"
        )
    num_searched = len({_searched_key(ranked) for ranked in free if not _is_too_long(job, ranked)})
    if num_searched > MAX_SEARCHED:
        yield f"searched orders: only for the best {MAX_SEARCHED} of {num_searched} plans"


def searched(
    job: PlanRequest,
    ranked: Ranked,
    *,
    topology: Topology,
    constants: Constants,
    seed: int,
    is_required: bool,
    search_time: SearchTime,
) -> Ranked:
    """The plan with the searched order if it is faster or `is_required`; elsewhere itself with its gap."""
    run = _async_run(job, ranked)
    times = _stage_times(job, ranked, run, topology, constants)
    costs = order_costs(run, times, memory_limit_bytes=_free_bytes(run))
    limits = job.search.family_limits
    try:
        best = best_order(
            costs, device_of_stages(run), seed=seed, limits=limits, time_limit_s=search_time.left_s
        )
    except InfeasibleError:
        return ranked
    search_time.num_cut += best.is_cut
    custom = best.custom
    if custom.named is not None and _is_forbidden(job, ranked.layout, custom.named):
        return ranked
    choice = ScheduleChoice(name="custom", custom=custom)
    ordered = replace(run, schedule=schedule_kind(choice), group=schedule_group(choice), custom=custom)
    memory = peak_memory(ordered)
    prediction = predicted(job, ordered, slots=ranked.slots, topology=topology, constants=constants)
    if memory.fits and (is_required or prediction.iter_time_s < ranked.iteration_s):
        time = prediction.iter_time_s
        return replace(
            ranked,
            schedule=run.schedule,
            group=None,
            order=custom,
            iteration_s=time,
            equal_work_s=time * ranked.equal_work_s / ranked.iteration_s,
            terms=prediction.terms,
            memory=memory,
            gap=best.makespan_s / best.bound_s - 1.0,
        )
    return replace(ranked, gap=_makespan_s(job, ranked, times) / best.bound_s - 1.0)


def _is_forbidden(job: PlanRequest, layout: Layout, schedule: str) -> bool:
    """Whether a rule of the job forbids the named schedule that a search has ended with."""
    prohibitions = replace(rules_of(job).prohibitions, rules=job.search.forbid)
    return prohibitions.of_schedule(layout, schedule) is not None


def best_order(
    costs: Costs,
    placement: Placement,
    *,
    seed: int,
    limits: FamilyLimits = FREE,
    time_limit_s: float | None = None,
) -> SearchedOrder:
    """The best order by a search with the costs of whole stages.

    The search ends where an order reaches the bound, and after `time_limit_s` seconds with the best order of
    so far. Raises InfeasibleError where none keeps the `limits` and those of memory.
    """
    if not limits.allows(placement):
        allowed = ", ".join(limits.placements or ())
        raise InfeasibleError(
            f"search.schedule_family.placement: {allowed}; the placement of this layout's stages is not "
            "among them; allow it, or set placement: auto"
        )
    held = np.bincount(placement, weights=[layer.activation_bytes for layer in costs.layers])
    costs = replace(costs, memory_limit_bytes=limits.capped(costs.memory_limit_bytes, held))
    num_actions = 3 * len(placement) * costs.num_microbatches
    bound_s = lower_bound(costs, placement=placement, layers_per_stage=_whole(placement)).makespan_s
    result = search(
        costs,
        placement=placement,
        split=_whole(placement),
        evaluations=max(1, min(MAX_EVALUATIONS, WORK // num_actions)),
        time_limit_s=time_limit_s,
        seed=seed,
        lower_bound_s=bound_s,
        limits=limits,
    )
    schedule = replace(result.schedule, layers_per_stage=None)
    custom = choice_of(schedule, _of_stages(costs, placement), memory_limit_bytes=costs.memory_limit_bytes)
    return SearchedOrder(
        custom=custom, makespan_s=result.simulation.makespan_s, bound_s=bound_s, is_cut=result.is_cut
    )


def predicted(
    job: PlanRequest,
    run: TrainingRun,
    *,
    slots: tuple[int, ...] | None,
    topology: Topology,
    constants: Constants,
) -> RowPrediction:
    """The prediction of a run in an order of slots, None for the launcher's."""
    if slots is None and job.cluster is None:
        return predict(run, constants)
    order = tuple(range(run.layout.world_size)) if slots is None else slots
    return AssignedRun(run, constants, topology).predict(order)


def custom_choice(job: PlanRequest, ranked: Ranked, *, constants: Constants) -> CustomSchedule:
    """The plan's named custom schedule as a plan file carries it, with the model's times of its stages."""
    run = job.run(ranked.shape, ranked.layout, ranked.split, schedule=ranked.schedule, group=ranked.group)
    times = _stage_times(job, ranked, run, job.topology(constants), constants)
    layout = run.layout
    schedule = named(
        run.schedule.value,
        num_devices=layout.pipeline_parallel,
        num_microbatches=run.num_microbatches,
        num_chunks=layout.virtual_stages,
        group=run.group,
    )
    costs = order_costs(run, times, memory_limit_bytes=_free_bytes(run))
    return choice_of(schedule, _of_stages(costs, device_of_stages(run)))


def searched_kind(kind: ScheduleKind) -> ScheduleKind:
    """The named schedule of the same placement whose sends do not block and whose backwards are split."""
    if kind.splits_backward:
        return kind
    has_chunks = kind.spec is not None and kind.spec.num_chunks != 1
    return ScheduleKind.ZB_INTERLEAVED if has_chunks else ScheduleKind.ZB_H1


def _async_run(job: PlanRequest, ranked: Ranked) -> TrainingRun:
    kind = searched_kind(ranked.schedule)
    return job.run(ranked.shape, ranked.layout, ranked.split, schedule=kind)


def _stage_times(
    job: PlanRequest, ranked: Ranked, run: TrainingRun, topology: Topology, constants: Constants
) -> SimulatedTimes:
    """The times of the stages; on unequal devices or links those of the slowest replica."""
    if ranked.slots is None and job.cluster is None:
        forward_s, backward_s = transfers_s(run, constants)
        return SimulatedTimes(
            stages=[Times.sum_of(part.values()) for part in stage_parts(run, constants)],
            forward_s=forward_s,
            backward_s=backward_s,
        )
    slots = tuple(range(run.layout.world_size)) if ranked.slots is None else ranked.slots
    stages, forward_s, backward_s = AssignedRun(run, constants, topology).stage_times(slots)
    return SimulatedTimes(stages=stages, forward_s=forward_s, backward_s=backward_s)


def order_costs(run: TrainingRun, times: SimulatedTimes, *, memory_limit_bytes: FloatArray | None) -> Costs:
    """The cost table of a search for an order: every stage is an entry that is not cut.

    `memory_limit_bytes` are those of activations on each device, None for no limit.
    """
    num_bytes, held_bytes = stage_activations(run)
    placement, devices = device_of_stages(run), run.layout.pipeline_parallel
    transfer_s = np.zeros((devices, devices))
    for stage, (here, there) in enumerate(pairwise(placement)):
        if here != there:
            transfer_s[here, there] = times.forward_s[stage]
            transfer_s[there, here] = times.backward_s[stage + 1]
    return Costs(
        num_devices=devices,
        num_microbatches=run.num_microbatches,
        layers=tuple(
            LayerCost(
                name=f"stage {stage}",
                forward_s=of_stage.forward_s,
                input_grad_s=of_stage.input_grad_s,
                weight_grad_s=of_stage.weight_grad_s,
                activation_bytes=float(size),
            )
            for stage, (of_stage, size) in enumerate(zip(times.stages, num_bytes, strict=True))
        ),
        device_slowdown=np.ones(devices),
        transfer_s=transfer_s,
        memory_limit_bytes=memory_limit_bytes,
        # A cost table knows no more than what was kept; the memory of the result is computed in full.
        weight_grad_held_fraction=min(1.0, float(held_bytes.sum() / num_bytes.sum())),
        backward_fused_s=None,
    )


def _free_bytes(run: TrainingRun) -> FloatArray:
    """The bytes that weights and states leave on each device."""
    rest = [memory.total_bytes - memory.activations_bytes for memory in memory_by_device(run)]
    free: FloatArray = np.maximum(0.0, available_bytes(float(run.cluster.memory_bytes)) - np.array(rest))
    return free


def _of_stages(costs: Costs, placement: Placement) -> StageCosts:
    return stage_costs(costs, placement=placement, layers_per_stage=_whole(placement))


def _whole(placement: Placement) -> tuple[int, ...]:
    """The split of a cost table of whole stages: one entry each."""
    return (1,) * len(placement)


def _makespan_s(job: PlanRequest, ranked: Ranked, times: SimulatedTimes) -> float:
    """The makespan of the plan's own schedule with the same times of its stages."""
    run = job.run(ranked.shape, ranked.layout, ranked.split, schedule=ranked.schedule, group=ranked.group)
    span = pipeline_span(run, times.stages, 0, forward_s=times.forward_s, backward_s=times.backward_s)
    return span.makespan_s


def planned_ranking(
    job: PlanRequest,
    *,
    top: int,
    exhaustive: bool = False,
    has_search: bool = True,
    time_limit_s: float | None = None,
    constants: Constants | None = None,
) -> Ranking:
    """The `top` layouts with mappings and orders: those of the best ten are searched, if `has_search`.

    All schedule searches together take `time_limit_s` seconds at most; `limits` of the ranking says what is
    cut off.
    """
    used = constants or fitted()
    if not (has_search and is_searched(job)):
        ranking = best_plans(job, top=top, exhaustive=exhaustive, constants=used)
        return replace(ranking, limits=(*ranking.limits, *_refusal_lines(job)))
    ranking = best_plans(job, top=max(top, MAX_SEARCHED), exhaustive=exhaustive, constants=used)
    with compilation_time() as compiling:
        search_time = SearchTime(limit_s=time_limit_s, compiling=compiling)
        best = with_searched_orders(job, ranking.best, constants=used, search_time=search_time)
    limits = (*ranking.limits, *_refusal_lines(job), *_limits(job, ranking.best), *search_time.lines)
    return replace(ranking, best=best[:top], limits=limits)


def _refusal_lines(job: PlanRequest) -> Iterator[str]:
    """Why a command has no custom schedules, where others of its kind have them."""
    is_asked = job.search.schedule is not None and not set(job.search.schedule) <= {STOCK, *STOCK_NAMES}
    is_usual = job.search.schedule is None and job.experts is None
    if job.no_custom_schedules is not None and (is_asked or is_usual):
        yield f"custom schedules: none, because of {job.no_custom_schedules}"
