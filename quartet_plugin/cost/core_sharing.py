"""The slowdown of processes that share processor cores.

Each of n busy processes on c cores takes n / c times as long (processor sharing). How busy the others are
depends on the plan: a rank that waits for its neighbours leaves the core to them, so moving work away from
shared cores makes every process there faster. A constant slowdown of a slot cannot express that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.mapping.orders import slots_of
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.plan import NodeInfo, Plan, Slot

MAX_ROUNDS = 12
# The fixed point is reached when no rank's slowdown changes by more, relative.
TOLERANCE = 0.005


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoreSharing:
    """The pipeline ranks that share cores.

    `sharers` [pp, pp] counts, for the slot of a rank that shares its cores with the most slots, the other
    slots on these cores by their ranks; `cores` [pp] is the number of these cores.
    """

    sharers: FloatArray
    cores: FloatArray

    def slowdown(self, busy: FloatArray) -> FloatArray:
        """The ratio of each rank's compute time to its time alone [pp]; `busy` [pp] is the ranks' busy share.

        The slots of one rank compute at the same time.
        """
        other_ranks = self.sharers - np.diag(np.diag(self.sharers))
        slowdown: FloatArray = np.maximum(
            1.0, (1.0 + np.diag(self.sharers) + other_ranks @ busy) / self.cores
        )
        return slowdown

    @property
    def greatest_slowdown(self) -> FloatArray:
        """The slowdown while all ranks are busy all the time [pp]."""
        return self.slowdown(np.ones(len(self.cores)))

    def consistent_slowdown(self, work_s: FloatArray, *, span_s: Callable[[FloatArray], float]) -> FloatArray:
        """The slowdown [pp] under which the ranks are as busy as it assumes.

        `work_s` [pp] is each rank's compute alone; `span_s` gives an iteration's seconds under a slowdown, 0
        or below where the iteration has none.
        """
        slowdown = self.greatest_slowdown
        for _ in range(MAX_ROUNDS):
            span = span_s(slowdown)
            if span <= 0.0:
                return slowdown
            implied = self.slowdown(np.minimum(1.0, work_s * slowdown / span))
            change = float(np.max(np.abs(implied / slowdown - 1.0)))
            slowdown = 0.5 * (slowdown + implied)
            if change < TOLERANCE:
                break
        return slowdown


def core_sharing_of(plan: Plan, nodes: Sequence[NodeInfo]) -> CoreSharing | None:
    """The core sharing under the plan's mapping; None where no processes share cores."""
    if not any(node.crowds for node in nodes):
        return None
    group_of_slot = {
        Slot(node=node_index, local=local): (node_index, group_index)
        for node_index, node in enumerate(nodes)
        for group_index, group in enumerate(node.crowds or ())
        for local in group.locals
    }
    ranks = plan.layout.pipeline_parallel
    # Megatron numbers pipeline ranks slowest.
    size = len(slots_of(nodes)) // ranks
    groups = [group_of_slot.get(slot) for slot in plan.mapping.slots]
    sharers, cores = np.zeros((ranks, ranks)), np.ones(ranks)
    for rank in range(ranks):
        for group in {group for group in groups[rank * size : (rank + 1) * size] if group is not None}:
            members = np.array([float(other == group) for other in groups]).reshape(ranks, size).sum(axis=1)
            members[rank] -= 1.0
            num_cores = float(nodes[group[0]].crowds[group[1]].num_cores)  # type: ignore[index]
            if (1.0 + members.sum()) / num_cores > (1.0 + sharers[rank].sum()) / cores[rank]:
                sharers[rank], cores[rank] = members, num_cores
    return CoreSharing(sharers=sharers, cores=cores)
