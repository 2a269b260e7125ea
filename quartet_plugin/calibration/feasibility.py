"""The probability that a plan runs at all: by its predicted memory, and by the outcomes of similar plans."""

import statistics

from quartet_plugin.cost.coefficients import MachineModel
from quartet_plugin.cost.iteration.plan_terms import run_of_plan
from quartet_plugin.cost.memory import CONTEXT_BYTES, Memory, available_bytes, peak_memory
from quartet_plugin.errors import QuartetError
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial

# The probability of plans like one that did not fit or failed the parity gate: those with its layout and
# schedule, those with its layout.
SAME_SCHEDULE, SAME_LAYOUT = 0.15, 0.5
# The shares of the device's memory from which on a plan may not fit, or hardly fits.
TIGHT, OVER = 0.92, 1.0
TIGHT_CHANCE, OVER_CHANCE = 0.5, 0.1
# The limits of the ratio of measured to predicted memory, either way.
MAX_RATIO = 2.0
# A larger share of a device outside of the allocator's pool belongs to other processes.
MAX_CONTEXT_SHARE = 0.15


class FeasibilityModel:
    """Learns from finished trials which plans run, and predicts it for any plan."""

    def __init__(self, machine_model: MachineModel) -> None:
        self._machine_model = machine_model
        self._ran: list[Plan] = []
        self._failed: list[Plan] = []
        self._ratios: list[float] = []
        self._context_bytes: list[float] = []
        self._memory: dict[object, Memory | None] = {}

    def learn(self, trial: FinishedTrial) -> None:
        """Learn a finished trial; call it once a trial."""
        if trial.record.is_depth_proxy:
            return
        if trial.record.verdict == "measured":
            self._ran.append(trial.plan)
            memory = self.memory(trial.plan)
            if memory is not None and trial.record.peak_memory_bytes > 0:
                self._ratios.append(trial.record.peak_memory_bytes / memory.total)
            untracked = trial.record.untracked_memory_bytes
            if memory is not None and 0 < untracked <= MAX_CONTEXT_SHARE * memory.capacity:
                self._context_bytes.append(float(untracked))
        elif trial.record.verdict in ("infeasible", "wrong"):
            self._failed.append(trial.plan)

    def chance(self, plan: Plan) -> float:
        """The probability that the plan runs, from 0 to 1."""
        chance = 1.0
        for other in self._failed:
            if _is_similar(plan, other):
                is_same = other.schedule.label == plan.schedule.label
                chance = min(chance, SAME_SCHEDULE if is_same else SAME_LAYOUT)
        if any(_is_similar(plan, ran) and ran.schedule.label == plan.schedule.label for ran in self._ran):
            chance = max(chance, SAME_LAYOUT)
        share = self.share_of_memory(plan)
        if share is None:
            return chance
        return chance * (1.0 if share < TIGHT else TIGHT_CHANCE if share < OVER else OVER_CHANCE)

    def share_of_memory(self, plan: Plan) -> float | None:
        """`peak_bytes` over what the device has for it; above 1 it hardly fits. None as there."""
        memory = self.memory(plan)
        if memory is None:
            return None
        return self._ratio * memory.total / available_bytes(memory.capacity, context=self._context)

    def peak_bytes(self, plan: Plan) -> int | None:
        """The predicted peak of the fullest rank, corrected by trials; None where the device is not known."""
        memory = self.memory(plan)
        return None if memory is None else round(self._ratio * memory.total)

    def memory(self, plan: Plan) -> Memory | None:
        """The memory that the cost model predicts; None on a device that the library does not have."""
        if not self._machine_model.is_known:
            return None
        key = (plan.shape, plan.layout, plan.split, plan.schedule.label)
        if key not in self._memory:
            try:
                run = run_of_plan(plan, self._machine_model)
                self._memory[key] = peak_memory(run)
            except QuartetError:
                self._memory[key] = None
        return self._memory[key]

    @property
    def _context(self) -> float:
        return statistics.median(self._context_bytes) if self._context_bytes else CONTEXT_BYTES

    @property
    def _ratio(self) -> float:
        if not self._ratios:
            return 1.0
        return min(MAX_RATIO, max(1.0 / MAX_RATIO, statistics.median(self._ratios)))


def _is_similar(plan: Plan, other: Plan) -> bool:
    return plan.layout == other.layout and plan.shape == other.shape
