"""The step's time as a function of where blocks are: what the solver minimizes.

With one microbatch's time t[k, q] of pipeline rank k in column q (a column is one data- and context-parallel
index, with a block a pipeline rank), m microbatches and v chunks a rank,

    step = max over q of ( m max_k t + (sum_k t - max_k t) / v + transfers while filling and draining )
           + max over k of exposed gradient traffic

Compute runs at the pace of the slowest of the ranks that wait for each other in every layer: those of a
tensor, context or expert parallel group. Replicas wait for each other once a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.mapping.topology import Blocks, GroupLink, Topology, blocks_in_order, group_link
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.layout import Layout

# What a forbidden arrangement takes a microbatch: no step takes so long, and sums of it stay finite.
NEVER_S = 1e30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collective:
    """Collectives of each pipeline rank [pp]: bytes through a rank's link, and passes around the ring."""

    volume_bytes: FloatArray
    rounds: FloatArray

    def seconds(self, link: GroupLink, rank: int) -> float:
        """Their time on `link`."""
        if link.size == 1:
            return 0.0
        moved = float(self.volume_bytes[rank]) / link.bytes_per_s
        return moved + float(self.rounds[rank]) * link.ring_latency_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCosts:
    """What a step does wherever its ranks are; arrays are [pipeline_parallel].

    `compute_s`: one microbatch forward and backward on a rank at slowdown 1, collectives left out.
    `tensor`, `context`, `expert`: of one microbatch, what is not hidden. `boundary_bytes`: a boundary tensor,
    its latency taken once; `peer_share`: the bandwidth one sender reaches of a collective's inside a domain;
    `blocking`: ranks wait for their own sends. `gradients`, `expert_gradients`: once a step, of which
    `exposed_share` stays visible at least, and what `hidden_s` cannot hide.
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
    takes for ever.
    """

    def __init__(
        self, costs: StepCosts, places: Topology, blocks: Blocks, *, inside: frozenset[str] = frozenset()
    ) -> None:
        self._costs, self._places, self._blocks, self._inside = costs, places, blocks, inside
        self._links: dict[bytes, GroupLink] = {}
        self._transfer_s = _transfer_matrix(costs, places)
        home = group_link(places, [0] * costs.layout.tensor_parallel)
        ranks = range(costs.layout.pipeline_parallel)
        self._tensor_s = np.array([costs.tensor.seconds(home, rank) for rank in ranks])

    def __call__(self, arrangement: IntArray) -> float:
        """Seconds a step."""
        return float(self.column_times(arrangement).max()) + self._gradients(self._blocks.domain[arrangement])

    def column_times(self, arrangement: IntArray) -> FloatArray:
        """Seconds of each column's pipeline [copies]."""
        costs, layout = self._costs, self._costs.layout
        domains = self._blocks.domain[arrangement]
        busy = self.paces(arrangement) * costs.compute_s[:, None] + self._tensor_s[:, None]
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
        found: FloatArray = costs.num_microbatches * longest
        found += (busy.sum(axis=0) - longest) / layout.virtual_stages + filling
        return found

    def paces(self, arrangement: IntArray) -> FloatArray:
        """The slowdown of each block with those it waits for in every layer [pp, copies]."""
        layout = self._costs.layout
        pace: FloatArray = self._blocks.slowdown[arrangement]
        for size in (layout.context_parallel, layout.expert_parallel):
            if size > 1:
                groups = pace.reshape(len(pace), -1, size).max(axis=2)
                pace = np.repeat(groups, size, axis=1)
        return pace

    def _grouped(self, domains: IntArray, collective: Collective, size: int, *, inside: bool) -> FloatArray:
        """Seconds of the collectives of groups of `size` neighbouring columns [pp, copies]."""
        found = np.zeros(domains.shape)
        for rank, row in enumerate(domains):
            for at in range(0, len(row), size):
                link = self.link(row[at : at + size])
                seconds = collective.seconds(link, rank)
                found[rank, at : at + size] = NEVER_S if inside and link.num_domains > 1 else seconds
        return found

    def _gradients(self, domains: IntArray) -> float:
        costs, experts = self._costs, self._costs.layout.expert_parallel
        worst = 0.0
        for rank, row in enumerate(domains):
            spent = costs.gradients.seconds(self.link(row), rank)
            if costs.expert_gradients.volume_bytes[rank] > 0:
                spent += max(
                    costs.expert_gradients.seconds(self.link(row[at::experts]), rank) for at in range(experts)
                )
            worst = max(worst, spent * costs.exposed_share, spent - float(costs.hidden_s[rank]))
        return worst

    def link(self, domains: IntArray) -> GroupLink:
        """The link of a group, looked up where it was seen before."""
        key = domains.tobytes()
        found = self._links.get(key)
        if found is None:
            found = self._links[key] = group_link(self._places, domains.tolist())
        return found


def _transfer_matrix(costs: StepCosts, places: Topology) -> FloatArray:
    """Seconds of a boundary tensor between domains, row to column; inside one on the diagonal."""
    between = costs.boundary_bytes / np.where(
        places.between_bytes_per_s > 0, places.between_bytes_per_s, np.inf
    )
    found: FloatArray = between + places.between_latency_s
    own = costs.boundary_bytes / (places.inside_bytes_per_s * costs.peer_share) + places.inside_latency_s
    np.fill_diagonal(found, own)
    return found


def step_s(
    costs: StepCosts, places: Topology, slots: Sequence[int], *, inside: frozenset[str] = frozenset()
) -> float:
    """Seconds a step when RANK r is played by slot `slots[r]`, an index into `places.slots`.

    Raises PlanError where a tensor-parallel group leaves its node or domain.
    """
    blocks = blocks_in_order(places, slots, size=costs.layout.tensor_parallel)
    arrangement = np.arange(len(blocks), dtype=np.int64).reshape(costs.layout.pipeline_parallel, -1)
    return StepTime(costs, places, blocks, inside=inside)(arrangement)


def nothing(num_ranks: int) -> Collective:
    """A collective that is not there."""
    return Collective(volume_bytes=np.zeros(num_ranks), rounds=np.zeros(num_ranks))
