"""A schedule as data: it holds the device of each stage and the order of each device's actions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.schedule.action import Action, OverlappedPair

CodeArray = NDArray[np.int64]
PartArray = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One list of actions a device, plus the placement.

    `placement[s]` is the device of stage s. `orders[d]` holds device d's actions as codes (`Action.encode`).
    `layers_per_stage` counts entries of the cost table, embedding and head included; None while only the
    order is known. `origin` says how it was made: {"name": ...} or {"family": {...}}.
    `pairs[d]` are the ascending indices in `orders[d]` of forwards that run beside the backward after them,
    as one action; empty where no device has such a pair. Without them the order is the same, part by part.
    `routes`/`route_of_microbatch` are for schedules that carry two copies of the model: two placements,
    and which one each microbatch takes; such schedules can only be simulated.
    """

    num_devices: int
    num_microbatches: int
    placement: tuple[int, ...]
    orders: tuple[CodeArray, ...]
    layers_per_stage: tuple[int, ...] | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    routes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    route_of_microbatch: tuple[int, ...] | None = None
    pairs: tuple[CodeArray, ...] = ()

    @property
    def num_stages(self) -> int:
        """Number of stages, all devices together."""
        return len(self.placement)

    def actions(self, device: int) -> list[Action]:
        """Device `device`'s actions in order."""
        return [Action.decode(int(code), self.num_microbatches) for code in self.orders[device]]

    def entries(self, device: int) -> list[Action | OverlappedPair]:
        """Device `device`'s actions in order, the parts of a pair as one."""
        actions = self.actions(device)
        if not self.pairs:
            return list(actions)
        first = set(self.pairs[device].tolist())
        return [
            OverlappedPair(action, actions[index + 1]) if index in first else action
            for index, action in enumerate(actions)
            if index - 1 not in first
        ]

    @classmethod
    def of_actions(
        cls,
        actions: Sequence[Iterable[Action | OverlappedPair]],
        *,
        num_microbatches: int,
        placement: Sequence[int],
        **rest: Any,
    ) -> Self:
        """Build from readable actions and pairs, one iterable a device."""
        orders: list[CodeArray] = []
        pairs: list[CodeArray] = []
        for row in actions:
            codes: list[int] = []
            first: list[int] = []
            for entry in row:
                if isinstance(entry, OverlappedPair):
                    first.append(len(codes))
                    codes += [part.encode(num_microbatches) for part in entry]
                else:
                    codes.append(entry.encode(num_microbatches))
            orders.append(np.array(codes, dtype=np.int64))
            pairs.append(np.array(first, dtype=np.int64))
        return cls(
            num_devices=len(orders),
            num_microbatches=num_microbatches,
            placement=tuple(placement),
            orders=tuple(orders),
            pairs=tuple(pairs) if any(map(len, pairs)) else (),
            **rest,
        )


def marked_parts(schedule: Schedule) -> PartArray:
    """The parts of pairs in all orders, device after device: 1 for the forward, 2 for the backward, else 0.

    Empty where there are no pairs.
    """
    if not schedule.pairs:
        return np.empty(0, dtype=np.uint8)
    rows = [np.zeros(len(order), dtype=np.uint8) for order in schedule.orders]
    for row, first in zip(rows, schedule.pairs, strict=True):
        row[first] = 1
        row[first + 1] = 2
    return np.concatenate(rows)
