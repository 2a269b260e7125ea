"""Oracles of a plan's iteration time: the recording, or a simulator whose constants the search cannot see."""

import functools
import hashlib
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from benchmarks.search_cost.recording import Recording
from benchmarks.search_cost.walk import key_of
from quartet_plugin.mapping.orders import rank_of
from quartet_plugin.model.costs import FloatArray, StageCosts
from quartet_plugin.model.plan import Plan
from quartet_plugin.schedule.choice import written_of
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import simulate

# Between launches of one plan, where a recording has too few to tell.
USUAL_NOISE = 0.03


class Oracle(Protocol):
    """Knows what every plan takes."""

    def truth_s(self, plan: Plan) -> float | None:
        """Seconds an iteration without noise; None where the plan cannot run."""

    def measured_s(self, plan: Plan, generator: random.Random, *, count: int) -> tuple[float, ...] | None:
        """`count` iterations of one launch, with the noise between launches and inside them."""


class RecordedOracle:
    """The truth is the median of a plan's recorded launches; a launch is that with recorded noise on it.

    The relative deviations of all plans that were launched more than once are one pool, widened by what a
    median of n hides of them. A plan that was not recorded takes what the nearest recorded split does.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._noise = list(_deviations(recording)) or [1.0 - USUAL_NOISE, 1.0, 1.0 + USUAL_NOISE]
        self._inside = [
            [value / statistics.median(row) for value in row]
            for entry in recording.entries.values()
            for row in entry.launches
        ]
        self.stood_in = 0

    @property
    def best_s(self) -> float:
        """The fastest plan's."""
        return self._recording.best[1]

    def truth_s(self, plan: Plan) -> float | None:
        """See `Oracle`."""
        key = key_of(plan)
        entry = self._recording.entries.get(key)
        if entry is None:
            entry = self._recording.entries[self._nearest(key)]
            self.stood_in += 1
        return entry.iteration_s

    def measured_s(self, plan: Plan, generator: random.Random, *, count: int) -> tuple[float, ...] | None:
        """See `Oracle`."""
        truth = self.truth_s(plan)
        if truth is None:
            return None
        launch_s = truth * generator.choice(self._noise)
        return tuple(launch_s * value for value in generator.choices(generator.choice(self._inside), k=count))

    def _nearest(self, key: str) -> str:
        """The recorded plan with the nearest split of those that differ in the split alone."""
        parts = key.split(" | ")
        alike = [
            (_distance(parts[2], other.split(" | ")[2]), other)
            for other in self._recording.entries
            if [*other.split(" | ")[:2], *other.split(" | ")[3:]] == [*parts[:2], *parts[3:]]
        ]
        if not alike:
            raise SystemExit(f"the recording has nothing like {key}: measure its space again")
        return min(alike)[1]


def _deviations(recording: Recording) -> Sequence[float]:
    deviations = []
    for entry in recording.entries.values():
        count = len(entry.launches)
        if count > 1 and entry.iteration_s is not None:
            widened = math.sqrt(count / (count - 1))
            medians = [statistics.median(row) for row in entry.launches]
            deviations += [1.0 + widened * (median / entry.iteration_s - 1.0) for median in medians]
    return deviations


def _distance(first: str, second: str) -> int:
    counts = [[int(word) for word in text.split("+")] for text in (first, second)]
    return sum(abs(a - b) for a, b in zip(*counts, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """A machine that the cost model knows nothing of. FLOP/s per device, bytes/s of a link, seconds.

    `half_speed_tokens` is the microbatch that runs at half the speed; `head` and `embedding` multiply what
    their FLOPs say; `slowdown` is that of the last node's devices; `scatter` is what no model sees.
    """

    flops_per_s: float = 2.0e13
    half_speed_tokens: float = 700.0
    input_grad: float = 1.15
    weight_grad: float = 0.9
    head: float = 0.75
    embedding: float = 1.6
    action_s: float = 4.0e-5
    inside_bytes_per_s: float = 1.2e11
    across_bytes_per_s: float = 8.0e9
    latency_s: float = 1.5e-5
    exposed_gradients: float = 0.45
    slowdown: float = 1.12
    optimizer_s: float = 2.0e-3
    scatter: float = 0.015
    noise: float = 0.03
    inside_noise: float = 0.01


@dataclass(slots=True, kw_only=True)
class SyntheticOracle:
    """The simulator with constants that the search is not told, and a plan's own deviation from it."""

    constants: Constants = field(default_factory=Constants)
    _known: dict[str, float] = field(default_factory=dict)

    def truth_s(self, plan: Plan) -> float | None:
        """See `Oracle`."""
        key = key_of(plan)
        if key not in self._known:
            digest = hashlib.sha256(key.encode()).digest()
            deviation = random.Random(digest).gauss(0.0, self.constants.scatter)
            self._known[key] = self._iteration_s(plan) * math.exp(deviation)
        return self._known[key]

    def measured_s(self, plan: Plan, generator: random.Random, *, count: int) -> tuple[float, ...] | None:
        """See `Oracle`."""
        truth = self.truth_s(plan)
        assert truth is not None
        launch_s = truth * math.exp(generator.gauss(0.0, self.constants.noise))
        inside = self.constants.inside_noise
        return tuple(launch_s * math.exp(generator.gauss(0.0, inside)) for _ in range(count))

    @property
    def num_known(self) -> int:
        """The number of plans that were timed."""
        return len(self._known)

    def _iteration_s(self, plan: Plan) -> float:
        schedule = schedule_of(plan)
        return self._pipeline_s(plan, schedule) + self._gradients_s(plan) + self.constants.optimizer_s

    def _pipeline_s(self, plan: Plan, schedule: Schedule) -> float:
        return max(
            simulate(schedule, self._stages(plan, schedule, replica)).makespan_s
            for replica in range(plan.layout.data_parallel)
        )

    def _stages(self, plan: Plan, schedule: Schedule, replica: int) -> StageCosts:
        """Seconds of a microbatch on the stages of one replica."""
        constants, shape, layout = self.constants, plan.shape, plan.layout
        tokens = layout.micro_batch_size * shape.seq_length
        speed = constants.flops_per_s * layout.tensor_parallel / (1.0 + constants.half_speed_tokens / tokens)
        layer_s = layout.micro_batch_size * shape.forward_flops_per_layer / speed
        layer_s += self._reduction_s(plan)
        head_s = constants.head * layout.micro_batch_size * shape.forward_flops_of_head / speed
        lookup_s = constants.embedding * layout.micro_batch_size * 20.0 * shape.seq_length
        lookup_s *= shape.hidden_size / speed
        forward = layer_s * np.array(plan.split.transformer_layers_per_stage, dtype=np.float64)
        forward[0] += lookup_s
        forward[-1] += head_s
        slow = np.array([self._slowdown(plan, replica, device) for device in schedule.placement])
        forward = slow * (forward + constants.action_s)
        count = len(forward)
        transfer = np.zeros(count)
        size = 4.0 * tokens * shape.hidden_size / layout.tensor_parallel
        for stage in range(count - 1):
            devices = schedule.placement[stage : stage + 2]
            if devices[0] != devices[1]:
                nodes = {self._node(plan, replica, device) for device in devices}
                transfer[stage] = constants.latency_s + size / self._bytes_per_s(nodes)
        return StageCosts(
            device_of_stage=np.asarray(schedule.placement, dtype=np.int64),
            forward_s=forward,
            input_grad_s=constants.input_grad * forward,
            weight_grad_s=constants.weight_grad * forward,
            backward_s=(constants.input_grad + constants.weight_grad) * forward,
            activation_bytes=np.ones(count),
            forward_transfer_s=transfer,
            backward_transfer_s=_shifted(transfer),
            held_fraction=1.0,
        )

    def _reduction_s(self, plan: Plan) -> float:
        """Two blocking all-reduces a layer."""
        degree = plan.layout.tensor_parallel
        if degree == 1:
            return 0.0
        size = 4.0 * plan.layout.micro_batch_size * plan.shape.seq_length * plan.shape.hidden_size
        seconds = 2.0 * (degree - 1) / degree * size / self.constants.inside_bytes_per_s
        return 2.0 * (seconds + self.constants.latency_s)

    def _gradients_s(self, plan: Plan) -> float:
        """Exposed seconds of the data-parallel all-reduce, on the device where it takes longest."""
        layout, shape, copies = plan.layout, plan.shape, plan.layout.data_parallel
        if copies == 1:
            return 0.0
        held = np.zeros(layout.pipeline_parallel)
        for stage, count in enumerate(plan.split.transformer_layers_per_stage):
            device = schedule_of(plan).placement[stage]
            held[device] += count * shape.matrix_parameters_per_layer
            held[device] += shape.embedding_parameters * (stage in (0, layout.num_stages - 1))
        slowest = 0.0
        for device in range(layout.pipeline_parallel):
            nodes = {self._node(plan, replica, device) for replica in range(copies)}
            per_s = (
                self.constants.inside_bytes_per_s if len(nodes) == 1 else self.constants.across_bytes_per_s
            )
            size = 4.0 * held[device] / layout.tensor_parallel
            slowest = max(slowest, 2.0 * (copies - 1) / copies * size / per_s)
        return self.constants.exposed_gradients * slowest

    def _bytes_per_s(self, nodes: set[int]) -> float:
        return self.constants.inside_bytes_per_s if len(nodes) == 1 else self.constants.across_bytes_per_s

    def _slowdown(self, plan: Plan, replica: int, device: int) -> float:
        is_last = self._node(plan, replica, device) == len(plan.made_for.nodes) - 1
        return self.constants.slowdown if is_last and len(plan.made_for.nodes) > 1 else 1.0

    def _node(self, plan: Plan, replica: int, device: int) -> int:
        return plan.mapping.slots[rank_of(0, cp=0, dp=replica, pp=device, layout=plan.layout)].node


def schedule_of(plan: Plan) -> Schedule:
    """The order that a plan executes; without a pipeline that is 1F1B on one device."""
    custom, layout = plan.schedule.custom, plan.layout
    if custom is not None and custom.named is None:
        written = written_of(custom, num_microbatches=plan.num_microbatches)
        assert written is not None, "a searched schedule has its order written out"
        return written
    name = plan.schedule.name if custom is None else custom.named
    assert name is not None
    return _named(
        "1f1b" if name == "no-pipelining" else name,
        layout.pipeline_parallel,
        plan.num_microbatches,
        layout.virtual_stages,
        plan.schedule.group,
    )


@functools.lru_cache(maxsize=4096)
def _named(name: str, devices: int, microbatches: int, chunks: int, group: int | None) -> Schedule:
    return named(
        name,
        num_devices=devices,
        num_microbatches=microbatches,
        num_chunks=chunks if chunks > 1 else None,
        group=group,
    )


def _shifted(transfer: FloatArray) -> FloatArray:
    return np.concatenate(([0.0], transfer[:-1]))
