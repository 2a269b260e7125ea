"""The prediction of a run whose ranks are on given slots: unequal devices, and the links that groups get.

Compute is multiplied by the slowdown of the slots; collectives and transfers are computed for machines with
the links of their group. On equal devices in the stock order the prediction is that of `cost.predict`.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from quartet_plugin.cost import communication
from quartet_plugin.cost.cluster import view_from
from quartet_plugin.cost.constants import ClusterConstants, Constants
from quartet_plugin.cost.iteration.orders import device_of_stages, stages_of_devices
from quartet_plugin.cost.iteration.replicas import ArrangedSlots, Replica, arranged_slots
from quartet_plugin.cost.iteration.step import (
    PipelineTerms,
    RowPrediction,
    contention_gain,
    fullest_rank,
    held_weights,
    pipeline_terms,
    step_terms,
    straggler_share,
    summed,
)
from quartet_plugin.cost.iteration.terms import COLLECTIVES, StageParts, stage_parts, stage_sums
from quartet_plugin.cost.memory import weights_of_stages
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.cost.times import Times
from quartet_plugin.mapping.topology import GroupLink, Topology, degrees_alone, group_link
from quartet_plugin.model.costs import FloatArray

# Replicas whose whole pipeline is replayed: the slowest ones without their waiting.
NUM_REPLAYED = 3
_ROUNDING = 1e-9


class AssignedRun:
    """A run on a topology: its prediction under an order of slots, and the terms of any link.

    `degrees` are those of its layout, expert parallelism in blocks.
    """

    def __init__(self, run: TrainingRun, constants: Constants, topology: Topology) -> None:
        self.run, self.constants, self.topology = run, constants, topology
        self.degrees = degrees_alone(run.layout, has_whole_experts=run.has_whole_experts)
        self._stages = stages_of_devices(run)
        self._parts = stage_parts(run, constants)
        self._parts_by_link: dict[tuple[GroupLink, int], list[StageParts]] = {}
        self._rank_seconds: dict[tuple[int, float, GroupLink, GroupLink], float] = {}
        self._parts_on_slots: dict[tuple[int, float, GroupLink, GroupLink], StageParts] = {}
        self._transfers: dict[tuple[tuple[float, float] | None, int], float] = {}
        weights = weights_of_stages(run)
        self._held = [held_weights(run, rank, weights) for rank in range(run.layout.pipeline_parallel)]
        self._fullest = fullest_rank(run, weights)
        self._gradient_times: dict[tuple[float, float, GroupLink, float, float], float] = {}
        self.tensor_link = group_link(topology, [0] * run.layout.tensor_parallel)

    def predict(self, slots: tuple[int, ...]) -> RowPrediction:
        """The prediction when slot `slots[r]` plays RANK r."""
        arranged = arranged_slots(self.topology, slots, self.degrees)
        slowest = max(
            (self._replica_terms(replica) for replica in self._slowest_replicas(arranged)),
            key=lambda time: sum(time.terms.values()),
        )
        links = arranged.gradients
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
            slowdown=arranged.slowest,
        )
        return summed(self.run, self.constants, slowest, step)

    def least_s(self, slots: tuple[int, ...]) -> float:
        """Seconds that the prediction with these slots is not under: its busiest rank's, without waiting."""
        if contention_gain(self.run.software, self.run.cluster, self.constants):
            return 0.0
        arranged = arranged_slots(self.topology, slots, self.degrees)
        busy = max(max(self._busy_s(replica)) for replica in self._slowest_replicas(arranged))
        share = 1.0 + straggler_share(self.run, self.constants)
        if isinstance(self.constants, ClusterConstants):
            share *= self.constants.residual
        return self.run.num_microbatches * busy * share * (1 - _ROUNDING)

    def stage_times(self, slots: tuple[int, ...]) -> tuple[list[Times], FloatArray, FloatArray]:
        """The stages' times on the slowest replica without waiting, and its transfers ahead and back."""
        replica = self._slowest_replicas(arranged_slots(self.topology, slots, self.degrees))[0]
        return stage_sums(self._replica_parts(replica)), *self._replica_transfers(replica)

    def slowdowns(self, slots: tuple[int, ...]) -> FloatArray:
        """The slowdown of each pipeline rank, its slowest replica's [pp]."""
        return arranged_slots(self.topology, slots, self.degrees).slowdowns

    def by_rank(
        self, seconds: Callable[[StageParts], float], parts: list[StageParts] | None = None
    ) -> FloatArray:
        """Seconds of a microbatch on each pipeline rank at slowdown 1 [pp], by `parts` of the stages."""
        each = [seconds(part) for part in parts or self._parts]
        return np.array([sum(each[k] for k in stages) for stages in self._stages])

    def parts_over(self, link: GroupLink, stride: int) -> list[StageParts]:
        """The seconds of every stage by cause when groups of ranks `stride` apart are joined by `link`."""
        if (link, stride) not in self._parts_by_link:
            cluster, constants = view_from(self.run.cluster, self.constants, link, stride=stride)
            parts = stage_parts(replace(self.run, cluster=cluster), constants)
            self._parts_by_link[link, stride] = parts
        return self._parts_by_link[link, stride]

    def gradients_s(self, rank: int, link: GroupLink, forward_s: float, backward_s: float) -> float:
        """Exposed gradient and parameter traffic of one pipeline rank, in seconds an iteration."""
        held = self._held[rank]
        key = (held.num_dense, held.num_expert, link, forward_s, backward_s)
        if key not in self._gradient_times:
            stride = self.run.layout.tensor_parallel
            cluster, constants = view_from(self.run.cluster, self.constants, link, stride=stride)
            self._gradient_times[key] = communication.data_parallel_s(
                replace(self.run, cluster=cluster),
                constants,
                num_dense=held.num_dense,
                num_expert=held.num_expert,
                forward_s=forward_s,
                backward_s=backward_s,
            )
        return self._gradient_times[key]

    def _slowest_replicas(self, arranged: ArrangedSlots) -> list[Replica]:
        """The replicas that may be slowest, the slowest first."""
        return sorted(arranged.replicas, key=self._least_s, reverse=True)[:NUM_REPLAYED]

    def _least_s(self, replica: Replica) -> float:
        """Seconds a step of the replica without waiting but while the pipeline fills and drains."""
        busy = self._busy_s(replica)
        longest, layout = max(busy), self.run.layout
        transfers = sum(
            self._transfer_s(here, there) + self._transfer_s(there, here)
            for here, there in pairwise(replica.domains)
        )
        return self.run.num_microbatches * longest + (sum(busy) - longest) / layout.virtual_stages + transfers

    def _busy_s(self, replica: Replica) -> list[float]:
        """Seconds of one microbatch on each pipeline rank of the replica, without its transfers."""
        return [
            self._rank_s(rank, replica.slowdowns[rank], replica.context[rank], replica.expert[rank])
            for rank in range(len(replica.domains))
        ]

    def _rank_s(self, rank: int, slowdown: float, context: GroupLink, expert: GroupLink) -> float:
        """Seconds of one microbatch on a pipeline rank, without its transfers."""
        key = (rank, slowdown, context, expert)
        if key not in self._rank_seconds:
            self._rank_seconds[key] = sum(
                times.total_s
                for stage in self._stages[rank]
                for times in self._parts_on(stage, slowdown, context, expert).values()
            )
        return self._rank_seconds[key]

    def _parts_on(self, stage: int, slowdown: float, context: GroupLink, expert: GroupLink) -> StageParts:
        """One microbatch's seconds of a stage by cause, on slots of `slowdown` and the groups' links."""
        # Stages that hold the same share one table.
        key = (id(self._parts[stage]), slowdown, context, expert)
        if key not in self._parts_on_slots:
            tp = self.run.layout.tensor_parallel
            parts = {name: times.scaled(slowdown) for name, times in self._parts[stage].items()}
            # Ranks of one block may share all experts between them.
            experts = (expert, tp) if self.degrees.expert_parallel > 1 else (self.tensor_link, 1)
            groups = (self.tensor_link, 1), (context, tp), experts
            for name, (link, stride) in zip(COLLECTIVES, groups, strict=True):
                if link.size > 1:
                    parts[name] = self.parts_over(link, stride)[stage][name]
            self._parts_on_slots[key] = parts
        return self._parts_on_slots[key]

    def _replica_terms(self, replica: Replica) -> PipelineTerms:
        """The replica's pipeline, between the domains of its ranks."""
        forward_s, backward_s = self._replica_transfers(replica)
        return pipeline_terms(
            self.run,
            self.constants,
            self._replica_parts(replica),
            forward_s=forward_s,
            backward_s=backward_s,
        )

    def _replica_parts(self, replica: Replica) -> list[StageParts]:
        """One microbatch's seconds of each stage of the replica by cause."""
        return [
            self._parts_on(stage, replica.slowdowns[rank], replica.context[rank], replica.expert[rank])
            for stage, rank in enumerate(device_of_stages(self.run))
        ]

    def _replica_transfers(self, replica: Replica) -> tuple[FloatArray, FloatArray]:
        """Seconds of each stage's transfers to the next and to the one before [num_stages]."""
        ranks = device_of_stages(self.run)
        forward_s, backward_s = np.zeros(len(ranks)), np.zeros(len(ranks))
        for stage, (here, there) in enumerate(pairwise(ranks)):
            if here != there:
                sender, receiver = replica.domains[here], replica.domains[there]
                count = self.run.num_sent_tensors(stage)
                forward_s[stage] = self._transfer_s(sender, receiver, num_tensors=count)
                backward_s[stage + 1] = self._transfer_s(receiver, sender, num_tensors=count)
        return forward_s, backward_s

    def _transfer_s(self, sender: int, receiver: int, *, num_tensors: int = 1) -> float:
        """Seconds of a boundary tensor, or of several, from one domain to another, or inside one."""
        # A transfer goes one way only. All pairs of domains with equal links take as long.
        between = self.topology.between_bytes_per_s, self.topology.between_latency_s
        pair = (
            None
            if sender == receiver
            else (float(between[0][sender, receiver]), float(between[1][sender, receiver]))
        )
        key = (pair, num_tensors)
        if key not in self._transfers:
            link = group_link(self.topology, [sender, receiver])
            if pair is not None:
                link = replace(link, port_bytes_per_s=pair[0], bytes_per_s=pair[0], latency_s=pair[1])
            cluster, constants = view_from(self.run.cluster, self.constants, link, stride=1)
            self._transfers[key] = communication.transfer_s(
                replace(self.run, cluster=cluster),
                constants,
                sender=0,
                receiver=link.num_domains - 1,
                num_tensors=num_tensors,
            )
        return self._transfers[key]
