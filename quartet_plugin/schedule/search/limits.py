"""What a user leaves of the family's parameters to a search of orders."""

import math
from dataclasses import dataclass, replace

import numpy as np

from quartet_plugin.model.costs import FloatArray
from quartet_plugin.schedule import placement as places
from quartet_plugin.schedule.family import Family
from quartet_plugin.schedule.placement import Placement, PlacementKind, kind_of

# What the hill climb picks from: microbatches of slack, and weight gradients that may wait.
SLACKS = (0.0, 0.1, 0.2, 0.34, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, math.inf)
W_LIMITS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyLimits:
    """The parameters that a search may use; None and infinity leave it all of them.

    `memory_cap` is in one microbatch's activations of each device. With `slacks` or `w_limits` an order is a
    point of the family itself: named schedules and moves of single actions, which know neither, are left out.
    """

    slacks: tuple[float, ...] | None = None
    w_limits: tuple[float, ...] | None = None
    memory_cap: float = math.inf
    placements: tuple[PlacementKind, ...] | None = None

    @property
    def is_family_alone(self) -> bool:
        """Whether orders outside of the family are left out."""
        return self.slacks is not None or self.w_limits is not None

    def allows(self, placement: Placement) -> bool:
        """Whether an order may have the placement; a snake of two chunks is a V."""
        if self.placements is None:
            return True
        kind = kind_of(placement, num_devices=max(placement) + 1)
        return kind in self.placements or (kind is PlacementKind.V and PlacementKind.SNAKE in self.placements)

    def placement_of(self, num_devices: int, num_chunks: int) -> Placement | None:
        """The first allowed placement of `num_chunks` a device, a snake before a loop; None if none."""
        made = (places.snake(num_devices, num_chunks), places.loop(num_devices, num_chunks))
        return next(filter(self.allows, made), None)

    def within(self, family: Family, index: int) -> Family:
        """The parameters, those that are not allowed exchanged for allowed ones, by `index` in turns."""
        slack, w_limit = family.slack, family.w_limit
        if self.slacks is not None and slack not in self.slacks:
            slack = self.slacks[index % len(self.slacks)]
        if self.w_limits is not None and w_limit not in self.w_limits:
            w_limit = self.w_limits[index % len(self.w_limits)]
        return replace(family, slack=slack, w_limit=w_limit)

    def capped(self, limit_bytes: FloatArray | None, microbatch_bytes: FloatArray) -> FloatArray | None:
        """The bytes of activations that each device may hold by the cap and `limit_bytes` [num_devices]."""
        if math.isinf(self.memory_cap):
            return limit_bytes
        # Rounding must not cost a microbatch.
        cap = self.memory_cap * microbatch_bytes * (1 + 1e-9)
        return cap if limit_bytes is None else np.minimum(cap, limit_bytes)


FREE = FamilyLimits()
