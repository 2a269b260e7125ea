"""From a schedule to every device's actions, sends and receives, in an order that cannot deadlock.

Where things go. A SEND is posted right behind its producer. A RECV is posted where its device stands when
the message is predicted to leave, never by the sender's position: earlier holds a buffer for nothing, later
makes the message wait. A send is waited for once it is predicted to have arrived. A hand-over inside a
device is no message; all that is posted at one point is one batch. An overlapped pair is one action here: its
device waits for both inputs before it, and sends both results after it.

Groups. Every pair of devices has up to four streams: activations and gradients, each way. No two streams of
a pair share a group, so no queue holds both sends and receives of a pair and none holds both kinds:
`forward` and `backward` where each kind goes one way (linear, loop), and two more for the returning chunks
of placements like V and snake.

Why it cannot deadlock. Fix a linear order < of all actions that respects the device lists and the data
(by predicted start). A device reaches the point in front of its action k when k - 1 is done. The transfers
of two devices in one group are a queue: they run one after the other, as posted, and apart from all others
(`isend` and `irecv` on a communicator a pair). A queue has one direction; both ends post it in the order the
producers run. What message M needs - its SEND, its RECV, and the messages before it in its queue - is posted
behind its producer P and earlier producers of that queue, and at the point in front of some z on the
receiver, so it is over once P and the action before z are. The consumer comes behind both; the wait for the
send is put behind both. So every wait is for smaller actions, and by induction over < everything runs,
whatever the real durations.
"""

import gc
import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from quartet_plugin.errors import PlanError
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.schedule.action import Action, ActionKind, OverlappedPair
from quartet_plugin.schedule.instruction import (
    Compute,
    Instruction,
    Message,
    Post,
    Program,
    Side,
    Transfer,
    Wait,
    consumes,
    produces,
)
from quartet_plugin.schedule.schedule import Schedule

GROUP_NAMES = ("forward", "backward", "forward_return", "backward_return")

_Stream = tuple[int, int, bool]
_Parts = tuple[Action, ...]  # an action, or both of an overlapped pair


@dataclass(slots=True)
class _TransferPoint:
    """The sends and receives that a device posts between two actions, and the sends that it waits for."""

    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    sent: list[Message] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timeline:
    """Actions with their place in the linear order and their predicted times; all [device][index].

    A pair is one entry of both its parts.
    """

    actions: list[list[_Parts]]
    rank: list[list[int]]
    start_s: list[list[float]]
    end_s: list[list[float]]
    position: dict[tuple[int, bool, int], tuple[int, int]]  # (stage, is forward, microbatch) -> device, index


def lower(
    schedule: Schedule,
    *,
    start_s: Sequence[FloatArray],
    end_s: Sequence[FloatArray],
    transfer_s: FloatArray | None = None,
) -> Program:
    """Lower `schedule` for a runtime.

    `start_s[d]` and `end_s[d]` are the predicted times of `schedule.orders[d]`, as `simulate` gives them;
    `transfer_s` [num_devices, num_devices] of one boundary tensor, default 0. Times only decide how well the
    program overlaps, never whether it deadlocks. Raises PlanError for two copies of the model, times of
    another shape, or a schedule that cannot run.
    """
    refuse_two_copies(schedule)
    lengths = [len(order) for order in schedule.orders]
    if [len(row) for row in start_s] != lengths or [len(row) for row in end_s] != lengths:
        raise PlanError(f"times: need one start and end for each of {lengths[:16]} actions a device")
    groups = groups_of_streams(schedule.placement)
    numbers = {name: n for n, name in enumerate(group_names(schedule.placement))}
    transfers = np.zeros((schedule.num_devices,) * 2) if transfer_s is None else transfer_s
    with _no_collection():
        timeline = _timeline(schedule, start_s, end_s)
        points = _points(schedule, timeline, {s: numbers[g] for s, g in groups.items()}, transfers)
        devices = [_Device(row) for row in timeline.actions]
        rows = tuple(tuple(d.emit(points[n], schedule.num_stages)) for n, d in enumerate(devices))
    return Program(
        num_devices=schedule.num_devices,
        num_microbatches=schedule.num_microbatches,
        placement=schedule.placement,
        groups=tuple(numbers),
        instructions=rows,
        num_send_buffers=tuple(d.buffers[Side.SEND].count for d in devices),
        num_receive_buffers=tuple(d.buffers[Side.RECV].count for d in devices),
    )


def refuse_two_copies(schedule: Schedule) -> None:
    """Raise PlanError for a schedule with two copies of the model."""
    if schedule.routes is not None:
        raise PlanError("routes: a schedule with two copies of the model can only be simulated, not lowered")


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: nothing made here refers to itself, and the collector takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def group_names(placement: Sequence[int]) -> tuple[str, ...]:
    """The names of a placement's groups, as `Program.groups` has them."""
    return tuple(sorted(set(groups_of_streams(placement).values()), key=GROUP_NAMES.index))


def groups_of_streams(placement: Sequence[int]) -> dict[_Stream, str]:
    """The group of every stream (from device, to device, is forward), in the order of the stages."""
    groups: dict[_Stream, str] = {}
    for source, target in pairwise(placement):
        if source == target or (source, target, True) in groups:
            continue
        suffix = "_return" if (target, source, True) in groups else ""
        groups[source, target, True] = f"forward{suffix}"
        groups[target, source, False] = f"backward{suffix}"
    return groups


def _timeline(schedule: Schedule, start_s: Sequence[FloatArray], end_s: Sequence[FloatArray]) -> _Timeline:
    """Merge the device lists into one order, by start as far as the data allow (Kahn)."""
    actions: list[list[_Parts]] = [
        [tuple(entry) if isinstance(entry, OverlappedPair) else (entry,) for entry in schedule.entries(d)]
        for d in range(schedule.num_devices)
    ]
    position = {
        (a.stage, a.kind == ActionKind.F, a.microbatch): (d, n)
        for d, row in enumerate(actions)
        for n, parts in enumerate(row)
        for a in parts
        if a.kind != ActionKind.W
    }
    rank = [[-1] * len(row) for row in actions]
    starts, ends = ([row.tolist() for row in _of_entries(schedule, times)] for times in (start_s, end_s))
    followers: list[list[list[tuple[int, int]]]] = [[[] for _ in row] for row in actions]
    missing = [[0] * len(row) for row in actions]
    for d, row in enumerate(actions):
        for n, parts in enumerate(row):
            needs = [(d, n - 1)] if n else []
            needs += [position[key] for action in parts for key in _needed(action, schedule.num_stages)]
            missing[d][n] = len(needs)
            for e, k in needs:
                followers[e][k].append((d, n))
    heap = [(starts[d][0], d, 0) for d, row in enumerate(actions) if row and not missing[d][0]]
    heapq.heapify(heap)
    count = 0
    while heap:
        _, d, n = heapq.heappop(heap)
        rank[d][n] = count
        count += 1
        for e, k in followers[d][n]:
            missing[e][k] -= 1
            if not missing[e][k]:
                heapq.heappush(heap, (starts[e][k], e, k))
    if count < sum(map(len, actions)):
        raise PlanError(f"deadlock: only {count} of {sum(map(len, actions))} actions can run; reorder them")
    return _Timeline(actions=actions, rank=rank, start_s=starts, end_s=ends, position=position)


def _of_entries(schedule: Schedule, times: Sequence[FloatArray]) -> Sequence[FloatArray]:
    """The times of actions, with one for both parts of a pair."""
    if not schedule.pairs:
        return times
    return [np.delete(row, first + 1) for row, first in zip(times, schedule.pairs, strict=True)]


def _needed(action: Action, num_stages: int) -> list[tuple[int, bool, int]]:
    """Keys of the results an action needs."""
    forward = action.kind == ActionKind.F
    needed = [] if forward else [(action.stage, action.kind != ActionKind.W, action.microbatch)]
    other = consumes(action, num_stages)
    return needed if other is None else [*needed, (other, forward, action.microbatch)]


def _points(
    schedule: Schedule,
    timeline: _Timeline,
    group_of: dict[_Stream, int],
    transfer_s: FloatArray,
) -> list[list[_TransferPoint]]:
    """Place each message's SEND, RECV and wait for the SEND; point k is in front of action k or the end."""
    points = [[_TransferPoint() for _ in range(len(row) + 1)] for row in timeline.actions]
    streams: dict[_Stream, list[tuple[Message, int, int]]] = defaultdict(list)
    for source, row in enumerate(timeline.actions):
        for index, action in ((n, action) for n, parts in enumerate(row) for action in parts):
            to_stage = produces(action, schedule.num_stages)
            if to_stage is None or schedule.placement[to_stage] == source:
                continue
            target, consumer = timeline.position[to_stage, action.kind == ActionKind.F, action.microbatch]
            stream = (source, target, action.kind == ActionKind.F)
            message = Message(
                source_stage=action.stage,
                target_stage=to_stage,
                microbatch=action.microbatch,
                source_device=source,
                target_device=target,
                group=group_of[stream],
            )
            earliest = bisect_right(timeline.end_s[target], timeline.end_s[source][index])
            streams[stream].append((message, index, min(earliest, consumer)))
    for (source, target, _), messages in streams.items():
        latest = len(timeline.actions[target])
        between_s = float(transfer_s[source, target])
        for message, index, receive_at in reversed(messages):
            latest = min(latest, receive_at)  # a message before another in its queue is posted before it
            points[target][latest].receives.append(message)
            arrival_s = timeline.end_s[source][index] + between_s
            waited = _sent_point(timeline, source, index, target, latest, arrival_s)
            points[source][index + 1].sends.append(message)
            points[source][waited].sent.append(message)

    def order(message: Message) -> int:
        device, index = timeline.position[message.source_stage, message.is_forward, message.microbatch]
        return timeline.rank[device][index]

    for point in (point for row in points for point in row):
        for posted in (point.receives, point.sent):
            if len(posted) > 1:
                posted.sort(key=order)
    return points


def _sent_point(
    timeline: _Timeline, source: int, index: int, target: int, received_at: int, arrival_s: float
) -> int:
    """The action of `source` in front of which to wait for the SEND, which is certain to be over then."""
    point = bisect_left(timeline.start_s[source], arrival_s)
    if received_at:
        before = timeline.rank[target][received_at - 1]
        point = max(point, bisect_left(timeline.rank[source], before))
    return max(point, index + 1)


class _Buffers:
    """Hands out the smallest free number."""

    def __init__(self) -> None:
        self.count = 0
        self._free: list[int] = []
        self._of: dict[Message, int] = {}

    def take(self, message: Message) -> int:
        if self._free:
            number = heapq.heappop(self._free)
        else:
            number, self.count = self.count, self.count + 1
        self._of[message] = number
        return number

    def of(self, message: Message) -> int:
        return self._of[message]

    def give_back(self, message: Message) -> None:
        heapq.heappush(self._free, self._of.pop(message))


class _Device:
    """Writes one device's instructions and numbers its buffers."""

    def __init__(self, actions: list[_Parts]) -> None:
        self.buffers = {side: _Buffers() for side in Side}
        self._actions = actions

    def emit(self, points: list[_TransferPoint], num_stages: int) -> list[Instruction]:
        """The instructions of all points: post, wait for sends, wait for the input, run the action."""
        written: list[Instruction] = []
        arriving: dict[tuple[int, int, int], Message] = {}
        sending = {message.tensor: message for point in points for message in point.sends}
        for index, point in enumerate(points):
            for message in point.receives:
                self.buffers[Side.RECV].take(message)
                arriving[message.tensor] = message
            batch = [self._transfer(Side.SEND, m) for m in point.sends]
            batch += [self._transfer(Side.RECV, m) for m in point.receives]
            if batch:
                written.append(Post(transfers=tuple(batch)))
            for message in point.sent:
                written.append(Wait(transfer=self._transfer(Side.SEND, message)))
                self.buffers[Side.SEND].give_back(message)
            if index < len(self._actions):
                self._run(self._actions[index], num_stages, arriving, sending, written)
        return written

    def _run(
        self,
        parts: _Parts,
        num_stages: int,
        arriving: dict[tuple[int, int, int], Message],
        sending: dict[tuple[int, int, int], Message],
        written: list[Instruction],
    ) -> None:
        read: list[Message] = []
        for action in parts:
            source, target = consumes(action, num_stages), produces(action, num_stages)
            needed = None if source is None else arriving.pop((source, action.stage, action.microbatch), None)
            if needed is not None:
                written.append(Wait(transfer=self._transfer(Side.RECV, needed)))
                read.append(needed)
            made = None if target is None else sending.get((action.stage, target, action.microbatch))
            if made is not None:
                self.buffers[Side.SEND].take(made)
        written.append(Compute(action=parts[0], beside=parts[1] if len(parts) == 2 else None))
        for needed in read:
            self.buffers[Side.RECV].give_back(needed)

    def _transfer(self, side: Side, message: Message) -> Transfer:
        return Transfer(side=side, message=message, buffer=self.buffers[side].of(message))
