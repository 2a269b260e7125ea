"""The prediction of a run whose ranks are on given slots: unequal devices, and the links that groups get.

Compute is multiplied by the slowdown of the slots; collectives and transfers are computed for machines with
the links of their group. On equal devices in the stock order the prediction is that of `cost.predict`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from quartet_plugin.cost import communication
from quartet_plugin.cost.cluster import view_from
from quartet_plugin.cost.compute import Times
from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.iteration.orders import device_of_stages, stages_of_devices
from quartet_plugin.cost.iteration.step import (
    PipelineTerms,
    RowPrediction,
    fullest_rank,
    held_weights,
    pipeline_terms,
    step_terms,
    summed,
)
from quartet_plugin.cost.iteration.terms import COLLECTIVES, StageParts, stage_parts
from quartet_plugin.cost.memory import weights_of_stages
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.mapping.topology import (
    Blocks,
    GroupLink,
    Topology,
    blocks_in_order,
    group_link,
    slowdowns_of_blocks,
)
from quartet_plugin.model.costs import FloatArray, IntArray

# Replicas whose whole pipeline is replayed: the slowest ones without their waiting.
NUM_REPLAYED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replica:
    """One replica, an entry a pipeline rank: slowdown, links of its context and expert groups, domain."""

    slowdowns: tuple[float, ...]
    context: tuple[GroupLink, ...]
    expert: tuple[GroupLink, ...]
    domains: tuple[int, ...]


class AssignedRun:
    """A run on a topology: its prediction under an order of slots, and the terms of any link."""

    def __init__(self, run: TrainingRun, constants: Constants, topology: Topology) -> None:
        self.run, self.constants, self.topology = run, constants, topology
        self._stages = stages_of_devices(run)
        self._parts = stage_parts(run, constants)
        self._parts_by_link: dict[tuple[GroupLink, int], list[StageParts]] = {}
        self._rank_seconds: dict[tuple[int, float, GroupLink, GroupLink], float] = {}
        self._links: dict[bytes, GroupLink] = {}
        self._transfers: dict[tuple[float, float] | None, float] = {}
        self._held = [held_weights(run, rank) for rank in range(run.layout.pipeline_parallel)]
        self._fullest = fullest_rank(run, weights_of_stages(run))
        self._gradient_times: dict[tuple[float, float, GroupLink, float, float], float] = {}
        self.tensor_link = group_link(topology, [0] * run.layout.tensor_parallel)

    def predict(self, slots: tuple[int, ...]) -> RowPrediction:
        """The prediction when slot `slots[r]` plays RANK r."""
        blocks, arrangement = self._arranged(slots)
        replicas = self._slowest_replicas(blocks, arrangement)
        slowest = max(
            (self._replica_terms(replica) for replica in replicas), key=lambda time: sum(time.terms.values())
        )
        links = [self._link(row) for row in blocks.domain[arrangement]]
        # In the cost model the rank with most weights reduces longest; another may on a slower link.
        gradients = max(
            self.gradients_s(rank, link, slowest.forward_s, slowest.backward_s)
            for rank, link in enumerate(links)
            if rank == self._fullest or link != links[self._fullest]
        )
        step = step_terms(
            self.run,
            self.constants,
            forward_s=slowest.forward_s,
            backward_s=slowest.backward_s,
            gradients_s=gradients,
            slowdown=float(blocks.slowdown.max()),
        )
        return summed(self.run, self.constants, slowest, step)

    def stage_times(self, slots: tuple[int, ...]) -> tuple[list[Times], FloatArray, FloatArray]:
        """The stages' times on the slowest replica without waiting, and its transfers ahead and back."""
        replica = self._slowest_replicas(*self._arranged(slots))[0]
        sums = [Times.sum_of(part.values()) for part in self._replica_parts(replica)]
        return sums, *self._replica_transfers(replica)

    def slowdowns(self, slots: tuple[int, ...]) -> FloatArray:
        """The slowdown of each pipeline rank, its slowest replica's [pp]."""
        blocks, arrangement = self._arranged(slots)
        slowest: FloatArray = slowdowns_of_blocks(self.run.layout, blocks, arrangement).max(axis=1)
        return slowest

    def by_rank(
        self, seconds: Callable[[StageParts], float], parts: list[StageParts] | None = None
    ) -> FloatArray:
        """Seconds of a microbatch on each pipeline rank at slowdown 1 [pp], by `parts` of the stages."""
        each = [seconds(part) for part in parts or self._parts]
        return np.array([sum(each[k] for k in stages) for stages in self._stages])

    def parts_over(self, link: GroupLink, stride: int) -> list[StageParts]:
        """The seconds of every stage by cause when groups of ranks `stride` apart are joined by `link`."""
        if (link, stride) not in self._parts_by_link:
            machines, constants = view_from(self.run.machines, self.constants, link, stride=stride)
            parts = stage_parts(replace(self.run, machines=machines), constants)
            self._parts_by_link[link, stride] = parts
        return self._parts_by_link[link, stride]

    def gradients_s(self, rank: int, link: GroupLink, forward_s: float, backward_s: float) -> float:
        """Exposed gradient and parameter traffic of one pipeline rank, in seconds an iteration."""
        held = self._held[rank]
        key = (held.dense, held.expert, link, forward_s, backward_s)
        if key not in self._gradient_times:
            stride = self.run.layout.tensor_parallel
            machines, constants = view_from(self.run.machines, self.constants, link, stride=stride)
            self._gradient_times[key] = communication.data_parallel(
                replace(self.run, machines=machines),
                constants,
                dense=held.dense,
                expert=held.expert,
                forward_s=forward_s,
                backward_s=backward_s,
            )
        return self._gradient_times[key]

    def _arranged(self, slots: tuple[int, ...]) -> tuple[Blocks, IntArray]:
        """The blocks in an order of slots, and their arrangement [pp, copies]."""
        layout = self.run.layout
        blocks = _blocks_of_slots(self.topology, slots, layout.tensor_parallel)
        return blocks, np.arange(len(blocks), dtype=np.int64).reshape(layout.pipeline_parallel, -1)

    def _link(self, domains: IntArray) -> GroupLink:
        """The link of a group whose members are in `domains`, computed once."""
        key = domains.tobytes()
        if key not in self._links:
            self._links[key] = group_link(self.topology, domains.tolist())
        return self._links[key]

    def _slowest_replicas(self, blocks: Blocks, arrangement: IntArray) -> list[_Replica]:
        """The replicas that may be slowest, the slowest first, equal ones once."""
        layout = self.run.layout
        domains = blocks.domain[arrangement]
        slowdowns = slowdowns_of_blocks(layout, blocks, arrangement)
        replicas: dict[_Replica, None] = {}
        for column in range(domains.shape[1]):
            links = []
            for size in (layout.context_parallel, layout.expert_parallel):
                first = column - column % size
                members = np.ascontiguousarray(domains[:, first : first + size])
                links.append(tuple(self._link(row) for row in members))
            replica = _Replica(
                slowdowns=tuple(slowdowns[:, column].tolist()),
                context=links[0],
                expert=links[1],
                domains=tuple(domains[:, column].tolist()),
            )
            replicas[replica] = None
        return sorted(replicas, key=self._least_s, reverse=True)[:NUM_REPLAYED]

    def _least_s(self, replica: _Replica) -> float:
        """Seconds a step of the replica without waiting but while the pipeline fills and drains."""
        ranks = range(len(replica.domains))
        busy = [
            self._rank_s(rank, replica.slowdowns[rank], replica.context[rank], replica.expert[rank])
            for rank in ranks
        ]
        longest, layout = max(busy), self.run.layout
        transfers = sum(
            self._transfer_s(here, there) + self._transfer_s(there, here)
            for here, there in pairwise(replica.domains)
        )
        return self.run.num_microbatches * longest + (sum(busy) - longest) / layout.virtual_stages + transfers

    def _rank_s(self, rank: int, slowdown: float, context: GroupLink, expert: GroupLink) -> float:
        """Seconds of one microbatch on a pipeline rank, without its transfers."""
        key = (rank, slowdown, context, expert)
        if key not in self._rank_seconds:
            self._rank_seconds[key] = sum(
                times.total
                for stage in self._stages[rank]
                for times in self._parts_on(stage, slowdown, context, expert).values()
            )
        return self._rank_seconds[key]

    def _parts_on(self, stage: int, slowdown: float, context: GroupLink, expert: GroupLink) -> StageParts:
        """One microbatch's seconds of a stage by cause, on slots of `slowdown` and the groups' links."""
        tp = self.run.layout.tensor_parallel
        parts = {name: times.scaled(slowdown) for name, times in self._parts[stage].items()}
        groups = (self.tensor_link, 1), (context, tp), (expert, tp)
        for name, (link, stride) in zip(COLLECTIVES, groups, strict=True):
            if link.size > 1:
                parts[name] = self.parts_over(link, stride)[stage][name]
        return parts

    def _replica_terms(self, replica: _Replica) -> PipelineTerms:
        """The replica's pipeline, between the domains of its ranks."""
        forward_s, backward_s = self._replica_transfers(replica)
        return pipeline_terms(
            self.run, self._replica_parts(replica), forward_s=forward_s, backward_s=backward_s
        )

    def _replica_parts(self, replica: _Replica) -> list[StageParts]:
        """One microbatch's seconds of each stage of the replica by cause."""
        return [
            self._parts_on(stage, replica.slowdowns[rank], replica.context[rank], replica.expert[rank])
            for stage, rank in enumerate(device_of_stages(self.run))
        ]

    def _replica_transfers(self, replica: _Replica) -> tuple[FloatArray, FloatArray]:
        """Seconds of each stage's transfers to the next and to the one before [num_stages]."""
        ranks = device_of_stages(self.run)
        forward_s, backward_s = np.zeros(len(ranks)), np.zeros(len(ranks))
        for stage, (here, there) in enumerate(pairwise(ranks)):
            if here != there:
                forward_s[stage] = self._transfer_s(replica.domains[here], replica.domains[there])
                backward_s[stage + 1] = self._transfer_s(replica.domains[there], replica.domains[here])
        return forward_s, backward_s

    def _transfer_s(self, sender: int, receiver: int) -> float:
        """Seconds of a boundary tensor from one domain to another, or inside one."""
        # A transfer goes one way only. All pairs of domains with equal links take as long.
        between = self.topology.between_bytes_per_s, self.topology.between_latency_s
        key = (
            None
            if sender == receiver
            else (float(between[0][sender, receiver]), float(between[1][sender, receiver]))
        )
        if key not in self._transfers:
            link = group_link(self.topology, [sender, receiver])
            if key is not None:
                link = replace(link, bytes_per_s=key[0], latency_s=key[1])
            machines, constants = view_from(self.run.machines, self.constants, link, stride=1)
            self._transfers[key] = communication.transfer_s(
                replace(self.run, machines=machines), constants, sender=0, receiver=link.num_domains - 1
            )
        return self._transfers[key]


@functools.lru_cache(maxsize=64)
def _blocks_of_slots(topology: Topology, slots: tuple[int, ...], size: int) -> Blocks:
    """The blocks of an order of slots; layouts of equal degrees share a few orders."""
    return blocks_in_order(topology, slots, size=size)
