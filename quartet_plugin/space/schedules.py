"""Axis 3: the custom schedules that a layout can have, and the split and order of each.

The sampler chooses the end loads; for these, order and split are optimized together by simulation. Costs are
relative: a transformer layer's forward is 1. The same arguments always give the same plan.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from quartet_plugin.model.costs import EMBEDDING, HEAD, Costs, FloatArray, LayerCost
from quartet_plugin.model.custom_schedule import CustomSchedule
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.schedule import placement as places
from quartet_plugin.schedule.choice import choice_of
from quartet_plugin.schedule.named import lookup, named, refusal_of
from quartet_plugin.schedule.placement import Placement
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.search.engine import search
from quartet_plugin.schedule.search.limits import FREE, FamilyLimits
from quartet_plugin.schedule.search.named_starts import NamedStart
from quartet_plugin.schedule.search.problem import ScheduleProblem
from quartet_plugin.schedule.search.space import AUTO, splits_for
from quartet_plugin.space.config import CUSTOM_NAMES, DEFAULT_NAMES, SEARCHED
from quartet_plugin.split.entries import Entries, balanced_entries
from quartet_plugin.split.layers import QUANTUM, EndLoads, entries_of, flops_end_loads, layers_of

# Actions of a step up to which an order is searched: a plan is made in some tenths of a second.
MAX_SEARCHED_ACTIONS = 2_500
# The same in `quartet plan`, which searches for few plans and with a bound.
MAX_PLANNED_ACTIONS = 24_000
_SEARCH_WORK = 400_000
_CLIMB_WORK = 300_000
_MAX_EVALUATIONS = 1_200
_MAX_CLIMB = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomOrder:
    """A custom schedule with its split in layers."""

    split: tuple[int, ...]
    custom: CustomSchedule


def custom_schedules_of(
    layout: Layout,
    *,
    num_microbatches: int,
    requested: tuple[str, ...] | None,
    splits_backward: bool,
    limits: FamilyLimits = FREE,
    most_actions: float = MAX_SEARCHED_ACTIONS,
) -> tuple[str, ...]:
    """The names of the custom schedules for a layout, in a fixed order; none without a pipeline.

    By default only where backwards can be split, and ZB-H2, which holds nearly two pipelines of microbatches,
    only where the job does not save memory by recomputing. A searched order has a placement that the `limits`
    allow, and `most_actions` in a step at most.
    """
    if layout.pipeline_parallel == 1:
        return ()
    if requested is None and not splits_backward:
        return ()
    names = DEFAULT_NAMES if requested is None else [name for name in CUSTOM_NAMES if name in requested]
    skipped = "zb-h2" if requested is None and layout.recompute != "none" else None
    return tuple(
        name
        for name in names
        if name != skipped
        and _is_legal(name, layout, num_microbatches=num_microbatches, most_actions=most_actions)
        and (name != SEARCHED or limits.placement_of(layout.pipeline_parallel, layout.virtual_stages))
    )


def num_actions_of(layout: Layout, *, num_microbatches: int) -> int:
    """The actions of a step whose backwards are split."""
    return 3 * layout.num_stages * num_microbatches


def _is_legal(name: str, layout: Layout, *, num_microbatches: int, most_actions: float) -> bool:
    if name == SEARCHED:
        return num_actions_of(layout, num_microbatches=num_microbatches) <= most_actions
    reason = refusal_of(
        name,
        num_devices=layout.pipeline_parallel,
        num_microbatches=num_microbatches,
        num_chunks=layout.virtual_stages,
    )
    return reason is None


@lru_cache(maxsize=8192)
def custom_order(
    name: str,
    *,
    shape: ModelShape,
    num_devices: int,
    num_chunks: int,
    num_microbatches: int,
    end_loads: EndLoads | None,
    split: tuple[int, ...] | None,
    mtp_layers: int | None = None,
    limits: FamilyLimits = FREE,
) -> CustomOrder:
    """The best split and order of a custom schedule; `split` is given where it is fixed.

    `end_loads` are the sampler's end loads, None for those by FLOPs, which count the `mtp_layers`. A searched
    order keeps the `limits` of the family. Raises KeyError where they leave it no placement.
    """
    placement = placement_of(name, num_devices=num_devices, num_chunks=num_chunks)
    if name == SEARCHED:
        allowed = limits.placement_of(num_devices, num_chunks)
        if allowed is None:
            raise KeyError(name)
        placement = allowed
    costs = cost_table(
        shape,
        end_loads=end_loads or flops_end_loads(shape, mtp_layers=mtp_layers).rounded(),
        placement=placement,
        num_devices=num_devices,
        num_microbatches=num_microbatches,
    )
    entries = None if split is None else entries_of(split)
    limit = None
    if name == SEARCHED:
        limit = memory_limit(costs, placement, entries=entries)
        microbatch = limit / min(num_devices, num_microbatches)
        limit = limits.capped(limit, microbatch)
        costs_in_memory = replace(costs, memory_limit_bytes=limit)
        schedule = _searched(costs_in_memory, placement, entries=entries, limits=limits)
    else:
        schedule = _named(name, costs, placement, entries=entries)
    assert schedule.layers_per_stage is not None
    counts = tuple(schedule.layers_per_stage)
    problem = ScheduleProblem.of(costs)
    limited = limit if schedule.origin.get("name") is None else None
    custom = choice_of(schedule, problem.stage_costs(placement, counts), memory_limit_bytes=limited)
    return CustomOrder(split=layers_of(counts), custom=custom)


def placement_of(name: str, *, num_devices: int, num_chunks: int) -> Placement:
    """The placement of a named schedule's stages; a searched one's is a snake."""
    if name != SEARCHED:
        return places.build(lookup(name).placement, num_devices=num_devices, num_chunks=num_chunks)
    return places.snake(num_devices, num_chunks)


def cost_table(
    shape: ModelShape, *, end_loads: EndLoads, placement: Placement, num_devices: int, num_microbatches: int
) -> Costs:
    """Relative costs of a microbatch: attention's core has no weights, the embedding's gradients are in I.

    An end load below 0 makes the end's device faster by as many layers.
    """
    core = core_share(shape)
    embedding, head = max(0.0, end_loads.embedding), max(0.0, end_loads.head)
    layer = LayerCost(
        name="layer",
        forward_s=1.0,
        input_grad_s=1.0 + core,
        weight_grad_s=1.0 - core,
        activation_bytes=1.0,
    )
    first = LayerCost(
        name=EMBEDDING,
        forward_s=embedding,
        input_grad_s=2.0 * embedding,
        weight_grad_s=0.0,
        activation_bytes=0.0,
    )
    last = LayerCost(name=HEAD, forward_s=head, input_grad_s=head, weight_grad_s=head, activation_bytes=0.0)
    spare = np.zeros(num_devices)
    for device, weight in ((placement[0], end_loads.embedding), (placement[-1], end_loads.head)):
        spare[device] -= min(0.0, weight)
    share = shape.num_layers / num_devices
    return Costs(
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        layers=(first, *[layer] * shape.num_layers, last),
        device_slowdown=share / (share + spare),
        transfer_s=np.zeros((num_devices, num_devices)),
        memory_limit_bytes=None,
        weight_grad_held_fraction=1.0,
        backward_fused_s=None,
    )


def core_share(shape: ModelShape) -> float:
    """The part of a layer's forward FLOPs that has no weights."""
    matrices = 2 * shape.seq_length * shape.matrix_parameters_per_layer
    return 1.0 - matrices / shape.forward_flops_per_layer


def memory_limit(costs: Costs, placement: Placement, *, entries: Entries | None = None) -> FloatArray:
    """The activations that 1F1B holds: a microbatch a device, on the fullest device of the split.

    `entries` is a fixed split, None takes the balanced one.
    """
    held = np.zeros(costs.num_devices)
    counts = layers_of(balanced_entries(costs, placement) if entries is None else entries)
    for device, count in zip(placement, counts, strict=True):
        held[device] += count
    fullest = max(1.0, float(held.max()))
    return np.full(costs.num_devices, min(costs.num_devices, costs.num_microbatches) * fullest)


def _named(name: str, costs: Costs, placement: Placement, *, entries: Entries | None) -> Schedule:
    """The named order under the split that serves it best."""
    num_chunks = len(placement) // costs.num_devices
    schedule = named(
        name, num_devices=costs.num_devices, num_microbatches=costs.num_microbatches, num_chunks=num_chunks
    )
    if entries is not None:
        return replace(schedule, layers_per_stage=entries)
    problem = ScheduleProblem.of(costs, has_free_split=True)
    steps = min(_MAX_CLIMB, _CLIMB_WORK // _num_actions(placement, costs.num_microbatches))
    starts: list[NamedStart] = [
        NamedStart(schedule=schedule, split=start).climb(problem, steps=steps, seed=0)
        for start in splits_for(costs, placement, AUTO, allow_empty=False)
    ]
    best = min(starts, key=lambda start: start.score)
    return replace(schedule, layers_per_stage=best.split)


def _searched(
    costs: Costs, placement: Placement, *, entries: Entries | None, limits: FamilyLimits
) -> Schedule:
    """The best order of the search, never worse than the named ones that fit into 1F1B's memory."""
    work = _SEARCH_WORK // _num_actions(placement, costs.num_microbatches)
    return search(
        costs,
        placement=placement,
        split=AUTO if entries is None else entries,
        evaluations=max(1, min(_MAX_EVALUATIONS, work)),
        seed=0,
        limits=limits,
    ).schedule


def _num_actions(placement: Placement, num_microbatches: int) -> int:
    return 3 * len(placement) * num_microbatches


def end_load_candidates(plan: Plan) -> list[EndLoads]:
    """Guesses, likely first, of the end loads for which `custom_order` makes the plan."""
    custom = plan.schedule.custom
    assert custom is not None
    share = plan.shape.num_layers / plan.layout.pipeline_parallel
    forward = (custom.profile.forward_s[0], custom.profile.forward_s[-1])
    counts = plan.split.transformer_layers_per_stage
    layers = (counts[0], counts[-1])
    if custom.placement[0] != custom.placement[-1]:
        either = [
            [_end_load(time, count, speed, share) for speed in _speeds(plan, stage)]
            for stage, time, count in zip((0, -1), forward, layers, strict=True)
        ]
        return [EndLoads(embedding=first, head=last).rounded() for first in either[0] for last in either[1]]
    candidates = []
    for speed in dict.fromkeys((*_speeds(plan, 0), *_speeds(plan, -1))):
        first, last = (
            _end_load(time, count, speed, 0.0) for time, count in zip(forward, layers, strict=True)
        )
        spare = EndLoads(embedding=share * (1.0 - 1.0 / speed)).rounded().embedding
        # The device's spare time may be of both ends, and of each no more than all the layers.
        if first <= QUANTUM / 2:
            first = spare if last > QUANTUM / 2 else max(spare, -float(plan.shape.num_layers))
            spare -= first
        head = last if last > QUANTUM / 2 else spare
        candidates.append(EndLoads(embedding=first, head=head).rounded())
    return candidates


def _end_load(forward: float, num_layers: int, speed: float, share: float) -> float:
    """The load of an end: its time beyond its layers, or the layers that its device could take more."""
    beyond = forward / speed - num_layers
    return beyond if beyond > QUANTUM / 2 else share * (1.0 - 1.0 / speed)


def _speeds(plan: Plan, end: int) -> list[float]:
    """Guesses of a layer's time on the device of stage `end` (0 or -1), relative to the other devices."""
    custom = plan.schedule.custom
    assert custom is not None
    counts, profile = plan.split.transformer_layers_per_stage, custom.profile
    inner = [
        profile.forward_s[stage] / counts[stage]
        for stage in range(1, len(counts) - 1)
        if custom.placement[stage] == custom.placement[end]
    ]
    if inner:
        return inner[:1]
    core = core_share(plan.shape)
    forward, weight_grad, count = profile.forward_s[end], profile.weight_grad_s[end], counts[end]
    guesses = [1.0]
    if count and end == 0:
        guesses.insert(0, weight_grad / (count * (1.0 - core)))
    elif count and core > 0.0:
        # The head's forward and weight gradient take the same time.
        guesses.insert(0, (forward - weight_grad) / (count * core))
    return [speed for speed in guesses if 0.0 < speed <= 1.0 + 1e-9]
