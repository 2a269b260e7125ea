"""The probability that a plan runs at all: by the memory that it needs, and by outcomes of similar plans."""

import math

import numpy as np

from quartet_plugin.cost.coefficients import MachineModel
from quartet_plugin.cost.iteration.plan_terms import run_of_plan
from quartet_plugin.cost.memory import (
    CONTEXT_BYTES,
    PROCESS_BYTES,
    RUNTIME_BYTES,
    Memory,
    available_bytes,
    memory_by_device,
    peak_memory,
)
from quartet_plugin.errors import QuartetError
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import REFUSED_EXCESS, FinishedTrial

# The probability of plans like one that did not fit or failed the parity gate: those with its layout and
# schedule, those with its layout.
SAME_SCHEDULE, SAME_LAYOUT = 0.15, 0.5
# The share of the device's memory from which on a plan hardly fits, and the least probability that it does.
OVER, LEAST_CHANCE = 1.0, 1e-4
# A larger share of a device outside of the allocator's pool belongs to other processes.
MAX_CONTEXT_SHARE = 0.15
# What a rank needs by the prior, and one standard deviation of it: on the CPU the bytes of a process before
# its tensors, and what custom schedules add to them; everywhere the scale of what is predicted, and the share
# that activations of custom schedules take beside. Then the relative errors that are left in a plan: of its
# tensors, and of all that is counted.
_PROCESS = ((PROCESS_BYTES, 0.3 * 2**30), (RUNTIME_BYTES, 0.1 * 2**30))
_TENSORS = ((1.0, 0.25), (0.0, 0.25))
_NOISE, _LEAST_NOISE = 0.05, 0.02
# The least part of the predicted activations that a fit of few peaks may leave.
_LEAST_SCALE = 0.1


class FeasibilityModel:
    """Learns from finished trials which plans run, and predicts it for any plan.

    A rank needs what `peak_memory` predicts, times a scale; custom schedules hold some share more. On the
    CPU, where the peak is the process's, it also needs the bytes of a process without tensors. These are
    fitted to the peaks of trials (the mean of a Gaussian posterior), plans above the user's limit included.
    """

    def __init__(self, machine_model: MachineModel) -> None:
        self._machine_model = machine_model
        self._ran: list[Plan] = []
        self._failed: list[Plan] = []
        self._context_bytes: list[float] = []
        # The least bytes at which an allocation failed on a device whose memory no one says.
        self._failed_bytes = math.inf
        self._memory: dict[object, Memory | None] = {}
        process = np.array(_PROCESS) * float(machine_model.on_cpu)
        self._mean, spreads = np.concatenate([process, np.array(_TENSORS)]).T
        self._covariance = np.diag(spreads**2)

    def learn(self, trial: FinishedTrial) -> None:
        """Learn a finished trial; call it once a trial."""
        record = trial.record
        if record.is_depth_proxy or record.verdict not in ("measured", "infeasible", "wrong"):
            return
        (self._ran if record.verdict == "measured" else self._failed).append(trial.plan)
        memory = self.memory(trial.plan)
        if memory is None or record.peak_memory_bytes <= 0:
            return
        limit = self._machine_model.memory_limit_bytes
        if record.verdict == "measured" or (limit is not None and record.peak_memory_bytes > limit):
            self._learn_peak(trial.plan, memory, float(record.peak_memory_bytes))
        elif record.verdict == "infeasible" and 1.0 < record.excess < REFUSED_EXCESS:
            self._learn_failure(trial.plan, memory, record.peak_memory_bytes + record.excess)
        untracked = record.untracked_memory_bytes
        if record.verdict == "measured" and 0 < untracked <= MAX_CONTEXT_SHARE * memory.capacity_bytes:
            self._context_bytes.append(float(untracked))

    def chance(self, plan: Plan) -> float:
        """The probability that the plan runs, from 0 to 1."""
        chance = 1.0
        for other in self._failed:
            if _is_similar(plan, other):
                is_same = other.schedule.label == plan.schedule.label
                chance = min(chance, SAME_SCHEDULE if is_same else SAME_LAYOUT)
        if any(_is_similar(plan, ran) and ran.schedule.label == plan.schedule.label for ran in self._ran):
            chance = max(chance, SAME_LAYOUT)
        return chance * self.chance_of_memory(plan)

    def chance_of_memory(self, plan: Plan) -> float:
        """The probability that the plan's peak is below what the device has, from LEAST_CHANCE to 1."""
        memory = self.memory(plan)
        if memory is None or not self._has_limit:
            return 1.0
        need, spread = self._need(plan, memory)
        deviations = (self._available(memory) - need) / spread
        return max(LEAST_CHANCE, 0.5 * math.erfc(-deviations / math.sqrt(2.0)))

    def exceeds_limit(self, trial: FinishedTrial) -> bool:
        """Whether a measured trial's peak is above the user's limit: its device has more memory than that."""
        limit = self._machine_model.memory_limit_bytes
        return limit is not None and trial.record.peak_memory_bytes > limit

    def share_of_memory(self, plan: Plan) -> float | None:
        """`peak_bytes` over what the device has for it; above OVER it hardly fits. None without a limit."""
        memory = self.memory(plan)
        if memory is None or not self._has_limit:
            return None
        available = self._available(memory)
        return self._need(plan, memory)[0] / available if available > 0.0 else math.inf

    def peak_bytes(self, plan: Plan) -> int | None:
        """The predicted peak of the fullest rank, corrected by trials; None for a plan without prediction."""
        memory = self.memory(plan)
        return None if memory is None else round(self._need(plan, memory)[0])

    def activation_limits(self, plan: Plan) -> FloatArray | None:
        """The bytes of activations with which each pipeline rank likely fits; None where nothing limits them.

        They are one standard deviation below what the corrected prediction leaves beside weights and states.
        """
        memory = self.memory(plan)
        if memory is None or not self._has_limit:
            return None
        process, runtime, scale, more = self._mean
        ranks = memory_by_device(run_of_plan(plan, self._machine_model))
        rest = np.array([rank.total_bytes - rank.activations_bytes for rank in ranks])
        room = self._available(memory) - self._need(plan, memory)[1] - process - runtime - scale * rest
        limits: FloatArray = np.maximum(0.0, room / max(scale + more, _LEAST_SCALE))
        return limits

    def memory(self, plan: Plan) -> Memory | None:
        """The memory that the cost model predicts; None for a plan that it cannot predict."""
        custom = plan.schedule.custom
        is_named = custom is None or custom.named is not None
        key = (plan.shape, plan.layout, plan.split, plan.schedule.label if is_named else plan.schedule)
        if key not in self._memory:
            try:
                run = run_of_plan(plan, self._machine_model)
                self._memory[key] = peak_memory(run)
            except QuartetError:
                self._memory[key] = None
        return self._memory[key]

    @property
    def _has_limit(self) -> bool:
        model = self._machine_model
        return model.is_known or model.memory_limit_bytes is not None or self._failed_bytes < math.inf

    def _available(self, memory: Memory) -> float:
        """Bytes that a rank may need on the device, as its peak is counted."""
        model, context = self._machine_model, CONTEXT_BYTES
        if self._context_bytes:
            context = float(np.median(self._context_bytes))
        available = self._failed_bytes
        if model.is_known:
            available = min(available, available_bytes(memory.capacity_bytes, context_bytes=context))
        if model.memory_limit_bytes is not None:
            available = min(available, float(model.memory_limit_bytes))
        return available

    def _need(self, plan: Plan, memory: Memory) -> tuple[float, float]:
        """The predicted peak of a rank and its standard deviation, in bytes."""
        features = _features(plan, memory)
        need = float(features @ self._mean)
        return need, math.sqrt(_variance(memory, need) + float(features @ self._covariance @ features))

    def _learn_peak(self, plan: Plan, memory: Memory, peak_bytes: float) -> None:
        """Update the Gaussian with one more peak."""
        features = _features(plan, memory)
        gain = self._covariance @ features
        variance = _variance(memory, peak_bytes) + float(features @ gain)
        self._mean = self._mean + gain * (peak_bytes - float(features @ self._mean)) / variance
        self._covariance = self._covariance - np.outer(gain, gain) / variance

    def _learn_failure(self, plan: Plan, memory: Memory, wanted_bytes: float) -> None:
        """Learn from an allocation that failed: the plan needs at least as much; the device has no more."""
        if not self._machine_model.is_known:
            self._failed_bytes = min(self._failed_bytes, wanted_bytes)
        if self._need(plan, memory)[0] < wanted_bytes:
            self._learn_peak(plan, memory, wanted_bytes)


def _features(plan: Plan, memory: Memory) -> FloatArray:
    """The factors of the coefficients: a process, the runtime's share of it, tensors, custom activations."""
    is_custom = float(plan.schedule.custom is not None)
    return np.array([1.0, is_custom, memory.total_bytes, is_custom * memory.activations_bytes])


def _variance(memory: Memory, peak_bytes: float) -> float:
    """The squared error of a peak in bytes that no coefficient explains."""
    return (_NOISE * memory.total_bytes) ** 2 + (_LEAST_NOISE * peak_bytes) ** 2


def _is_similar(plan: Plan, other: Plan) -> bool:
    return plan.layout == other.layout and plan.shape == other.shape
