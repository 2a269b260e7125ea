"""A schedule as data: it holds the device of each stage and the order of each device's actions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.schedule.action import Action

CodeArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One list of actions a device, plus the placement.

    `placement[s]` is the device of stage s. `orders[d]` holds device d's actions as codes (`Action.encode`).
    `layers_per_stage` counts entries of the cost table, embedding and head included; None while only the
    order is known. `origin` says how it was made: {"name": ...} or {"family": {...}}.
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

    @property
    def num_stages(self) -> int:
        """Number of stages, all devices together."""
        return len(self.placement)

    def actions(self, device: int) -> list[Action]:
        """Device `device`'s actions in order."""
        return [Action.decode(int(code), self.num_microbatches) for code in self.orders[device]]

    @classmethod
    def of_actions(
        cls,
        actions: Sequence[Iterable[Action]],
        *,
        num_microbatches: int,
        placement: Sequence[int],
        **rest: Any,
    ) -> Self:
        """Build from readable actions, one iterable a device."""
        orders = tuple(np.array([a.encode(num_microbatches) for a in row], dtype=np.int64) for row in actions)
        return cls(
            num_devices=len(orders),
            num_microbatches=num_microbatches,
            placement=tuple(placement),
            orders=orders,
            **rest,
        )
