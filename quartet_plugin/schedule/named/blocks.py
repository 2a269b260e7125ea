"""V schedules of little memory: a building block repeated every six slots, its ends squeezed.

After Qi et al. 2024, "Pipeline Parallelism with Controllable Memory": a microbatch's F and I on both chunks
of a device take four slots of a block, one microbatch's block follows the other's after six, and W take the
slots that are left, in order. The repeated block is a steady pattern. Before and after it, where slots stay
empty, actions move to earlier ones, and never so that a device holds more than the pattern does.
"""

from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from quartet_plugin.model.costs import IntArray
from quartet_plugin.schedule.action import ActionKind

SLOTS = 6
# Rows of a device: F of its first and second chunk, I of its second and first chunk, then W of both.
_F0, _F1, _I1, _I0, _W = range(5)
_KINDS = 4
# Nothing is squeezed from the first I0 to the last F0 on device 0. With a few microbatches more than that
# takes, a block in the middle is steady on all devices.
_FIRST, _LAST = 2, 3
# Of one device, in order: (slot, kind, microbatch); W of the first chunk are kind 4, of the second kind 5.
Rows = tuple[tuple[int, int, int], ...]


class Block(NamedTuple):
    """How a microbatch passes the devices: F0 and I1 move `down` slots a device, F1 and I0 `up`.

    `waits` are the empty slots between F0 and F1, F1 and I1, I1 and I0 on the device where the direction
    changes. `is_tightened`: once its ends are squeezed, and again at the end, every action begins as early as
    the order of its device allows.
    """

    down: int
    up: int
    waits: tuple[int, int, int]
    is_tightened: bool = True

    def slots(self, p: int) -> IntArray:
        """The slots of F0, F1, I1 and I0 of microbatch 0 on each of p devices [4, p]."""
        device = np.arange(p)
        f0 = self.down * device
        f1 = self.down * (p - 1) + 1 + self.waits[0] + self.up * (p - 1 - device)
        i1 = f1[0] + 1 + self.waits[1] + self.down * device
        i0 = i1[-1] + 1 + self.waits[2] + self.up * (p - 1 - device)
        return np.stack((f0, f1, i1, i0))


def v_half_block(p: int) -> Block:
    """The block of V-Half: memory p/2 + 1 (p even) or (p + 1)/2 (p odd)."""
    is_even = p % 2 == 0
    return Block(down=2, up=1, waits=(0, 3 if is_even else 0, 1), is_tightened=not is_even)


@cache
def v_min_block(p: int) -> Block:
    """The earliest block of speed 1 whose four actions never meet in a slot: memory floor((p + 4)/3).

    Of equal ones that with the longest wait between F1 and I1, which holds nothing back behind it.
    """
    best: tuple[tuple[int, int], Block] | None = None
    for waits in product(range(SLOTS), repeat=3):
        block = Block(down=1, up=1, waits=(waits[0], waits[1], waits[2]))
        slots = block.slots(p)
        taken = np.sort(slots % SLOTS, axis=0)
        cost = (int(slots[_I0, 0]), -waits[1])
        if np.all(np.diff(taken, axis=0) > 0) and (best is None or cost < best[0]):
            best = (cost, block)
    assert best is not None
    return best[1]


def v_half(p: int, m: int) -> list[IntArray]:
    """V-Half: bubble 1.5 p - 3.5 (p even) or 1.5 p - 2 (p odd) at F = I = W = 1 and m >= 2p."""
    return orders_of_block(v_half_block(p), p=p, m=m)


def v_min(p: int, m: int) -> list[IntArray]:
    """V-Min: all actions move one slot a device, which leaves the fewest microbatches in flight."""
    return orders_of_block(v_min_block(p), p=p, m=m)


def orders_of_block(block: Block, *, p: int, m: int) -> list[IntArray]:
    """One order a device of the repeated and squeezed block, for m microbatches on the V of p devices."""
    last = _LAST + block.down * p // SLOTS
    few = p + last + _FIRST
    if m <= few:
        devices = squeezed(block, p, m)
    else:
        devices = tuple(_repeated(rows, few - last, m - few) for rows in squeezed(block, p, few))
    return [codes(rows, device, p=p, m=m) for device, rows in enumerate(devices)]


@cache
def squeezed(block: Block, p: int, m: int) -> tuple[Rows, ...]:
    """The rows of each device: the repeated block with its ends squeezed."""
    start = block.slots(p)
    first, last = int(start[_I0, 0]), SLOTS * (m - 1)
    devices = [_Device(start[:, d], m) for d in range(p)]
    cap = max(device.peak() for device in devices)
    for with_w in (True, False):
        items = sorted(
            (slot, d, kind, i)
            for d, device in enumerate(devices)
            for kind in range(_KINDS + with_w)
            for i, slot in enumerate(device.slots[kind])
        )
        for slot, d, kind, i in items:
            if slot > last or (with_w and slot < first):
                devices[d].move(kind, i, after=_ready(devices, d, kind, i), cap=cap, with_w=with_w)
        if not with_w:
            _place_w(devices)
        if block.is_tightened:
            _tighten(devices)
        _place_w(devices)
    return tuple(device.rows() for device in devices)


def _ready(devices: "list[_Device]", d: int, kind: int, i: int) -> int:
    """The last slot of what an action waits for, -1 for nothing."""
    device = devices[d].slots
    needed = [device[kind][i - 1]] if i > 0 else []
    if kind == _W:
        return max([*needed, sorted([*device[_I1], *device[_I0]])[i]])
    if kind > _F0:
        needed.append(device[kind - 1][i])
    neighbour = d - 1 if kind in (_F0, _I1) else d + 1
    if 0 <= neighbour < len(devices):
        needed.append(devices[neighbour].slots[kind][i])
    return max(needed, default=-1)


def _place_w(devices: "list[_Device]") -> None:
    for device in devices:
        device.place_w()


def _tighten(devices: "list[_Device]") -> None:
    """Begin every action as early as the actions before it on its device, and those it waits for, allow."""
    items = sorted(
        (slot, d, kind, i)
        for d, device in enumerate(devices)
        for kind, slots in enumerate(device.slots)
        for i, slot in enumerate(slots)
    )
    busy = [-1] * len(devices)
    for _, d, kind, i in items:
        busy[d] = max(busy[d], _ready(devices, d, kind, i)) + 1
        devices[d].slots[kind][i] = busy[d]


class _Device:
    """The slots of one device's actions: `slots[kind][i]`, W in the order of their I."""

    def __init__(self, start: IntArray, m: int) -> None:
        self.slots: list[list[int]] = [[int(slot) + SLOTS * i for i in range(m)] for slot in start] + [[]]
        self.place_w()

    def place_w(self) -> None:
        """Give every W, the oldest first, the first slot that is free after its I."""
        taken = {slot for kind in range(_KINDS) for slot in self.slots[kind]}
        w_slots: list[int] = []
        free = 0
        for ready in sorted([*self.slots[_I1], *self.slots[_I0]]):
            free = max(free, ready + 1)
            while free in taken:
                free += 1
            w_slots.append(free)
            free += 1
        self.slots[_W] = w_slots

    def move(self, kind: int, i: int, *, after: int, cap: int, with_w: bool) -> None:
        """Take the first free slot behind `after` in which at most `cap` F are held.

        W give way to it unless `with_w`; `place_w` then gives them others.
        """
        slots = self.slots[kind]
        now = slots[i]
        if after + 1 >= now:
            return
        taken = {slot for other in self.slots[: _KINDS + with_w] for slot in other if after < slot < now}
        for slot in range(after + 1, now):
            if slot in taken:
                continue
            slots[i] = slot
            if self._fits(kind, slot, cap=cap, with_w=with_w):
                return
        slots[i] = now

    def _fits(self, kind: int, slot: int, *, cap: int, with_w: bool) -> bool:
        """Whether at most `cap` F are held now that an action has moved to an earlier slot."""
        if kind not in (_F0, _F1) and (with_w or slot > max(self.slots[_F0][-1], self.slots[_F1][-1])):
            return True
        if not with_w:
            self.place_w()
        return self.peak() <= cap

    def peak(self) -> int:
        """The most F whose W is still to come."""
        size = max(slots[-1] for slots in self.slots) + 1
        change = np.zeros(size, dtype=np.int64)
        change[self.slots[_F0]] += 1
        change[self.slots[_F1]] += 1
        change[self.slots[_W]] -= 1
        return int(change.cumsum().max())

    def rows(self) -> Rows:
        """All actions in order; of two pending W the second chunk's comes first."""
        rows = [(slot, kind, i) for kind in range(_KINDS) for i, slot in enumerate(self.slots[kind])]
        done = {_I1: 0, _I0: 0}
        for slot in self.slots[_W]:
            ready = done[_I1] < len(self.slots[_I1]) and self.slots[_I1][done[_I1]] < slot
            of = _I1 if ready else _I0
            rows.append((slot, _W + (of == _I1), done[of]))
            done[of] += 1
        return tuple(sorted(rows))


def _between(rows: Rows, i: int) -> Rows:
    """A device's actions from its first F of microbatch i up to that of the next one."""
    begins = [k for k, (_, kind, of) in enumerate(rows) if kind == _F0 and of in (i, i + 1)]
    return rows[begins[0] : begins[1]]


def _shifted(rows: Rows, num_microbatches: int) -> Rows:
    """The rows of later microbatches."""
    return tuple((slot, kind, i + num_microbatches) for slot, kind, i in rows)


def _repeated(rows: Rows, i: int, num_rounds: int) -> Rows:
    """The rows with the steady ones around microbatch i repeated `num_rounds` times."""
    block = _between(rows, i)
    begin = rows.index(block[0])
    middle = [row for k in range(num_rounds) for row in _shifted(block, k)]
    return (*rows[:begin], *middle, *_shifted(rows[begin:], num_rounds))


def codes(rows: Rows, device: int, *, p: int, m: int) -> IntArray:
    """The rows as codes of actions."""
    of_kind = {
        _F0: (0, ActionKind.F), _F1: (1, ActionKind.F), _I1: (1, ActionKind.I),
        _I0: (0, ActionKind.I), _W: (0, ActionKind.W), _W + 1: (1, ActionKind.W),
    }  # fmt: skip
    stage = (device, 2 * p - 1 - device)
    codes = [(stage[of_kind[kind][0]] * m + i) * 4 + of_kind[kind][1] for _, kind, i in rows]
    return np.array(codes, dtype=np.int64)
