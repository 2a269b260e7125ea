"""A second simulator of schedules in plain Python, written another way: the oracle of the compiled kernels.

It looks for any device that can run its next action until none can, with dictionaries and no shared code.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quartet_plugin.errors import PlanError
from quartet_plugin.model.costs import StageCosts
from quartet_plugin.schedule.action import Action, ActionKind, OverlappedPair
from quartet_plugin.schedule.schedule import Schedule

_SETS = ({ActionKind.F, ActionKind.B}, {ActionKind.F, ActionKind.I, ActionKind.W})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceResult:
    """Start and end of every action in seconds, and each device's peak activation bytes."""

    start_s: dict[Action, float]
    end_s: dict[Action, float]
    peak_activation_bytes: list[float]

    @property
    def makespan_s(self) -> float:
        """The last end."""
        return max(self.end_s.values())


def simulate_reference(
    schedule: Schedule, costs: StageCosts, *, other_route: StageCosts | None = None
) -> ReferenceResult:
    """Run `schedule` action by action; raises PlanError when it is incomplete or deadlocks."""
    rows = [schedule.entries(d) for d in range(schedule.num_devices)]
    actions = [schedule.actions(d) for d in range(schedule.num_devices)]
    routes = [costs] if other_route is None else [costs, other_route]

    def costs_of(action: Action) -> StageCosts:
        chosen = schedule.route_of_microbatch
        return routes[0 if chosen is None else chosen[action.microbatch]]

    _check_complete(schedule, actions)
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    free = [0.0] * schedule.num_devices
    done = [0] * schedule.num_devices
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(rows):
            while done[device] < len(row):
                entry = row[done[device]]
                parts = tuple(entry) if isinstance(entry, OverlappedPair) else (entry,)
                ready = [_ready(action, costs_of(action), end) for action in parts]
                if None in ready:
                    break
                begin = max(free[device], *(moment for moment in ready if moment is not None))
                free[device] = begin + _together(parts, costs_of)
                for action in parts:
                    start[action], end[action] = begin, free[device]
                done[device] += 1
                moved = True
    if any(done[d] < len(row) for d, row in enumerate(rows)):
        raise PlanError(f"deadlock: devices stopped after {done} actions; reorder them")
    return ReferenceResult(
        start_s=start,
        end_s=end,
        peak_activation_bytes=[_peak(row, costs_of) for row in actions],
    )


def duration(action: Action, costs: StageCosts) -> float:
    """Seconds one action takes."""
    seconds = {
        ActionKind.F: costs.forward_s,
        ActionKind.I: costs.input_grad_s,
        ActionKind.W: costs.weight_grad_s,
        ActionKind.B: costs.backward_s,
    }
    return float(seconds[action.kind][action.stage])


def _together(parts: tuple[Action, ...], costs_of: Callable[[Action], StageCosts]) -> float:
    """Seconds of an action, or of a pair: all compute, and what the other's leaves of each exchange."""
    alone = [duration(action, costs_of(action)) for action in parts]
    if len(parts) == 1:
        return alone[0]
    exchanges = []
    for way, action in enumerate(parts):
        exchange_s = costs_of(action).exchange_s
        exchanges.append(0.0 if exchange_s is None else float(exchange_s[way, action.stage]))
    forward, backward = (whole - part for whole, part in zip(alone, exchanges, strict=True))
    exposed = max(0.0, exchanges[0] - backward) + max(0.0, exchanges[1] - forward)
    return forward + backward + exposed


def _ready(action: Action, costs: StageCosts, end: dict[Action, float]) -> float | None:
    """When everything `action` needs has arrived, or None while something has not run."""
    stage, microbatch = action.stage, action.microbatch

    def gradient(of_stage: int) -> float | None:
        return end.get(
            Action(of_stage, ActionKind.I, microbatch), end.get(Action(of_stage, ActionKind.B, microbatch))
        )

    if action.kind == ActionKind.W:
        return end.get(Action(stage, ActionKind.I, microbatch))
    if action.kind == ActionKind.F:
        if stage == 0:
            return 0.0
        before = end.get(Action(stage - 1, ActionKind.F, microbatch))
        return None if before is None else before + float(costs.forward_transfer_s[stage - 1])
    own = end.get(Action(stage, ActionKind.F, microbatch))
    if own is None or stage == costs.num_stages - 1:
        return own
    after = gradient(stage + 1)
    return None if after is None else max(own, after + float(costs.backward_transfer_s[stage + 1]))


def _peak(row: list[Action], costs_of: Callable[[Action], StageCosts]) -> float:
    used = peak = 0.0
    for action in row:
        costs = costs_of(action)
        size = float(costs.activation_bytes[action.stage])
        freed = {
            ActionKind.F: -1.0,
            ActionKind.I: 1.0 - costs.held_fraction,
            ActionKind.W: costs.held_fraction,
            ActionKind.B: 1.0,
        }
        used -= size * freed[action.kind]
        peak = max(peak, used)
    return peak


def _check_complete(schedule: Schedule, rows: list[list[Action]]) -> None:
    kinds: dict[tuple[int, int], list[ActionKind]] = {}
    for action in (a for row in rows for a in row):
        kinds.setdefault((action.stage, action.microbatch), []).append(action.kind)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            found = kinds.get((stage, microbatch), [])
            if len(found) != len(set(found)) or set(found) not in _SETS:
                raise PlanError(
                    f"stage {stage} microbatch {microbatch} has {[k.name for k in found]}; need F B or F I W"
                )
