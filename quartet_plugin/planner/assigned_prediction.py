"""The prediction of a run whose ranks are on given slots: unequal devices, and the links that groups get.

Every cause of a stage's time is the cost model's own. Compute is multiplied by the slowdown of the slots;
collectives and transfers are asked for again on machines as their group sees them. On equal devices in the
stock order this is `cost.predict`.
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
from quartet_plugin.cost.pipeline import StageTimes, device_of_stages, makespan_s, stages_of_devices
from quartet_plugin.cost.predict import (
    BLOCKING,
    COMPUTE,
    OVERLAPPABLE,
    RowPrediction,
    StageParts,
    held_weights,
    predict,
    stage_parts,
    total_of,
)
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.mapping.step import Collective, StepCosts, StepTime, nothing
from quartet_plugin.mapping.topology import Blocks, GroupLink, Topology, blocks_in_order, group_link
from quartet_plugin.model.costs import FloatArray, IntArray

COLLECTIVES = ("tp_comm", "cp_comm", "ep_comm")
# Replicas whose whole pipeline is simulated: the slowest ones by the closed form.
NUM_SIMULATED = 3
# A link so fast, or so slow, that only one part of a collective's time is left.
_ENDLESS, _PROBE_BYTES_PER_S, _NO_LATENCY_S = 1e18, 1e9, 1e-15


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """What one replica gets, a rank each: pace, links of its context and expert groups, domain."""

    pace: tuple[float, ...]
    context: tuple[GroupLink, ...]
    expert: tuple[GroupLink, ...]
    domains: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """A replica's busiest rank: seconds by cause, and of one microbatch's passes."""

    terms: dict[str, float]
    forward_s: float
    backward_s: float


class AssignedRun:
    """A run on places: its step's costs for the solver, and its prediction under an order of slots."""

    def __init__(self, run: TrainingRun, constants: Constants, places: Topology) -> None:
        self.run, self.constants, self.places = run, constants, places
        self._parts = stage_parts(run, constants)
        self._seen: dict[tuple[GroupLink, int], list[StageParts]] = {}
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
        near = communication.transfer_s(run, self.constants, sender=0, receiver=0) - latency
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
            compute_s=self._compute_s(),
            tensor=self._collective("tp_comm", layout.tensor_parallel, 1),
            context=self._collective("cp_comm", layout.context_parallel, layout.tensor_parallel),
            expert=self._collective("ep_comm", layout.expert_parallel, layout.tensor_parallel),
            gradients=self._gradients(),
            expert_gradients=nothing(p),
            boundary_bytes=near * peer,
            hidden_s=hides,
            exposed_share=share,
            peer_share=self.constants.peer / self.constants.scale_up,
            blocking=self._blocks_on_sends,
        )

    def predict(self, slots: tuple[int, ...]) -> RowPrediction:
        """The prediction when slot `slots[r]` plays RANK r."""
        layout = self.run.layout
        blocks = blocks_in_order(self.places, slots, size=layout.tensor_parallel)
        arrangement = np.arange(len(blocks), dtype=np.int64).reshape(layout.pipeline_parallel, -1)
        step = StepTime(self.step_costs(), self.places, blocks)
        columns = self._columns(step, blocks, arrangement)
        slowest = max((self._column(column) for column in columns), key=lambda one: sum(one.terms.values()))
        links = [step.link(row) for row in blocks.domain[arrangement]]
        # As the cost model has it, the fullest rank reduces longest; another one may on a slower link.
        fullest = max(range(len(links)), key=lambda rank: self._held[rank].total)
        slowest.terms["dp_comm_s"] = max(
            self._gradients_s(rank, link, slowest.forward_s, slowest.backward_s)
            for rank, link in enumerate(links)
            if rank == fullest or link != links[fullest]
        )
        return self._completed(slowest.terms, float(blocks.slowdown.max()))

    def paces(self, slots: tuple[int, ...]) -> FloatArray:
        """The slowdown of each pipeline rank, its slowest replica's [pp]."""
        layout = self.run.layout
        blocks = blocks_in_order(self.places, slots, size=layout.tensor_parallel)
        arrangement = np.arange(len(blocks), dtype=np.int64).reshape(layout.pipeline_parallel, -1)
        found: FloatArray = StepTime(self.step_costs(), self.places, blocks).paces(arrangement).max(axis=1)
        return found

    @property
    def _blocks_on_sends(self) -> bool:
        run = self.run
        return run.schedule in BLOCKING or (run.software.blocking_transfers and run.schedule in OVERLAPPABLE)

    def _completed(self, terms: dict[str, float], slowdown: float) -> RowPrediction:
        """The other terms as the cost model has them; those that are shares of the rest, of this rest."""
        if self._stock is None:
            self._stock = predict(self.run, self.constants)
        stock = self._stock
        compute_terms = {f"{name}_s": terms.pop(f"{name}_s", 0.0) for name in COMPUTE}
        found = {"compute_s": sum(compute_terms.values())}
        for name, value in stock.terms.items():
            if name in ("compute_s", "straggler_s", "residual_s"):
                continue
            found[name] = terms.pop(name, value * (slowdown if name == "optimizer_s" else 1.0))
        found |= terms
        rest = sum(v for name, v in stock.terms.items() if name not in ("straggler_s", "residual_s"))
        for name in ("straggler_s", "residual_s"):
            if name in stock.terms:
                found[name] = (
                    stock.terms[name]
                    / rest
                    * sum(value for other, value in found.items() if other not in (name, "residual_s"))
                )
                rest += stock.terms[name]
        return RowPrediction(iter_time_s=sum(found.values()), terms=found, compute_terms=compute_terms)

    def _columns(self, step: StepTime, blocks: Blocks, arrangement: IntArray) -> list[_Column]:
        """The replicas that may be slowest, those that are alike once."""
        layout = self.run.layout
        domains = blocks.domain[arrangement]
        pace = step.paces(arrangement)
        order = np.argsort(-step.column_times(arrangement), kind="stable")
        found: dict[_Column, None] = {}
        for column in order.tolist():
            links = []
            for size in (layout.context_parallel, layout.expert_parallel):
                first = column - column % size
                members = np.ascontiguousarray(domains[:, first : first + size])
                links.append(tuple(step.link(row) for row in members))
            key = _Column(
                pace=tuple(pace[:, column].tolist()),
                context=links[0],
                expert=links[1],
                domains=tuple(domains[:, column].tolist()),
            )
            found[key] = None
            if len(found) == NUM_SIMULATED:
                break
        return list(found)

    def _column(self, column: _Column) -> _Timed:
        """The busiest rank's seconds by cause in one replica, and its waiting."""
        run, tp = self.run, self.run.layout.tensor_parallel
        p, m = run.layout.pipeline_parallel, run.num_microbatches
        home = group_link(self.places, [0] * tp)
        stages = stages_of_devices(run)
        parts: list[StageParts] = []
        for part, rank in zip(self._parts, device_of_stages(run), strict=True):
            stage = len(parts)
            mine = {name: times.scaled(column.pace[rank]) for name, times in part.items()}
            groups = (home, 1), (column.context[rank], tp), (column.expert[rank], tp)
            for name, (link, stride) in zip(COLLECTIVES, groups, strict=True):
                if link.size > 1:
                    mine[name] = self._parts_seen(link, stride)[stage][name]
            parts.append(mine)
        sums = [total_of(part.values()) for part in parts]
        device = max(range(p), key=lambda d: sum(sums[k].total for k in stages[d]))
        terms: dict[str, float] = {}
        for k in stages[device]:
            for name, times in parts[k].items():
                terms[f"{name}_s"] = terms.get(f"{name}_s", 0.0) + m * times.total
        busy = sum(terms.values())
        span, blocked = self._span(sums, device, column.domains)
        terms["pp_comm_s"] = blocked
        terms["pp_bubble_s"] = max(0.0, span - busy - blocked) if p > 1 else 0.0
        own = [sums[k] for k in stages[device]]
        return _Timed(
            terms=terms,
            forward_s=sum(one.forward for one in own),
            backward_s=sum(one.input_grad + one.weight_grad for one in own),
        )

    def _span(self, sums: list[Times], device: int, domains: tuple[int, ...]) -> tuple[float, float]:
        """The pipeline's makespan, and how long `device` waits for its own sends where those block."""
        run = self.run
        ranks, m = device_of_stages(run), run.num_microbatches
        ahead, back = np.zeros(len(ranks)), np.zeros(len(ranks))
        for stage, (here, there) in enumerate(pairwise(ranks)):
            if here != there:
                ahead[stage] = self._transfer_s(domains[here], domains[there])
                back[stage + 1] = self._transfer_s(domains[there], domains[here])
        blocked = 0.0
        if self._blocks_on_sends:
            sums = [
                Times(one.forward + out, one.input_grad + into, one.weight_grad)
                for one, out, into in zip(sums, ahead.tolist(), back.tolist(), strict=True)
            ]
            own = list(stages_of_devices(run)[device])
            blocked = m * float(ahead[own].sum() + back[own].sum())
            ahead = np.zeros(len(ranks))
        times = StageTimes(
            forward_s=np.array([one.forward for one in sums]),
            input_grad_s=np.array([one.input_grad for one in sums]),
            weight_grad_s=np.array([one.weight_grad for one in sums]),
            transfer_s=ahead,
        )
        return makespan_s(run, times), blocked

    def _transfer_s(self, sender: int, receiver: int) -> float:
        """Seconds of a boundary tensor from one domain to another, or inside one."""
        key = (0, 0) if sender == receiver else (sender, receiver)
        found = self._transfers.get(key)
        if found is None:
            link = group_link(self.places, [sender, receiver])
            if sender != receiver:
                # A transfer goes one way only.
                link = replace(
                    link,
                    bytes_per_s=float(self.places.between_bytes_per_s[sender, receiver]),
                    latency_s=float(self.places.between_latency_s[sender, receiver]),
                )
            machines, constants = view_from(self.run.machines, self.constants, link, stride=1)
            found = self._transfers[key] = communication.transfer_s(
                replace(self.run, machines=machines), constants, sender=0, receiver=link.num_domains - 1
            )
        return found

    def _parts_seen(self, link: GroupLink, stride: int) -> list[StageParts]:
        found = self._seen.get((link, stride))
        if found is None:
            machines, constants = view_from(self.run.machines, self.constants, link, stride=stride)
            found = stage_parts(replace(self.run, machines=machines), constants)
            self._seen[link, stride] = found
        return found

    def _compute_s(self) -> FloatArray:
        """One microbatch's compute of each rank, collectives left out."""
        return self._by_rank(
            lambda part: sum(times.total for name, times in part.items() if name not in COLLECTIVES),
            self._parts,
        )

    def _by_rank(self, seconds: Callable[[StageParts], float], parts: list[StageParts]) -> FloatArray:
        each = [seconds(part) for part in parts]
        return np.array([sum(each[k] for k in own) for own in stages_of_devices(self.run)])

    def _collective(self, name: str, size: int, stride: int) -> Collective:
        """The coefficients of one kind: its time is linear in a link's inverse bandwidth and latency."""
        if size == 1:
            return nothing(self.run.layout.pipeline_parallel)

        def seconds(bytes_per_s: float, latency_s: float) -> FloatArray:
            link = _link(size, bytes_per_s, latency_s, inside=name == "tp_comm")
            seen = self._parts_seen(link, stride)
            return self._by_rank(lambda part: part[name].total, seen)

        return Collective(
            volume_bytes=seconds(_PROBE_BYTES_PER_S, 0.0) * _PROBE_BYTES_PER_S,
            rounds=seconds(_ENDLESS, 1.0) / (size - 1),
        )

    def _gradients(self) -> Collective:
        size = self.run.copies
        ranks = range(self.run.layout.pipeline_parallel)
        if size == 1:
            return nothing(len(ranks))
        slow = [self._gradients_s(k, _link(size, _PROBE_BYTES_PER_S, 0.0), 0.0, 0.0) for k in ranks]
        late = [self._gradients_s(k, _link(size, _ENDLESS, 1.0), 0.0, 0.0) for k in ranks]
        return Collective(
            volume_bytes=np.array(slow) * _PROBE_BYTES_PER_S, rounds=np.array(late) / (size - 1)
        )

    def _gradients_s(self, rank: int, link: GroupLink, forward_s: float, backward_s: float) -> float:
        """Exposed gradient and parameter traffic of one pipeline rank."""
        own = self._held[rank]
        key = (own.dense, own.expert, link, forward_s, backward_s)
        found = self._gradient_times.get(key)
        if found is None:
            stride = self.run.layout.tensor_parallel
            machines, constants = view_from(self.run.machines, self.constants, link, stride=stride)
            found = self._gradient_times[key] = communication.data_parallel(
                replace(self.run, machines=machines),
                constants,
                dense=own.dense,
                expert=own.expert,
                forward_s=forward_s,
                backward_s=backward_s,
            )
        return found

    def _pass_s(self) -> tuple[FloatArray, FloatArray]:
        """Seconds of one microbatch's forward and backward on each rank."""
        forward = self._by_rank(lambda part: sum(times.forward for times in part.values()), self._parts)
        whole = self._by_rank(lambda part: sum(times.total for times in part.values()), self._parts)
        return forward, whole - forward


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
