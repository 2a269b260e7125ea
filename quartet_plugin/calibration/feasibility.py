"""How likely a plan runs at all: by the memory that is expected, and by how its neighbours fared."""

import statistics

from quartet_plugin.cost.coefficients import MachineModel
from quartet_plugin.cost.iteration import run_of_plan
from quartet_plugin.cost.jobs import schedule_kind
from quartet_plugin.cost.memory import Memory, peak_memory
from quartet_plugin.errors import QuartetError
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial

# What plans like one that did not fit, or computed something else, are taken for: those with its layout and
# schedule, those with its layout.
SAME_SCHEDULE, SAME_LAYOUT = 0.15, 0.5
# Of the memory there is, expected to be used: from here on a plan may not fit, or hardly will.
TIGHT, OVER = 0.92, 1.0
TIGHT_CHANCE, OVER_CHANCE = 0.5, 0.1
# How far measured memory may correct what is expected.
MOST_OFF = 2.0


class FeasibilityModel:
    """Learns from told records which plans run; says it of any plan."""

    def __init__(self, machine_model: MachineModel) -> None:
        self._machine_model = machine_model
        self._ran: list[Plan] = []
        self._failed: list[Plan] = []
        self._ratios: list[float] = []
        self._memory: dict[object, Memory | None] = {}

    def learn(self, trial: FinishedTrial) -> None:
        """Take in a record, once."""
        if trial.record.is_depth_proxy:
            return
        if trial.record.verdict == "measured":
            self._ran.append(trial.plan)
            memory = self.memory(trial.plan)
            if memory is not None and trial.record.peak_memory_bytes > 0:
                self._ratios.append(trial.record.peak_memory_bytes / memory.total)
        elif trial.record.verdict in ("infeasible", "wrong"):
            self._failed.append(trial.plan)

    def chance(self, plan: Plan) -> float:
        """From 0 to 1."""
        found = 1.0
        for other in self._failed:
            if _is_near(plan, other):
                is_same = other.schedule.label == plan.schedule.label
                found = min(found, SAME_SCHEDULE if is_same else SAME_LAYOUT)
        if any(_is_near(plan, one) and one.schedule.label == plan.schedule.label for one in self._ran):
            found = max(found, SAME_LAYOUT)
        memory = self.memory(plan)
        if memory is None:
            return found
        used = self._ratio * memory.total / memory.available
        return found * (1.0 if used < TIGHT else TIGHT_CHANCE if used < OVER else OVER_CHANCE)

    def peak_bytes(self, plan: Plan) -> int | None:
        """The expected peak of the fullest rank, as far as trials have corrected it; None where unknown."""
        memory = self.memory(plan)
        return None if memory is None else round(self._ratio * memory.total)

    def memory(self, plan: Plan) -> Memory | None:
        """What the cost model says; None on a device whose memory is not known."""
        if not self._machine_model.is_known:
            return None
        key = (plan.shape, plan.layout, plan.split, plan.schedule.label)
        if key not in self._memory:
            try:
                run = run_of_plan(plan, self._machine_model, schedule=schedule_kind(plan.schedule))
                self._memory[key] = peak_memory(run)
            except QuartetError:
                self._memory[key] = None
        return self._memory[key]

    @property
    def _ratio(self) -> float:
        if not self._ratios:
            return 1.0
        return min(MOST_OFF, max(1.0 / MOST_OFF, statistics.median(self._ratios)))


def _is_near(plan: Plan, other: Plan) -> bool:
    return plan.layout == other.layout and plan.shape == other.shape
