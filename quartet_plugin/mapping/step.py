"""The step's time as a function of the assignment of blocks: the solver's objective.

With one microbatch's time t[k, q] of pipeline rank k in column q (a column is one data- and context-parallel
index, with a block a pipeline rank), m microbatches and v chunks a rank,

    step = max over q of ( m max_k t + (sum_k t - max_k t) / v + transfers while filling and draining )
           + max over k of exposed gradient traffic

Compute runs at the slowdown of the slowest of the ranks that wait for each other in every layer: those of a
tensor, context or expert parallel group. Replicas wait for each other once a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.mapping.topology import Blocks, GroupLink, Topology, blocks_in_order, group_link
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.layout import Layout

# Seconds a microbatch of a forbidden arrangement: longer than any step, and sums of it stay finite.
NEVER_S = 1e30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collective:
    """Collectives of each pipeline rank [pp]: bytes through a rank's link, and passes around the ring."""

    volume_bytes: FloatArray
    rounds: FloatArray

    def seconds(self, link: GroupLink, rank: int) -> float:
        """Seconds of rank `rank`'s collectives on `link`."""
        if link.size == 1:
            return 0.0
        moved = float(self.volume_bytes[rank]) / link.bytes_per_s
        return moved + float(self.rounds[rank]) * link.ring_latency_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCosts:
    """The costs of a step that do not depend on the slots of its ranks; arrays are [pipeline_parallel].

    `compute_s`: one microbatch forward and backward on a rank at slowdown 1, without collectives.
    `tensor`, `context`, `expert`: one microbatch's exposed collectives. `boundary_bytes`: a boundary tensor,
    its latency counted once; `peer_share`: the share of a collective's bandwidth inside a domain that one
    sender reaches; `blocking`: ranks wait for their own sends. `gradients`, `expert_gradients`: once a step;
    compute hides `hidden_s` of them, but at least the part `exposed_share` stays exposed.
    """

    layout: Layout
    num_microbatches: int
    compute_s: FloatArray
    tensor: Collective
    context: Collective
    expert: Collective
    gradients: Collective
    expert_gradients: Collective
    boundary_bytes: float
    hidden_s: FloatArray
    exposed_share: float = 1.0
    peer_share: float = 1.0
    blocking: bool = True


class StepTime:
    """`StepCosts` on `Topology`: call it with an arrangement, blocks by [pp, copies], for seconds a step.

    `inside` names the groups ("context", "expert") that may not leave a domain: an arrangement that breaks it
    takes `NEVER_S` a microbatch.
    """

    def __init__(
        self, costs: StepCosts, topology: Topology, blocks: Blocks, *, inside: frozenset[str] = frozenset()
    ) -> None:
        self._costs, self._topology, self._blocks, self._inside = costs, topology, blocks, inside
        self._links: dict[bytes, GroupLink] = {}
        self._transfer_s = _transfer_matrix(costs, topology)
        tensor = group_link(topology, [0] * costs.layout.tensor_parallel)
        ranks = range(costs.layout.pipeline_parallel)
        self._tensor_s = np.array([costs.tensor.seconds(tensor, rank) for rank in ranks])

    def __call__(self, arrangement: IntArray) -> float:
        """Seconds a step."""
        return float(self.column_times(arrangement).max()) + self._gradients(self._blocks.domain[arrangement])

    def column_times(self, arrangement: IntArray) -> FloatArray:
        """Seconds of each column's pipeline [copies]."""
        costs, layout = self._costs, self._costs.layout
        domains = self._blocks.domain[arrangement]
        busy = self.slowdowns(arrangement) * costs.compute_s[:, None] + self._tensor_s[:, None]
        for name, collective, size in (
            ("context", costs.context, layout.context_parallel),
            ("expert", costs.expert, layout.expert_parallel),
        ):
            if size > 1:
                busy += self._grouped(domains, collective, size, inside=name in self._inside)
        filling = np.zeros(busy.shape[1])
        if len(busy) > 1:
            forward = self._transfer_s[domains[:-1], domains[1:]]
            backward = self._transfer_s[domains[1:], domains[:-1]]
            if costs.blocking:
                busy[:-1] += forward
                busy[1:] += backward
            else:
                filling = (forward + backward).sum(axis=0)
            if layout.virtual_stages > 1:
                wrap = self._transfer_s[domains[-1], domains[0]] + self._transfer_s[domains[0], domains[-1]]
                filling = filling + wrap * (layout.virtual_stages - 1)
        longest = busy.max(axis=0)
        seconds: FloatArray = costs.num_microbatches * longest
        seconds += (busy.sum(axis=0) - longest) / layout.virtual_stages + filling
        return seconds

    def slowdowns(self, arrangement: IntArray) -> FloatArray:
        """The slowdown of each block with those it waits for in every layer [pp, copies]."""
        layout = self._costs.layout
        slowdowns: FloatArray = self._blocks.slowdown[arrangement]
        for size in (layout.context_parallel, layout.expert_parallel):
            if size > 1:
                groups = slowdowns.reshape(len(slowdowns), -1, size).max(axis=2)
                slowdowns = np.repeat(groups, size, axis=1)
        return slowdowns

    def _grouped(self, domains: IntArray, collective: Collective, size: int, *, inside: bool) -> FloatArray:
        """Seconds of the collectives of groups of `size` neighbouring columns [pp, copies]."""
        seconds = np.zeros(domains.shape)
        for rank, row in enumerate(domains):
            for start in range(0, len(row), size):
                group = slice(start, start + size)
                link = self.link(row[group])
                is_forbidden = inside and link.num_domains > 1
                seconds[rank, group] = NEVER_S if is_forbidden else collective.seconds(link, rank)
        return seconds

    def _gradients(self, domains: IntArray) -> float:
        costs, experts = self._costs, self._costs.layout.expert_parallel
        worst = 0.0
        for rank, row in enumerate(domains):
            traffic = costs.gradients.seconds(self.link(row), rank)
            if costs.expert_gradients.volume_bytes[rank] > 0:
                traffic += max(
                    costs.expert_gradients.seconds(self.link(row[first::experts]), rank)
                    for first in range(experts)
                )
            worst = max(worst, traffic * costs.exposed_share, traffic - float(costs.hidden_s[rank]))
        return worst

    def link(self, domains: IntArray) -> GroupLink:
        """The link of a group whose members are in `domains`, computed once."""
        key = domains.tobytes()
        if key not in self._links:
            self._links[key] = group_link(self._topology, domains.tolist())
        return self._links[key]


def _transfer_matrix(costs: StepCosts, topology: Topology) -> FloatArray:
    """Seconds of a boundary tensor between domains, row to column; inside one on the diagonal."""
    between = costs.boundary_bytes / np.where(
        topology.between_bytes_per_s > 0, topology.between_bytes_per_s, np.inf
    )
    seconds: FloatArray = between + topology.between_latency_s
    inside = costs.boundary_bytes / (topology.inside_bytes_per_s * costs.peer_share)
    np.fill_diagonal(seconds, inside + topology.inside_latency_s)
    return seconds


def step_s(
    costs: StepCosts, topology: Topology, slots: Sequence[int], *, inside: frozenset[str] = frozenset()
) -> float:
    """Seconds a step when RANK r is played by slot `slots[r]`, an index into `topology.slots`.

    Raises PlanError where a tensor-parallel group leaves its node or domain.
    """
    blocks = blocks_in_order(topology, slots, size=costs.layout.tensor_parallel)
    arrangement = np.arange(len(blocks), dtype=np.int64).reshape(costs.layout.pipeline_parallel, -1)
    return StepTime(costs, topology, blocks, inside=inside)(arrangement)


def no_collective(num_ranks: int) -> Collective:
    """The collective of groups of one rank: no bytes and no rounds."""
    return Collective(volume_bytes=np.zeros(num_ranks), rounds=np.zeros(num_ranks))
