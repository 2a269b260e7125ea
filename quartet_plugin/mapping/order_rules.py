"""What an order of ranks keeps of the launcher's, for features that take ranks for places.

`keeps_nodes` is for features that may depend on any part of the launcher's order: whole nodes move, each with
its ranks in order. Such an order equals a start whose hosts are listed in another order.

`keeps_experts` is for kernels that exchange tokens through the memory of devices that fast links join (the
`flex` dispatcher's: megatron/core/transformer/moe/fused_a2a.py hands them the expert-parallel group, whose
consecutive ranks they take for a domain). The members of each expert-parallel group lie on the nodes of one
of the launcher's groups, in the same order. So a group moves as a whole, or its ranks inside their nodes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.model.costs import IntArray
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRules:
    """The rules of a job's orders beside those of every order.

    `domain_devices` are the consecutive slots that fast links join, None for those of a node. Where they are
    fewer than a node's, a part of a node stands for the node.
    """

    keeps_nodes: bool = False
    keeps_experts: bool = False
    domain_devices: int | None = None

    @property
    def limits_orders(self) -> bool:
        """Whether an order keeps anything beside what every order keeps."""
        return self.keeps_nodes or self.keeps_experts

    def fault(self, slots: Sequence[Slot], *, layout: Layout) -> str | None:
        """The rule that an order breaks, in words after "must"; None where it keeps all."""
        if self.keeps_nodes and not _keeps_nodes(slots):
            return "move whole nodes alone, each with its ranks in order"
        if self.keeps_experts and not self._keeps_experts(slots, layout=layout):
            return "keep each expert-parallel group on the nodes of one such group of the launcher's order"
        return None

    def units(self, layout: Layout, *, slots_per_node: int) -> tuple[int, ...]:
        """The length above a node's slots at which consecutive ranks may move as a whole; () without one."""
        span = layout.expert_parallel * (1 if layout.needs_whole_experts else layout.tensor_parallel)
        is_longer = self.keeps_experts and span > slots_per_node and span % slots_per_node == 0
        return (span,) if is_longer and layout.world_size % span == 0 else ()

    def _keeps_experts(self, slots: Sequence[Slot], *, layout: Layout) -> bool:
        if layout.expert_parallel == 1:
            return True
        now, launched = self._places(slots), self._places(sorted(slots))
        return all(
            {tuple(group) for group in now[groups].tolist()}
            <= {tuple(group) for group in launched[groups].tolist()}
            for groups in expert_groups(layout)
        )

    def _places(self, slots: Sequence[Slot]) -> IntArray:
        """The node of each rank, or the part of one."""
        size = sum(slot.node == 0 for slot in slots)
        part = self.domain_devices or size
        part = part if part < size and size % part == 0 else size
        return np.array([slot.node * (size // part) + slot.local // part for slot in slots], dtype=np.int64)


def expert_groups(layout: Layout) -> tuple[IntArray, ...]:
    """The RANKs of each expert-parallel group [groups, expert_parallel], for each way to cut the experts.

    Whole experts have groups of consecutive RANKs. Those that are cut as layers are have consecutive copies
    of a tensor-parallel rank, CP counted before DP (megatron/core/parallel_state.py,
    `expert_decoder_rank_generator`). A plan's settings decide which, after its order is chosen.
    """
    ranks, experts, tensor = np.arange(layout.world_size), layout.expert_parallel, layout.tensor_parallel
    whole = ranks.reshape(-1, experts)
    if tensor == 1 or layout.needs_whole_experts:
        return (whole,)
    return whole, ranks.reshape(-1, experts, tensor).swapaxes(1, 2).reshape(-1, experts)


def _keeps_nodes(slots: Sequence[Slot]) -> bool:
    size = sum(slot.node == 0 for slot in slots)
    return all(
        len({slot.node for slot in run}) == 1 and [slot.local for slot in run] == list(range(len(run)))
        for run in itertools.batched(slots, size)
    )


NO_RULES = OrderRules()
