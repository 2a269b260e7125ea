"""Instructions for any number of microbatches and for evaluation, from one description of the schedule.

A batch ramp-up and an evaluation have their own number of microbatches. A named schedule or one of the family
is generated anew for it. An order that was written out exists for its own number alone; elsewhere the
family's plain order on the same placement takes its place.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.model.costs import FloatArray, StageCosts
from quartet_plugin.model.custom_schedule import PAIRS_ONLY_SIMULATED, CustomSchedule
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.choice import family_of, made, relative_costs, written_of
from quartet_plugin.schedule.family import Family
from quartet_plugin.schedule.instruction import Program
from quartet_plugin.schedule.lowering import lower, refuse_two_copies
from quartet_plugin.schedule.named import lookup
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import action_times
from quartet_plugin.schedule.validate import validate

# A training and an evaluation alternate; a batch ramp-up has ever new programs, of tens of MiB each at scale.
KEPT_PROGRAMS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """How to make the schedule for any number of microbatches.

    `costs` are the stages' predicted times: they place receives and make the family's orders. `written` is
    the order for its own number of microbatches. Else `name` (with `group` where it takes one) or `family`
    makes it; with neither, the plain order of the family. On `full_backward_stages` a backward is never
    split, whatever the order says: I becomes B there and W is left out. `memory_limit_bytes` [num_devices]
    bounds the family's orders.
    """

    costs: StageCosts
    written: Schedule | None = None
    name: str | None = None
    group: int | None = None
    family: Family | None = None
    full_backward_stages: frozenset[int] = frozenset()
    memory_limit_bytes: FloatArray | None = None

    @property
    def placement(self) -> tuple[int, ...]:
        """The device of each stage."""
        return tuple(int(device) for device in self.costs.device_of_stage)

    @property
    def num_devices(self) -> int:
        """Devices of the pipeline."""
        return max(self.placement) + 1


def schedule_spec_of(
    choice: CustomSchedule, *, num_microbatches: int, full_backward: bool = False
) -> ScheduleSpec:
    """The specification of a plan's schedule; with `full_backward` no backward is split, whatever it says.

    Raises PlanError for an unknown name, two copies of the model, or parameters that are not the family's.
    """
    if choice.named is not None:
        try:
            known = lookup(choice.named)
        except ConfigError as error:
            raise PlanError(f"schedule.custom.named: {error}") from error
        if not known.executable:
            raise PlanError(f"schedule.custom.named: {choice.named} has two copies of the model")
    limits = choice.profile.memory_limit_bytes
    return ScheduleSpec(
        costs=relative_costs(choice).ratios,
        written=written_of(choice, num_microbatches=num_microbatches),
        name=choice.named,
        group=choice.group,
        family=family_of(choice),
        full_backward_stages=frozenset(range(len(choice.placement))) if full_backward else frozenset(),
        memory_limit_bytes=None if limits is None else np.array(limits, dtype=np.float64),
    )


def splits_backward(spec: ScheduleSpec, num_microbatches: int) -> bool:
    """Whether some backward comes in two parts."""
    schedule = make_schedule(spec, num_microbatches)
    return any(bool(((order & 3) == ActionKind.W).any()) for order in schedule.orders)


class ProgramCache:
    """The programs of one schedule that were asked for last."""

    def __init__(self, spec: ScheduleSpec) -> None:
        self.spec = spec
        self._program = lru_cache(KEPT_PROGRAMS)(self._lowered)

    def program(self, num_microbatches: int, *, forward_only: bool = False) -> Program:
        """The instructions of all devices. Raises PlanError for an order that is not valid."""
        return self._program(num_microbatches, forward_only)

    def _lowered(self, num_microbatches: int, forward_only: bool) -> Program:
        schedule = make_schedule(self.spec, num_microbatches)
        return lower_schedule(schedule, self.spec.costs, forward_only=forward_only)


def make_schedule(spec: ScheduleSpec, num_microbatches: int) -> Schedule:
    """The specified schedule for this number of microbatches, checked.

    Raises PlanError for a written order that breaks a rule or has pairs, or for another placement than the
    costs have.
    """
    schedule = _ordered(spec, num_microbatches)
    if schedule.pairs:
        raise PlanError(f"orders: {PAIRS_ONLY_SIMULATED}")
    if schedule.placement != spec.placement:
        raise PlanError(
            f"placement: the order is for {list(schedule.placement)[:16]}, "
            f"the stages lie on {list(spec.placement)[:16]}"
        )
    schedule = _with_full_backwards(schedule, spec.full_backward_stages)
    validate(schedule)
    return schedule


def _ordered(spec: ScheduleSpec, num_microbatches: int) -> Schedule:
    written = spec.written
    if written is not None and written.num_microbatches == num_microbatches:
        return written
    return made(
        spec.costs,
        num_microbatches,
        name=spec.name,
        group=spec.group,
        family=spec.family,
        memory_limit_bytes=spec.memory_limit_bytes,
    )


def _with_full_backwards(schedule: Schedule, stages: frozenset[int]) -> Schedule:
    """The schedule with B in the place of I, and no W, on some stages."""
    orders = []
    for order in schedule.orders:
        is_changed = np.isin((order >> 2) // schedule.num_microbatches, list(stages))
        kind = order & 3
        kept = np.where(is_changed & (kind == ActionKind.I), order - ActionKind.I + ActionKind.B, order)
        orders.append(kept[~(is_changed & (kind == ActionKind.W))])
    return replace(schedule, orders=tuple(orders))


def lower_schedule(schedule: Schedule, costs: StageCosts, *, forward_only: bool = False) -> Program:
    """The instructions of a checked schedule; of its forwards alone for an evaluation.

    Leaving out the backwards keeps an order valid: no forward needs one. Raises PlanError for two copies of
    the model.
    """
    refuse_two_copies(schedule)
    if forward_only:
        forwards = tuple(order[order & 3 == ActionKind.F] for order in schedule.orders)
        schedule = replace(schedule, orders=forwards, pairs=())
    start_s, end_s = action_times(schedule, costs)
    transfer_s = _transfers(costs, schedule.num_devices)
    return lower(schedule, start_s=start_s, end_s=end_s, transfer_s=transfer_s)


def _transfers(costs: StageCosts, num_devices: int) -> FloatArray:
    """Seconds of a boundary tensor between devices [num_devices, num_devices], from the stage boundaries."""
    transfer_s = np.zeros((num_devices, num_devices))
    device = costs.device_of_stage
    for stage in range(costs.num_stages - 1):
        source, target = device[stage], device[stage + 1]
        transfer_s[source, target] = max(transfer_s[source, target], costs.forward_transfer_s[stage])
        transfer_s[target, source] = max(transfer_s[target, source], costs.backward_transfer_s[stage + 1])
    return transfer_s
