"""Instructions for any number of microbatches and for evaluation, from one description of the schedule.

A batch ramp-up and an evaluation have their own number of microbatches. A named schedule or a point of the
family is generated anew for it. What was written out exists for its own number alone; elsewhere the family's
plain order on the same placement takes its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quartet_plugin.errors import PlanError, QuartetError
from quartet_plugin.model.costs import FloatArray, StageCosts
from quartet_plugin.schedule.action import Action, ActionKind
from quartet_plugin.schedule.family import Family, generate
from quartet_plugin.schedule.instruction import Program, consumes
from quartet_plugin.schedule.lowering import lower
from quartet_plugin.schedule.named import named, refusal_of
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.validate import validate

Rows = Sequence[Sequence[Action]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """How to make the schedule for any number of microbatches.

    `costs` are the stages' predicted times: they place receives and make the family's orders. `written` is
    the order for its own number of microbatches. Else `name` (with `group` where it takes one) or `family`
    makes it; with neither, the plain order of the family. `whole` are the stages whose backward is never
    split, whatever the order says: their I becomes B and their W is left out. `memory_limit_bytes`
    [num_devices] bounds the family's orders.
    """

    costs: StageCosts
    written: Schedule | None = None
    name: str | None = None
    group: int | None = None
    family: Family | None = None
    whole: frozenset[int] = frozenset()
    memory_limit_bytes: FloatArray | None = None

    @property
    def placement(self) -> tuple[int, ...]:
        """The device of each stage."""
        return tuple(int(device) for device in self.costs.device_of_stage)

    @property
    def num_devices(self) -> int:
        """Devices of the pipeline."""
        return max(self.placement) + 1


@dataclass(slots=True)
class ProgramCache:
    """The programs of one recipe, each made when it is first asked for."""

    recipe: ScheduleSpec
    _programs: dict[tuple[int, bool], Program] = field(default_factory=dict)

    def program(self, num_microbatches: int, *, forward_only: bool = False) -> Program:
        """The instructions of all devices. Raises PlanError for an order that is not valid."""
        key = (num_microbatches, forward_only)
        if key not in self._programs:
            schedule = make_schedule(self.recipe, num_microbatches)
            self._programs[key] = lower_schedule(schedule, self.recipe.costs, forward_only=forward_only)
        return self._programs[key]


def make_schedule(recipe: ScheduleSpec, num_microbatches: int) -> Schedule:
    """The recipe's schedule for this number of microbatches, checked.

    Raises PlanError for a written order that breaks a rule, or for another placement than the costs have.
    """
    schedule = _ordered(recipe, num_microbatches)
    if schedule.placement != recipe.placement:
        raise PlanError(
            f"placement: the order is for {list(schedule.placement)[:16]}, "
            f"the stages lie on {list(recipe.placement)[:16]}"
        )
    schedule = _with_whole_stages(schedule, recipe.whole)
    validate(schedule)
    return schedule


def _ordered(recipe: ScheduleSpec, num_microbatches: int) -> Schedule:
    written = recipe.written
    if written is not None and written.num_microbatches == num_microbatches:
        return written
    sizes = {"num_devices": recipe.num_devices, "num_microbatches": num_microbatches}
    if recipe.name is not None:
        chunks = len(recipe.placement) // recipe.num_devices
        if refusal_of(recipe.name, **sizes, chunks=chunks, group=recipe.group) is None:
            try:
                schedule = named(recipe.name, **sizes, chunks=chunks, group=recipe.group)
                validate(schedule)
            except QuartetError:
                # Some groups dead-lock with some numbers of microbatches: the plain order is there then.
                schedule = None
            if schedule is not None:
                return schedule
    return generate(
        recipe.family or plain_family(recipe),
        recipe.costs,
        num_microbatches,
        memory_limit_bytes=recipe.memory_limit_bytes,
    )


def plain_family(recipe: ScheduleSpec) -> Family:
    """Whole backwards, as 1F1B on any placement: in flight is what fills the pipeline once and no more."""
    chunks = len(recipe.placement) // recipe.num_devices
    ones, zeros = (1.0,) * chunks, (0.0,) * chunks
    return Family(
        stretch_forward=ones,
        stretch_backward=ones,
        shift_forward=zeros,
        shift_backward=zeros,
        memory_cap=float(recipe.num_devices + 1),
        whole=(True,) * len(recipe.placement),
    )


def _with_whole_stages(schedule: Schedule, whole: frozenset[int]) -> Schedule:
    if not whole:
        return schedule

    def changed(action: Action) -> Action:
        return (
            action._replace(kind=ActionKind.B)
            if action.kind is ActionKind.I and action.stage in whole
            else action
        )

    rows = [
        [
            changed(action)
            for action in schedule.actions(device)
            if not (action.kind is ActionKind.W and action.stage in whole)
        ]
        for device in range(schedule.num_devices)
    ]
    return _of_rows(schedule, rows)


def _of_rows(schedule: Schedule, rows: Rows) -> Schedule:
    return Schedule.of_actions(
        rows,
        num_microbatches=schedule.num_microbatches,
        placement=schedule.placement,
        layers_per_stage=schedule.layers_per_stage,
        origin=schedule.origin,
    )


def lower_schedule(schedule: Schedule, costs: StageCosts, *, forward_only: bool = False) -> Program:
    """The instructions of a checked schedule; of its forwards alone for an evaluation.

    Leaving out the backwards keeps an order valid: no forward needs one.
    """
    if forward_only:
        rows = [
            [action for action in schedule.actions(device) if action.kind is ActionKind.F]
            for device in range(schedule.num_devices)
        ]
        schedule = _of_rows(schedule, rows)
    start_s, end_s = predicted_times(schedule, costs)
    transfer_s = _transfers(costs, schedule.num_devices)
    return lower(schedule, start_s=start_s, end_s=end_s, transfer_s=transfer_s)


def _transfers(costs: StageCosts, num_devices: int) -> FloatArray:
    """[num_devices, num_devices], from the stage boundaries: what lies between two devices."""
    transfer_s = np.zeros((num_devices, num_devices))
    device = costs.device_of_stage
    for stage in range(costs.num_stages - 1):
        near, far = device[stage], device[stage + 1]
        transfer_s[near, far] = max(transfer_s[near, far], costs.forward_transfer_s[stage])
        transfer_s[far, near] = max(transfer_s[far, near], costs.backward_transfer_s[stage + 1])
    return transfer_s


def predicted_times(schedule: Schedule, costs: StageCosts) -> tuple[list[FloatArray], list[FloatArray]]:
    """As-soon-as-possible start and end of every action, [device][index]; forwards alone are allowed too.

    Raises PlanError when the devices wait for one another.
    """
    rows = [schedule.actions(device) for device in range(schedule.num_devices)]
    start_s = [np.zeros(len(row)) for row in rows]
    end_s = [np.zeros(len(row)) for row in rows]
    duration = _durations(costs)
    ended: dict[tuple[int, bool, int], float] = {}
    at = [0] * len(rows)
    free_s = [0.0] * len(rows)
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(rows):
            while at[device] < len(row):
                action = row[at[device]]
                ready_s = _ready(action, costs, ended)
                if ready_s is None:
                    break
                begin = max(free_s[device], ready_s)
                end = begin + duration[action.kind](action.stage)
                start_s[device][at[device]], end_s[device][at[device]] = begin, end
                if action.kind is not ActionKind.W:
                    ended[action.stage, action.kind is ActionKind.F, action.microbatch] = end
                free_s[device] = end
                at[device] += 1
                moved = True
    if any(done < len(row) for done, row in zip(at, rows, strict=True)):
        raise PlanError(f"deadlock: the devices stop after {at[:16]} actions; reorder them")
    return start_s, end_s


def _durations(costs: StageCosts) -> dict[ActionKind, Callable[[int], float]]:
    tables = {
        ActionKind.F: costs.forward_s,
        ActionKind.I: costs.input_grad_s,
        ActionKind.W: costs.weight_grad_s,
        ActionKind.B: costs.backward_s,
    }
    return {kind: table.tolist().__getitem__ for kind, table in tables.items()}


def _ready(action: Action, costs: StageCosts, ended: dict[tuple[int, bool, int], float]) -> float | None:
    """When all that an action needs is there; None while something has not run."""
    forward = action.kind is ActionKind.F
    ready_s = 0.0
    if not forward:
        own = ended.get((action.stage, action.kind is not ActionKind.W, action.microbatch))
        if own is None:
            return None
        ready_s = own
    other = consumes(action, costs.num_stages)
    if other is None:
        return ready_s
    end = ended.get((other, forward, action.microbatch))
    if end is None:
        return None
    transfer_s = costs.forward_transfer_s if forward else costs.backward_transfer_s
    return max(ready_s, end + float(transfer_s[other]))
