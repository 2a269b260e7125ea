"""The rules of a schedule, checked one by one; a refusal shows the offending cell in the table.

A schedule is valid when every (stage, microbatch) has exactly one F and either one B or one I and one W,
each on the device that holds the stage, F before I before W, and when the devices, each in its order, can
all finish: no cycle of waiting for one another. An overlapped pair starts when both of its parts can, and its
results are there when it ends. Positions count the two parts of a pair as two.
"""

import numpy as np

from quartet_plugin.errors import PlanError
from quartet_plugin.model.costs import Costs
from quartet_plugin.schedule.action import MAX_ACTIONS, MAX_MICROBATCHES, Action, ActionKind, OverlappedPair
from quartet_plugin.schedule.placement import fault_of
from quartet_plugin.schedule.schedule import CodeArray, Schedule
from quartet_plugin.schedule.table import Cell, place, refusal


def validate(schedule: Schedule) -> None:
    """Check every rule; raises PlanError, a line with the value and the rule and below it the table.

    The check of the waiting is a plain Python walk, about a second for a million actions. A simulator that
    notices a deadlock itself calls `check_actions` before and `check_progress` only after it has.
    """
    check_actions(schedule)
    check_progress(schedule)


def check_actions(schedule: Schedule) -> None:
    """Check all rules but the last: sizes, placement, completeness, devices, F before I before W, pairs."""
    _check_sizes(schedule)
    for placement in schedule.routes or (schedule.placement,):
        fault = fault_of(placement, num_devices=schedule.num_devices)
        if fault is not None:
            raise PlanError(f"placement{fault}")
    flat = _Flat(schedule)
    flat.check_known()
    flat.check_devices()
    flat.check_complete()
    flat.check_order()
    check_pairs(schedule)


def check_pairs(schedule: Schedule) -> None:
    """Check that each pair is a forward, then a backward of another microbatch, and that none share a part.

    Raises PlanError.
    """
    if not schedule.pairs:
        return
    if len(schedule.pairs) != schedule.num_devices:
        raise PlanError(f"pairs: {len(schedule.pairs)} lists; one for each of {schedule.num_devices} devices")
    for device, first in enumerate(schedule.pairs):
        actions, before = schedule.actions(device), -2
        for index in first.tolist():
            if not before + 2 <= index < len(actions) - 1:
                raise PlanError(
                    f"pairs[{device}]: {index}; indices ascend, two pairs share no part, and both parts are "
                    f"among the {len(actions)} actions"
                )
            before = index
            fault = OverlappedPair(actions[index], actions[index + 1]).fault
            if fault is not None:
                mark = (device, index)
                reason = f"pair at {place(mark)}: {fault}"
                raise refusal(schedule, reason, mark=mark, related=[(device, index + 1)])


def check_costs(schedule: Schedule, costs: Costs) -> None:
    """Raise PlanError naming what differs where the schedule is not for a pipeline of these costs.

    Compared are devices, microbatches, layers, embedding and head.
    """
    for name in ("num_devices", "num_microbatches"):
        scheduled, costed = getattr(schedule, name), getattr(costs, name)
        if scheduled != costed:
            raise PlanError(f"{name}: {scheduled} in the schedule, {costed} in the costs; they must be equal")
    layers = schedule.layers_per_stage
    if layers is None:
        raise PlanError("layers_per_stage: not known for this schedule; give the layers of each stage")
    if sum(layers) != len(costs.layers):
        raise PlanError(
            f"layers_per_stage: sums to {sum(layers)}; must be the {len(costs.layers)} layers of the costs"
        )
    if costs.has_embedding and layers[0] == 0:
        raise PlanError("layers_per_stage[0]: 0: stage 0 must hold the embedding")
    if costs.has_head and layers[-1] == 0:
        raise PlanError(f"layers_per_stage[{len(layers) - 1}]: 0: the last stage must hold the head")


def check_progress(schedule: Schedule) -> None:
    """Run every device's list as far as its inputs allow; raises PlanError when all wait for one another.

    Expects a schedule that passes `check_actions`. Time does not matter here: what one interleaving can
    finish, every interleaving can.
    """
    done = _walk(schedule)
    stuck = [device for device, index in enumerate(done) if index < len(schedule.orders[device])]
    if stuck:
        raise _deadlock(schedule, done, stuck[0])


def _check_sizes(schedule: Schedule) -> None:
    microbatches, stages = schedule.num_microbatches, schedule.num_stages
    if not 1 <= microbatches <= MAX_MICROBATCHES:
        raise PlanError(f"num_microbatches: {microbatches}: must be 1 to {MAX_MICROBATCHES}")
    if len(schedule.orders) != schedule.num_devices:
        raise PlanError(
            f"orders: {len(schedule.orders)} lists for {schedule.num_devices} devices; one a device"
        )
    total = sum(len(order) for order in schedule.orders)
    if max(total, 2 * stages * microbatches) > MAX_ACTIONS:
        needed = max(total, 2 * stages * microbatches)
        raise PlanError(f"orders: {needed} actions; at most {MAX_ACTIONS} are handled")
    layers = schedule.layers_per_stage
    if layers is not None and len(layers) != stages:
        raise PlanError(f"layers_per_stage: {len(layers)} counts for {stages} stages; one a stage")
    if (schedule.routes is None) != (schedule.route_of_microbatch is None):
        raise PlanError("routes and route_of_microbatch: only one is given; two-copy schedules need both")
    if schedule.routes is not None and schedule.route_of_microbatch is not None:
        if schedule.routes[0] != schedule.placement or len(schedule.routes[1]) != stages:
            raise PlanError("routes: the first must be the placement, the second as long")
        chosen = schedule.route_of_microbatch
        if len(chosen) != microbatches or not set(chosen) <= {0, 1}:
            raise PlanError(f"route_of_microbatch: needs a 0 or a 1 for each of {microbatches} microbatches")


class _Flat:
    """All actions of all devices in one array, device after device."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.codes: CodeArray = np.concatenate([*schedule.orders, np.empty(0, dtype=np.int64)]).astype(
            np.int64
        )
        lengths = np.array([len(order) for order in schedule.orders], dtype=np.int64)
        self.starts = np.cumsum(lengths) - lengths
        self.device = np.repeat(np.arange(len(lengths)), lengths)

    def cell(self, position: int) -> Cell:
        device = int(self.device[position])
        return device, int(position - self.starts[device])

    def action(self, code: int) -> Action:
        return Action.decode(code, self.schedule.num_microbatches)

    def where(self, code: int) -> list[Cell]:
        return [self.cell(int(position)) for position in np.flatnonzero(self.codes == code)]

    def device_of(self, pair: CodeArray) -> CodeArray:
        """The device of each (stage * num_microbatches + microbatch)."""
        stage, microbatch = np.divmod(pair, self.schedule.num_microbatches)
        routes, chosen = self.schedule.routes, self.schedule.route_of_microbatch
        if routes is None or chosen is None:
            return np.asarray(self.schedule.placement, dtype=np.int64)[stage]
        return np.asarray(routes, dtype=np.int64)[np.asarray(chosen, dtype=np.int64)[microbatch], stage]

    def check_known(self) -> None:
        limit = self.schedule.num_stages * self.schedule.num_microbatches * 4
        wrong = np.flatnonzero((self.codes < 0) | (self.codes >= limit))
        if len(wrong):
            mark = self.cell(int(wrong[0]))
            action = self.action(int(self.codes[wrong[0]]))
            reason = f"{action} at {place(mark)}: stages are numbered 0 to {self.schedule.num_stages - 1}"
            raise refusal(self.schedule, reason, mark=mark)

    def check_devices(self) -> None:
        expected = self.device_of(self.codes >> 2)
        wrong = np.flatnonzero(expected != self.device)
        if len(wrong):
            mark = self.cell(int(wrong[0]))
            action = self.action(int(self.codes[wrong[0]]))
            reason = (
                f"{action} at {place(mark)}: wrong device, stage {action.stage} "
                f"{self._of_route(action)}is on device {expected[wrong[0]]}"
            )
            raise refusal(self.schedule, reason, mark=mark)

    def _of_route(self, action: Action) -> str:
        chosen = self.schedule.route_of_microbatch
        return "" if chosen is None else f"on the route of microbatch {action.microbatch} "

    def check_complete(self) -> None:
        pairs = self.schedule.num_stages * self.schedule.num_microbatches
        counts = np.bincount(self.codes, minlength=4 * pairs).reshape(pairs, 4)
        if counts.max() > 1:
            pair, kind = np.argwhere(counts > 1)[0]
            self._refuse_double(int(pair) * 4 + int(kind))
        forward, input_grad, weight_grad, full_backward = counts.T
        for wrong, kind, why in (
            (forward == 0, ActionKind.F, "every stage needs one F of every microbatch"),
            (input_grad & full_backward == 1, None, "both I and B: the backward is either B or I and W"),
            (weight_grad & full_backward == 1, None, "both W and B: the backward is either B or I and W"),
            ((input_grad == 1) & (weight_grad == 0), ActionKind.W, "an I needs its W, or make both one B"),
            ((input_grad == 0) & (weight_grad == 1), ActionKind.I, "a W needs its I, or make both one B"),
            ((input_grad + full_backward) == 0, ActionKind.B, "every F needs its B, or I and W"),
        ):
            if wrong.any():
                pair = int(np.flatnonzero(wrong)[0])
                if kind is None:
                    self._refuse_both(pair, why)
                else:
                    self._refuse_missing(pair * 4 + kind, why)

    def _refuse_double(self, code: int) -> None:
        cells = self.where(code)
        others = " and ".join(str(index) for _, index in cells[:-1][:3])
        reason = f"{self.action(code)} at {place(cells[-1])}: twice, also at position {others}; each once"
        raise refusal(self.schedule, reason, mark=cells[-1], related=cells[:-1])

    def _refuse_both(self, pair: int, why: str) -> None:
        mark = self.where(pair * 4 + ActionKind.B)[0]
        related = [*self.where(pair * 4 + ActionKind.I), *self.where(pair * 4 + ActionKind.W)]
        action = self.action(pair * 4)
        reason = f"stage {action.stage}, microbatch {action.microbatch} at {place(mark)}: {why}"
        raise refusal(self.schedule, reason, mark=mark, related=related)

    def _refuse_missing(self, code: int, why: str) -> None:
        related = sorted(cell for kind in ActionKind for cell in self.where((code & ~3) | kind))
        device = int(self.device_of(np.array([code >> 2]))[0])
        mark = related[-1] if related else (device, len(self.schedule.orders[device]))
        reason = f"{self.action(code)} of device {device}: missing; {why}"
        raise refusal(self.schedule, reason, mark=mark, related=related[:-1])

    def check_order(self) -> None:
        """F before I before W. All three are on one device, so positions in the one array compare."""
        pairs = self.schedule.num_stages * self.schedule.num_microbatches
        position = np.full(4 * pairs, -1, dtype=np.int64)
        position[self.codes] = np.arange(len(self.codes))
        forward, input_grad, weight_grad, full_backward = position.reshape(pairs, 4).T
        for first, second, late, early in (
            (ActionKind.I, ActionKind.F, input_grad, forward),
            (ActionKind.B, ActionKind.F, full_backward, forward),
            (ActionKind.W, ActionKind.I, weight_grad, input_grad),
        ):
            wrong = np.flatnonzero((late >= 0) & (late < early))
            if len(wrong):
                pair = int(wrong[0])
                mark, related = self.cell(int(late[pair])), self.cell(int(early[pair]))
                reason = (
                    f"{self.action(pair * 4 + first)} at {place(mark)}: out of order, must come after "
                    f"{self.action(pair * 4 + second)} at position {related[1]}"
                )
                raise refusal(self.schedule, reason, mark=mark, related=[related])


def _needs(code: int, *, num_microbatches: int, num_stages: int) -> tuple[int, bool]:
    """What an action waits for from another stage: (stage * num_microbatches + microbatch, backward?).

    The pair is -1 when it waits for none: the first stage's F, the last stage's I, every W.
    """
    pair, kind = code >> 2, code & 3
    if kind == ActionKind.W:
        return -1, True
    if kind == ActionKind.F:
        return pair - num_microbatches, False
    needed = pair + num_microbatches
    return (needed if needed < num_stages * num_microbatches else -1), True


def _walk(schedule: Schedule) -> list[int]:
    """How many actions each device can execute before it waits for ever."""
    m = schedule.num_microbatches
    pairs = schedule.num_stages * m
    have = (bytearray(pairs), bytearray(pairs))
    waiting: dict[tuple[int, bool], int] = {}
    orders = [order.tolist() for order in schedule.orders]
    paired = [set(first.tolist()) for first in schedule.pairs] or [set()] * len(orders)
    done = [0] * len(orders)
    runnable = list(range(len(orders)))
    while runnable:
        device = runnable.pop()
        order, index = orders[device], done[device]
        while index < len(order):
            code = order[index]
            kind = code & 3
            if index in paired[device]:
                # A pair starts when its backward can, too.
                needed, _ = _needs(order[index + 1], num_microbatches=m, num_stages=schedule.num_stages)
                if needed >= 0 and not have[True][needed]:
                    waiting[needed, True] = device
                    break
            if kind != ActionKind.W:
                needed, is_backward = _needs(code, num_microbatches=m, num_stages=schedule.num_stages)
                if needed >= 0 and not have[is_backward][needed]:
                    waiting[needed, is_backward] = device
                    break
                made = (code >> 2, kind != ActionKind.F)
                have[made[1]][made[0]] = 1
                if made in waiting:
                    runnable.append(waiting.pop(made))
            index += 1
        done[device] = index
    return done


def _deadlock(schedule: Schedule, done: list[int], device: int) -> PlanError:
    """Follow who waits for whom until a device comes up again: that cycle is the fault."""
    flat = _Flat(schedule)
    path: list[int] = []
    words: dict[int, str] = {}
    source_cells: dict[int, Cell] = {}
    while device not in path:
        path.append(device)
        code, source, cell = _missing_input(flat, device, done)
        words[device] = f"device {device} waits at {flat.action(code)} for {flat.action(source)}"
        source_cells[device] = cell
        device = cell[0]
    cycle = path[path.index(device) :]
    shown = [words[member] for member in cycle[:4]]
    more = f", and {len(cycle) - 4} more devices in the circle" if len(cycle) > 4 else ""
    mark = (device, done[device])
    return refusal(
        schedule,
        f"deadlock at {place(mark)}: {', '.join(shown)}{more}",
        mark=mark,
        related=[(member, done[member]) for member in cycle] + [source_cells[member] for member in cycle],
        centres=done,
    )


def _missing_input(flat: _Flat, device: int, done: list[int]) -> tuple[int, int, Cell]:
    """The code that a device waits at, of a pair the part that waits; the code it waits for, and where."""
    schedule, index = flat.schedule, done[device]
    order = schedule.orders[device]
    is_pair = bool(schedule.pairs) and index in schedule.pairs[device]
    for code in order[index : index + (2 if is_pair else 1)].tolist():
        needed, is_backward = _needs(
            code, num_microbatches=schedule.num_microbatches, num_stages=schedule.num_stages
        )
        kinds = (ActionKind.I, ActionKind.B) if is_backward else (ActionKind.F,)
        source = next((needed * 4 + kind for kind in kinds if flat.where(needed * 4 + kind)), None)
        if needed >= 0 and source is not None:
            cell = flat.where(source)[0]
            if cell[1] >= done[cell[0]]:
                return code, source, cell
    raise AssertionError("a blocked device waits for an input")
