"""How processes that share processor cores slow each other down.

Of n busy processes on c cores each takes n / c times as long (processor sharing). How busy the others are
depends on the plan: a rank that waits for its neighbours leaves the core to them, so work that moves away
from a crowded core makes everybody there faster. No fixed pace of a slot says that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.mapping.orders import slots_of
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.plan import NodeInfo, Plan, Slot

MAX_ROUNDS = 12
# The stretch has settled when no rank's changes by more, relative.
SETTLED = 0.005


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoreSharing:
    """Who is on whose cores: `beside` [pp, pp] counts a rank's slots on those of another (of its most crowded
    slot), without that slot itself; `cores` [pp] is how many these are."""

    beside: FloatArray
    cores: FloatArray

    def stretch(self, busy: FloatArray) -> FloatArray:
        """How many times as long the ranks' work takes [pp], where they are `busy` so much of the time [pp].

        Slots of one rank work at the same time.
        """
        apart = self.beside - np.diag(np.diag(self.beside))
        found: FloatArray = np.maximum(1.0, (1.0 + np.diag(self.beside) + apart @ busy) / self.cores)
        return found

    @property
    def most(self) -> FloatArray:
        """The stretch where everybody is busy all the time [pp]."""
        return self.stretch(np.ones(len(self.cores)))

    def settle(self, work_s: FloatArray, *, span_s: Callable[[FloatArray], float]) -> FloatArray:
        """The stretch at which times and busyness agree [pp].

        `work_s` [pp] is each rank's work alone; `span_s` an iteration's time under a stretch, 0 or below
        where there is none.
        """
        found = self.most
        for _ in range(MAX_ROUNDS):
            span = span_s(found)
            if span <= 0.0:
                return found
            wanted = self.stretch(np.minimum(1.0, work_s * found / span))
            change = float(np.max(np.abs(wanted / found - 1.0)))
            found = 0.5 * (found + wanted)
            if change < SETTLED:
                break
        return found


def core_sharing_of(plan: Plan, nodes: Sequence[NodeInfo]) -> CoreSharing | None:
    """Who shares cores under the plan's mapping; None where nobody does."""
    crowd_of = {
        Slot(node=at, local=local): (at, number)
        for at, node in enumerate(nodes)
        for number, crowd in enumerate(node.crowds or ())
        for local in crowd.locals
    }
    if not crowd_of:
        return None
    ranks = plan.layout.pipeline_parallel
    # Megatron numbers pipeline ranks slowest.
    size = len(slots_of(nodes)) // ranks
    crowds = [crowd_of.get(slot) for slot in plan.mapping.slots]
    beside, cores = np.zeros((ranks, ranks)), np.ones(ranks)
    for rank in range(ranks):
        for crowd in {one for one in crowds[rank * size : (rank + 1) * size] if one is not None}:
            there = np.array([float(one == crowd) for one in crowds]).reshape(ranks, size).sum(axis=1)
            there[rank] -= 1.0
            num_cores = float(nodes[crowd[0]].crowds[crowd[1]].num_cores)  # type: ignore[index]
            if (1.0 + there.sum()) / num_cores > (1.0 + beside[rank].sum()) / cores[rank]:
                beside[rank], cores[rank] = there, num_cores
    return CoreSharing(beside=beside, cores=cores)
