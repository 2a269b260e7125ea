"""The step's time as a function of the assignment of blocks: the mapping solver's objective.

An approximation whose coefficients are taken from the iteration model: it replays no order.

With one microbatch's time t[k, q] of pipeline rank k in column q (a column is one data- and context-parallel
index, with a block a pipeline rank), m microbatches and v chunks a rank,

    step = max over q of ( m max_k t + (sum_k t - max_k t) / v + transfers while filling and draining )
           + max over k of exposed gradient traffic

Rings are linear in a link's bandwidth and latency (`Collective`). In an all-to-all every rank sends through
its own port what leaves its domain, so its seconds on a link are the iteration model's (`Exchanges`).

Compute runs at the slowdown of the slowest of the ranks that wait for each other in every layer: those of a
tensor, context or expert parallel group. Replicas wait for each other once a step.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.cost import communication
from quartet_plugin.cost.iteration.assigned import AssignedRun
from quartet_plugin.cost.iteration.replay import blocks_on_sends
from quartet_plugin.cost.iteration.terms import COLLECTIVES
from quartet_plugin.mapping.solve import EVALUATIONS, EXACT_LIMIT, NEVER_S, Solution, solve
from quartet_plugin.mapping.topology import (
    Blocks,
    GroupLink,
    Topology,
    blocks_in_order,
    crossings,
    degrees_alone,
    group_link,
    slowdowns_of_blocks,
)
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.layout import Layout
from quartet_plugin.planner.collectives import Collective, Exchanges, ExchangeTable, no_collective
from quartet_plugin.planner.step_kernel import step_seconds

# Links on which only one part of a collective's time is left: its latency, or its volume.
_UNLIMITED_BYTES_PER_S, _PROBE_BYTES_PER_S, _NO_LATENCY_S = 1e18, 1e9, 1e-15

# Groups up to which members are counted by domain instead of sorted.
_FEW_GROUPS = 32

# The share of a step by which crossings between segments lengthen it at most: less than predictions that
# count as equal (`assignment_search.ROUNDING`) differ, more than sums of numbers do.
CROSSING_SHARE = 5e-10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCosts:
    """The costs of a step that do not depend on the slots of its ranks; arrays are [pipeline_parallel].

    `compute_s`: one microbatch forward and backward on a rank at slowdown 1, without collectives.
    `tensor`, `context`, `expert`: one microbatch's exposed collectives; those of experts whose groups stay in
    a block count with `tensor`. `has_whole_experts`: ranks of a block share none of them. `boundary_bytes`: a
    boundary tensor, its latency counted once; `peer_share`: the share of a collective's bandwidth inside a
    domain that one sender reaches; `is_blocking`: ranks wait for their own sends. `gradients`: once a step;
    compute hides `hidden_s` of them, but at least the part `exposed_share` stays exposed.
    """

    layout: Layout
    num_microbatches: int
    compute_s: FloatArray
    tensor: Collective
    context: Collective | Exchanges
    expert: Collective | Exchanges
    gradients: Collective
    boundary_bytes: float
    hidden_s: FloatArray
    exposed_share: float = 1.0
    peer_share: float = 1.0
    is_blocking: bool = True
    has_whole_experts: bool = False

    @property
    def degrees(self) -> Layout:
        """The degrees that an order of blocks depends on, expert parallelism in blocks."""
        return degrees_alone(self.layout, has_whole_experts=self.has_whole_experts)


class StepTime:
    """`StepCosts` on `Topology`: call it with an arrangement, blocks by [pp, copies], for seconds a step.

    `inside` names the groups ("context", "expert") that may not leave a domain: an arrangement that breaks it
    takes `NEVER_S` a microbatch.
    """

    def __init__(
        self, costs: StepCosts, topology: Topology, blocks: Blocks, *, inside: frozenset[str] = frozenset()
    ) -> None:
        self._costs, self._topology, self._blocks, self._inside = costs, topology, blocks, inside
        self._degrees = costs.degrees
        self._links: dict[bytes, GroupLink] = {}
        self._has_equal_links = topology.has_equal_links
        self._transfer_s = _transfer_matrix(costs, topology)
        tensor = group_link(topology, [0] * costs.layout.tensor_parallel)
        ranks = range(costs.layout.pipeline_parallel)
        self._tensor_s = np.array([costs.tensor.seconds(tensor, rank) for rank in ranks])
        self._kernel = self._of_equal_links() if self._has_equal_links else None

    def __call__(self, arrangement: IntArray) -> float:
        """Seconds a step, longer by at most `CROSSING_SHARE` of it where pipelines or groups cross segments.

        So crossings decide between arrangements that take equally long, and between no others.
        """
        if self._kernel is not None:
            slowdowns = slowdowns_of_blocks(self._degrees, self._blocks, arrangement)
            seconds = self._kernel(self._blocks.domain[arrangement], slowdowns)
        else:
            seconds = self.by_columns(arrangement)
        if self._topology.segment_of_slot is None:
            return seconds
        num_crossings = crossings(self._degrees, self._blocks.segment[arrangement])
        return seconds * (1.0 + CROSSING_SHARE * num_crossings / (3 * len(self._blocks)))

    def by_columns(self, arrangement: IntArray) -> float:
        """Seconds a step on any links, whatever crosses segments; many times slower than the kernel."""
        return float(self.column_times(arrangement).max()) + self._gradients(self._blocks.domain[arrangement])

    def _of_equal_links(self) -> Callable[[IntArray, FloatArray], float]:
        """The step by domains and slowdowns in compiled code."""
        costs, topology, layout = self._costs, self._topology, self._costs.layout
        num_domains = len(topology.between_bytes_per_s)
        other = 1 if num_domains > 1 else 0
        none = no_collective(layout.pipeline_parallel)
        groups = (costs.context, costs.expert)
        rings = [*(none if isinstance(group, Exchanges) else group for group in groups), costs.gradients]
        sizes = (self._degrees.context_parallel, self._degrees.expert_parallel)
        num_copies = len(self._blocks) // layout.pipeline_parallel
        exchanges = ExchangeTable(groups, sizes, topology, num_ranks=layout.pipeline_parallel)
        arrays = (
            costs.compute_s,
            self._tensor_s,
            np.array([*sizes, num_copies], dtype=np.int64),
            np.array([ring.volume_bytes for ring in rings], dtype=np.float64),
            np.array([ring.rounds for ring in rings], dtype=np.float64),
            np.array([NEVER_S if name in self._inside else 0.0 for name in ("context", "expert", "")]),
            np.array(
                [
                    topology.inside_bytes_per_s,
                    topology.inside_latency_s,
                    topology.between_bytes_per_s[0, other],
                    topology.between_latency_s[0, other],
                ],
                dtype=np.float64,
            ),
            np.array([self._transfer_s[0, 0], self._transfer_s[0, other]]),
        )

        def seconds(domains: IntArray, slowdowns: FloatArray) -> float:
            while True:
                step = step_seconds(
                    domains,
                    slowdowns,
                    *arrays,
                    exchanges.rows,
                    exchanges.seconds,
                    exchanges.unknown,
                    costs.num_microbatches,
                    layout.virtual_stages,
                    costs.is_blocking,
                    costs.hidden_s,
                    costs.exposed_share,
                )
                if step >= 0.0:
                    return step
                exchanges.add_unknown()

        return seconds

    def column_times(self, arrangement: IntArray) -> FloatArray:
        """Seconds of each column's pipeline [copies]."""
        costs, layout, degrees = self._costs, self._costs.layout, self._degrees
        domains = self._blocks.domain[arrangement]
        busy = (
            slowdowns_of_blocks(degrees, self._blocks, arrangement) * costs.compute_s[:, None]
            + self._tensor_s[:, None]
        )
        for name, collective, size in (
            ("context", costs.context, degrees.context_parallel),
            ("expert", costs.expert, degrees.expert_parallel),
        ):
            if size > 1:
                busy += self._grouped(domains, collective, size, is_inside=name in self._inside)
        filling = np.zeros(busy.shape[1])
        if len(busy) > 1:
            forward = self._transfer_s[domains[:-1], domains[1:]]
            backward = self._transfer_s[domains[1:], domains[:-1]]
            if costs.is_blocking:
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

    def _grouped(
        self, domains: IntArray, collective: Collective | Exchanges, size: int, *, is_inside: bool
    ) -> FloatArray:
        """Seconds of the collectives of groups of `size` neighbouring columns [pp, copies]."""
        groups = np.ascontiguousarray(domains).reshape(-1, size)
        numbers, firsts = alike(groups) if self._has_equal_links else different(groups)
        ranks = np.arange(len(domains))
        # The links of groups that are alike are equal.
        by_link = np.empty((len(firsts), len(domains)))
        for number, first in enumerate(firsts.tolist()):
            link = self.link(groups[first])
            is_forbidden = is_inside and link.num_domains > 1
            by_link[number] = (
                NEVER_S if is_forbidden else [collective.seconds(link, rank) for rank in range(len(domains))]
            )
        numbers = numbers.reshape(len(domains), -1)
        seconds: FloatArray = np.repeat(by_link[numbers, ranks[:, None]], size, axis=1)
        return seconds

    def _gradients(self, domains: IntArray) -> float:
        costs = self._costs
        traffic = self._once(domains, costs.gradients)
        return max(0.0, float(np.maximum(traffic * costs.exposed_share, traffic - costs.hidden_s).max()))

    def _once(self, domains: IntArray, collective: Collective) -> FloatArray:
        """Seconds of each pipeline rank's collective of all its columns [pp]."""
        groups = np.ascontiguousarray(domains)
        numbers, firsts = alike(groups) if self._has_equal_links else different(groups)
        links = [self.link(groups[first]) for first in firsts.tolist()]
        return np.array(
            [collective.seconds(links[number], rank) for rank, number in enumerate(numbers.tolist())]
        )

    def link(self, domains: IntArray) -> GroupLink:
        """The link of a group whose members are in `domains`, computed once."""
        key = domains.tobytes()
        if key not in self._links:
            self._links[key] = group_link(self._topology, domains.tolist())
        return self._links[key]


def alike(groups: IntArray) -> tuple[IntArray, IntArray]:
    """The kind of each group [num_groups], and the first group of each kind.

    Groups are alike that span as many domains with as many members in the domain that has the fewest.
    """
    num_groups, size = groups.shape
    num_domains, fewest = _counted(groups) if num_groups <= _FEW_GROUPS else _sorted(groups)
    _, firsts, numbers = np.unique(num_domains * (size + 1) + fewest, return_index=True, return_inverse=True)
    return numbers.ravel(), firsts


def _counted(groups: IntArray) -> tuple[IntArray, IntArray]:
    """The domains of each group, and its members in the one that has the fewest: fast for few groups."""
    num_groups, size = groups.shape
    stride = int(groups.max()) + 1
    cells = groups + np.arange(num_groups)[:, None] * stride
    counts = np.bincount(cells.ravel(), minlength=num_groups * stride).reshape(num_groups, stride)
    return np.count_nonzero(counts, axis=1), np.where(counts > 0, counts, size).min(axis=1)


def _sorted(groups: IntArray) -> tuple[IntArray, IntArray]:
    """The result of `_counted`, computed by sorting: fast for many small groups."""
    num_groups, size = groups.shape
    ordered = np.sort(groups, axis=1)
    begins = np.ones((num_groups, size), dtype=np.bool_)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=num_groups * size)
    num_domains = begins.sum(axis=1)
    return num_domains, np.minimum.reduceat(lengths, np.cumsum(num_domains) - num_domains)


def different(groups: IntArray) -> tuple[IntArray, IntArray]:
    """The result of `alike` where only equal groups are alike."""
    _, firsts, numbers = np.unique(groups, axis=0, return_index=True, return_inverse=True)
    return numbers.ravel(), firsts


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


@functools.lru_cache(maxsize=16)
def step_costs(assigned: AssignedRun) -> StepCosts:
    """The run's step in the closed form, its coefficients taken from the iteration model."""
    run, layout, constants = assigned.run, assigned.run.layout, assigned.constants
    degrees = assigned.degrees
    p = layout.pipeline_parallel
    latency = communication.transfer_latency_s(constants)
    intra_node = communication.transfer_s(run, constants, sender=0, receiver=0) - latency
    peer = run.cluster.scale_up_bytes_per_s * constants.peer
    forward, backward = _pass_s(assigned)
    slow = _link(run.copies, 1.0, 0.0)
    plain = np.array([assigned.gradients_s(k, slow, 0.0, 0.0) for k in range(p)])
    least = np.array([assigned.gradients_s(k, slow, math.inf, math.inf) for k in range(p)])
    hides = plain - np.array([assigned.gradients_s(k, slow, forward[k], backward[k]) for k in range(p)])
    share = float((least / np.where(plain > 0, plain, 1.0)).max()) if plain.any() else 0.0
    return StepCosts(
        layout=layout,
        num_microbatches=run.num_microbatches,
        compute_s=assigned.by_rank(
            lambda part: sum(times.total_s for name, times in part.items() if name not in COLLECTIVES)
        ),
        tensor=_tensor_traffic(assigned),
        context=_exchanges(assigned, "cp_comm", degrees.context_parallel)
        if run.exchanging_ranks > 1
        else _collective(assigned, "cp_comm", degrees.context_parallel, layout.tensor_parallel),
        expert=_exchanges(assigned, "ep_comm", degrees.expert_parallel),
        gradients=_gradients(assigned),
        boundary_bytes=intra_node * peer,
        hidden_s=hides,
        exposed_share=share,
        peer_share=constants.peer / constants.scale_up,
        is_blocking=blocks_on_sends(run),
        has_whole_experts=run.has_whole_experts,
    )


def _collective(assigned: AssignedRun, name: str, size: int, stride: int) -> Collective:
    """The coefficients of one kind: its time is linear in a link's inverse bandwidth and latency."""
    if size == 1:
        return no_collective(assigned.run.layout.pipeline_parallel)

    def seconds(bytes_per_s: float, latency_s: float) -> FloatArray:
        link = _link(size, bytes_per_s, latency_s, is_inside=name == "tp_comm")
        return assigned.by_rank(lambda part: part[name].total_s, assigned.parts_over(link, stride))

    return Collective(
        volume_bytes=seconds(_PROBE_BYTES_PER_S, 0.0) * _PROBE_BYTES_PER_S,
        rounds=seconds(_UNLIMITED_BYTES_PER_S, 1.0) / (size - 1),
    )


def _exchanges(assigned: AssignedRun, name: str, size: int) -> Collective | Exchanges:
    """The seconds of all-to-alls of groups of `size` blocks by their link, from the iteration model."""
    if size == 1:
        return no_collective(assigned.run.layout.pipeline_parallel)

    @functools.cache
    def seconds_over(link: GroupLink) -> FloatArray:
        parts = assigned.parts_over(link, assigned.run.layout.tensor_parallel)
        return assigned.by_rank(lambda part: part[name].total_s, parts)

    return Exchanges(seconds_over=seconds_over)


def _tensor_traffic(assigned: AssignedRun) -> Collective:
    """The coefficients of what the ranks of a block send each other.

    It is tensor parallelism; where products hide transfers, or ranks of a block hold all experts between them
    and exchange tokens as well, the seconds on the block's own links.
    """
    layout, link = assigned.run.layout, assigned.tensor_link
    has_exchanges = layout.expert_parallel > 1 and assigned.degrees.expert_parallel == 1
    if layout.tensor_partition is None and not has_exchanges:
        return _collective(assigned, "tp_comm", layout.tensor_parallel, 1)
    names = ("tp_comm", "ep_comm") if has_exchanges else ("tp_comm",)
    seconds = assigned.by_rank(
        lambda part: sum(part[name].total_s for name in names), assigned.parts_over(link, 1)
    )
    return Collective(volume_bytes=seconds * link.bytes_per_s, rounds=np.zeros(layout.pipeline_parallel))


def _gradients(assigned: AssignedRun) -> Collective:
    size = assigned.run.copies
    ranks = range(assigned.run.layout.pipeline_parallel)
    if size == 1:
        return no_collective(len(ranks))
    slow = [assigned.gradients_s(k, _link(size, _PROBE_BYTES_PER_S, 0.0), 0.0, 0.0) for k in ranks]
    late = [assigned.gradients_s(k, _link(size, _UNLIMITED_BYTES_PER_S, 1.0), 0.0, 0.0) for k in ranks]
    return Collective(volume_bytes=np.array(slow) * _PROBE_BYTES_PER_S, rounds=np.array(late) / (size - 1))


def _pass_s(assigned: AssignedRun) -> tuple[FloatArray, FloatArray]:
    """Seconds of one microbatch's forward and backward on each rank."""
    forward = assigned.by_rank(lambda part: sum(times.forward_s for times in part.values()))
    total = assigned.by_rank(lambda part: sum(times.total_s for times in part.values()))
    return forward, total - forward


def solve_step(
    costs: StepCosts,
    topology: Topology,
    *,
    inside: frozenset[str] = frozenset(),
    seed: int = 0,
    evaluations: int = EVALUATIONS,
    exact_limit: int = EXACT_LIMIT,
    num_others: int = 0,
) -> Solution:
    """The order of slots with the least closed-form step that the search finds; raises as `solve` does."""
    return solve(
        costs.degrees,
        topology,
        lambda blocks: StepTime(costs, topology, blocks, inside=inside),
        compute_s=costs.compute_s,
        inside=inside,
        seed=seed,
        evaluations=evaluations,
        exact_limit=exact_limit,
        num_others=num_others,
    )


def _link(size: int, bytes_per_s: float, latency_s: float, *, is_inside: bool = False) -> GroupLink:
    """A group inside one domain, or with every rank in a domain of its own."""
    return GroupLink(
        size=size,
        num_domains=1 if is_inside or size == 1 else size,
        local=size if is_inside else 1,
        bytes_per_s=bytes_per_s,
        port_bytes_per_s=bytes_per_s,
        latency_s=max(latency_s, _NO_LATENCY_S),
        inside_latency_s=max(latency_s, _NO_LATENCY_S),
    )
