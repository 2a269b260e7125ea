"""The prediction of a run whose ranks are on given slots: unequal devices, and the links that groups get.

The cost model gives every cause of a stage's time. Compute is multiplied by the slowdown of the slots;
collectives and transfers are computed for machines with the links of their group. On equal devices in the
stock order the prediction is that of `cost.predict`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from quartet_plugin.cost import communication
from quartet_plugin.cost.cluster import view_from
from quartet_plugin.cost.compute import Times
from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.pipeline import device_of_stages, stages_of_devices
from quartet_plugin.cost.predict import (
    COMPUTE,
    RowPrediction,
    StageParts,
    blocks_on_sends,
    held_weights,
    pipeline_span,
    predict,
    stage_parts,
)
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.mapping.step import Collective, StepCosts, StepTime, no_collective
from quartet_plugin.mapping.topology import Blocks, GroupLink, Topology, blocks_in_order, group_link
from quartet_plugin.model.costs import FloatArray, IntArray

COLLECTIVES = ("tp_comm", "cp_comm", "ep_comm")
# Replicas whose whole pipeline is simulated: the slowest ones by the closed form.
NUM_SIMULATED = 3
# Links on which only one part of a collective's time is left: its latency, or its volume.
_UNLIMITED_BYTES_PER_S, _PROBE_BYTES_PER_S, _NO_LATENCY_S = 1e18, 1e9, 1e-15


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replica:
    """One replica, an entry a pipeline rank: slowdown, links of its context and expert groups, domain."""

    slowdowns: tuple[float, ...]
    context: tuple[GroupLink, ...]
    expert: tuple[GroupLink, ...]
    domains: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplicaTime:
    """A replica's busiest rank: seconds an iteration by cause, and of one microbatch's passes."""

    terms: dict[str, float]
    forward_s: float
    backward_s: float


class AssignedRun:
    """A run on a topology: its step's costs for the solver, and its prediction under an order of slots."""

    def __init__(self, run: TrainingRun, constants: Constants, topology: Topology) -> None:
        self.run, self.constants, self.topology = run, constants, topology
        self._parts = stage_parts(run, constants)
        self._parts_by_link: dict[tuple[GroupLink, int], list[StageParts]] = {}
        self._transfers: dict[tuple[int, int], float] = {}
        self._held = [held_weights(run, rank) for rank in range(run.layout.pipeline_parallel)]
        self._gradient_times: dict[tuple[float, float, GroupLink, float, float], float] = {}
        self._stock: RowPrediction | None = None
        self._costs: StepCosts | None = None

    def step_costs(self) -> StepCosts:
        """The step in the solver's closed form, its coefficients taken from the cost model."""
        if self._costs is None:
            self._costs = self._closed_form()
        return self._costs

    def _closed_form(self) -> StepCosts:
        run, layout = self.run, self.run.layout
        p = layout.pipeline_parallel
        latency = communication.transfer_latency_s(self.constants)
        intra_node = communication.transfer_s(run, self.constants, sender=0, receiver=0) - latency
        peer = run.machines.scale_up_bytes_per_s * self.constants.peer
        forward, backward = self._pass_s()
        slow = _link(run.copies, 1.0, 0.0)
        plain = np.array([self._gradients_s(k, slow, 0.0, 0.0) for k in range(p)])
        least = np.array([self._gradients_s(k, slow, math.inf, math.inf) for k in range(p)])
        hides = plain - np.array([self._gradients_s(k, slow, forward[k], backward[k]) for k in range(p)])
        share = float((least / np.where(plain > 0, plain, 1.0)).max()) if plain.any() else 0.0
        return StepCosts(
            layout=layout,
            num_microbatches=run.num_microbatches,
            compute_s=self._by_rank(
                lambda part: sum(times.total for name, times in part.items() if name not in COLLECTIVES),
                self._parts,
            ),
            tensor=self._collective("tp_comm", layout.tensor_parallel, 1),
            context=self._collective("cp_comm", layout.context_parallel, layout.tensor_parallel),
            expert=self._collective("ep_comm", layout.expert_parallel, layout.tensor_parallel),
            gradients=self._gradients(),
            expert_gradients=no_collective(p),
            boundary_bytes=intra_node * peer,
            hidden_s=hides,
            exposed_share=share,
            peer_share=self.constants.peer / self.constants.scale_up,
            blocking=blocks_on_sends(run),
        )

    def predict(self, slots: tuple[int, ...]) -> RowPrediction:
        """The prediction when slot `slots[r]` plays RANK r."""
        step, blocks, arrangement = self._arranged(slots)
        replicas = self._slowest_replicas(step, blocks, arrangement)
        slowest = max(
            (self._replica_time(replica) for replica in replicas), key=lambda time: sum(time.terms.values())
        )
        links = [step.link(row) for row in blocks.domain[arrangement]]
        # In the cost model the rank with most weights reduces longest; another may on a slower link.
        fullest = max(range(len(links)), key=lambda rank: self._held[rank].total)
        slowest.terms["dp_comm_s"] = max(
            self._gradients_s(rank, link, slowest.forward_s, slowest.backward_s)
            for rank, link in enumerate(links)
            if rank == fullest or link != links[fullest]
        )
        return self._completed(slowest.terms, float(blocks.slowdown.max()))

    def slowdowns(self, slots: tuple[int, ...]) -> FloatArray:
        """The slowdown of each pipeline rank, its slowest replica's [pp]."""
        step, _, arrangement = self._arranged(slots)
        slowest: FloatArray = step.slowdowns(arrangement).max(axis=1)
        return slowest

    def _arranged(self, slots: tuple[int, ...]) -> tuple[StepTime, Blocks, IntArray]:
        """The step's closed form in an order of slots, its blocks, and their arrangement [pp, copies]."""
        layout = self.run.layout
        blocks = blocks_in_order(self.topology, slots, size=layout.tensor_parallel)
        arrangement = np.arange(len(blocks), dtype=np.int64).reshape(layout.pipeline_parallel, -1)
        return StepTime(self.step_costs(), self.topology, blocks), blocks, arrangement

    def _completed(self, terms: dict[str, float], slowdown: float) -> RowPrediction:
        """The prediction with the cost model's other terms; stragglers and residual keep their shares."""
        if self._stock is None:
            self._stock = predict(self.run, self.constants)
        stock = self._stock
        compute_terms = {f"{name}_s": terms.pop(f"{name}_s", 0.0) for name in COMPUTE}
        completed = {"compute_s": sum(compute_terms.values())}
        for name, value in stock.terms.items():
            if name in ("compute_s", "straggler_s", "residual_s"):
                continue
            completed[name] = terms.pop(name, value * (slowdown if name == "optimizer_s" else 1.0))
        completed |= terms
        rest = sum(v for name, v in stock.terms.items() if name not in ("straggler_s", "residual_s"))
        for name in ("straggler_s", "residual_s"):
            if name in stock.terms:
                completed[name] = (
                    stock.terms[name]
                    / rest
                    * sum(value for other, value in completed.items() if other not in (name, "residual_s"))
                )
                rest += stock.terms[name]
        return RowPrediction(
            iter_time_s=sum(completed.values()), terms=completed, compute_terms=compute_terms
        )

    def _slowest_replicas(self, step: StepTime, blocks: Blocks, arrangement: IntArray) -> list[_Replica]:
        """The replicas that may be slowest, equal ones once."""
        layout = self.run.layout
        domains = blocks.domain[arrangement]
        slowdowns = step.slowdowns(arrangement)
        order = np.argsort(-step.column_times(arrangement), kind="stable")
        replicas: dict[_Replica, None] = {}
        for column in order.tolist():
            links = []
            for size in (layout.context_parallel, layout.expert_parallel):
                first = column - column % size
                members = np.ascontiguousarray(domains[:, first : first + size])
                links.append(tuple(step.link(row) for row in members))
            replica = _Replica(
                slowdowns=tuple(slowdowns[:, column].tolist()),
                context=links[0],
                expert=links[1],
                domains=tuple(domains[:, column].tolist()),
            )
            replicas[replica] = None
            if len(replicas) == NUM_SIMULATED:
                break
        return list(replicas)

    def _replica_time(self, replica: _Replica) -> _ReplicaTime:
        """The seconds of the replica's busiest rank by cause, its waiting included."""
        run, tp = self.run, self.run.layout.tensor_parallel
        p, m = run.layout.pipeline_parallel, run.num_microbatches
        tensor = group_link(self.topology, [0] * tp)
        stages = stages_of_devices(run)
        parts: list[StageParts] = []
        for part, rank in zip(self._parts, device_of_stages(run), strict=True):
            stage = len(parts)
            scaled = {name: times.scaled(replica.slowdowns[rank]) for name, times in part.items()}
            groups = (tensor, 1), (replica.context[rank], tp), (replica.expert[rank], tp)
            for name, (link, stride) in zip(COLLECTIVES, groups, strict=True):
                if link.size > 1:
                    scaled[name] = self._parts_over(link, stride)[stage][name]
            parts.append(scaled)
        sums = [Times.sum_of(part.values()) for part in parts]
        device = max(range(p), key=lambda d: sum(sums[k].total for k in stages[d]))
        terms: dict[str, float] = {}
        for k in stages[device]:
            for name, times in parts[k].items():
                terms[f"{name}_s"] = terms.get(f"{name}_s", 0.0) + m * times.total
        busy = sum(terms.values())
        span, blocked = self._span(sums, device, replica.domains)
        terms["pp_comm_s"] = blocked
        terms["pp_bubble_s"] = max(0.0, span - busy - blocked) if p > 1 else 0.0
        busiest = [sums[k] for k in stages[device]]
        return _ReplicaTime(
            terms=terms,
            forward_s=sum(times.forward for times in busiest),
            backward_s=sum(times.input_grad + times.weight_grad for times in busiest),
        )

    def _span(self, sums: list[Times], device: int, domains: tuple[int, ...]) -> tuple[float, float]:
        """Seconds of the pipeline's makespan, and of the sends that `device` waits for where they block."""
        ranks = device_of_stages(self.run)
        ahead, back = np.zeros(len(ranks)), np.zeros(len(ranks))
        for stage, (here, there) in enumerate(pairwise(ranks)):
            if here != there:
                ahead[stage] = self._transfer_s(domains[here], domains[there])
                back[stage + 1] = self._transfer_s(domains[there], domains[here])
        return pipeline_span(self.run, sums, device, forward_s=ahead, backward_s=back)[:2]

    def _transfer_s(self, sender: int, receiver: int) -> float:
        """Seconds of a boundary tensor from one domain to another, or inside one."""
        key = (0, 0) if sender == receiver else (sender, receiver)
        if key not in self._transfers:
            link = group_link(self.topology, [sender, receiver])
            if sender != receiver:
                # A transfer goes one way only.
                link = replace(
                    link,
                    bytes_per_s=float(self.topology.between_bytes_per_s[sender, receiver]),
                    latency_s=float(self.topology.between_latency_s[sender, receiver]),
                )
            machines, constants = view_from(self.run.machines, self.constants, link, stride=1)
            self._transfers[key] = communication.transfer_s(
                replace(self.run, machines=machines), constants, sender=0, receiver=link.num_domains - 1
            )
        return self._transfers[key]

    def _parts_over(self, link: GroupLink, stride: int) -> list[StageParts]:
        """The seconds of every stage by cause when groups of ranks `stride` apart are joined by `link`."""
        if (link, stride) not in self._parts_by_link:
            machines, constants = view_from(self.run.machines, self.constants, link, stride=stride)
            parts = stage_parts(replace(self.run, machines=machines), constants)
            self._parts_by_link[link, stride] = parts
        return self._parts_by_link[link, stride]

    def _by_rank(self, seconds: Callable[[StageParts], float], parts: list[StageParts]) -> FloatArray:
        each = [seconds(part) for part in parts]
        return np.array([sum(each[k] for k in stages) for stages in stages_of_devices(self.run)])

    def _collective(self, name: str, size: int, stride: int) -> Collective:
        """The coefficients of one kind: its time is linear in a link's inverse bandwidth and latency."""
        if size == 1:
            return no_collective(self.run.layout.pipeline_parallel)

        def seconds(bytes_per_s: float, latency_s: float) -> FloatArray:
            link = _link(size, bytes_per_s, latency_s, inside=name == "tp_comm")
            return self._by_rank(lambda part: part[name].total, self._parts_over(link, stride))

        return Collective(
            volume_bytes=seconds(_PROBE_BYTES_PER_S, 0.0) * _PROBE_BYTES_PER_S,
            rounds=seconds(_UNLIMITED_BYTES_PER_S, 1.0) / (size - 1),
        )

    def _gradients(self) -> Collective:
        size = self.run.copies
        ranks = range(self.run.layout.pipeline_parallel)
        if size == 1:
            return no_collective(len(ranks))
        slow = [self._gradients_s(k, _link(size, _PROBE_BYTES_PER_S, 0.0), 0.0, 0.0) for k in ranks]
        late = [self._gradients_s(k, _link(size, _UNLIMITED_BYTES_PER_S, 1.0), 0.0, 0.0) for k in ranks]
        return Collective(
            volume_bytes=np.array(slow) * _PROBE_BYTES_PER_S, rounds=np.array(late) / (size - 1)
        )

    def _gradients_s(self, rank: int, link: GroupLink, forward_s: float, backward_s: float) -> float:
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

    def _pass_s(self) -> tuple[FloatArray, FloatArray]:
        """Seconds of one microbatch's forward and backward on each rank."""
        forward = self._by_rank(lambda part: sum(times.forward for times in part.values()), self._parts)
        total = self._by_rank(lambda part: sum(times.total for times in part.values()), self._parts)
        return forward, total - forward


def _link(size: int, bytes_per_s: float, latency_s: float, *, inside: bool = False) -> GroupLink:
    """A group inside one domain, or with every rank in a domain of its own."""
    return GroupLink(
        size=size,
        num_domains=1 if inside or size == 1 else size,
        local=size if inside else 1,
        bytes_per_s=bytes_per_s,
        latency_s=max(latency_s, _NO_LATENCY_S),
        inside_latency_s=max(latency_s, _NO_LATENCY_S),
    )
