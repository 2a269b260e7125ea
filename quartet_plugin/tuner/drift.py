"""The control of a search: the user's own configuration measured again now and then, and how it drifts.

Trials are compared with a baseline that was measured at the start. Where the machine has become slower or
faster since, by more than its launches scatter, that is said, and what is measured from then on is compared
with the latest control; the final rounds, which measure in turns, are not touched by it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from quartet_plugin.calibration.observations import launch_noise
from quartet_plugin.model.launch import Observer
from quartet_plugin.model.score import score
from quartet_plugin.model.trial_record import FinishedTrial
from quartet_plugin.tuner.events import EventLog
from quartet_plugin.tuner.finalists import BASELINE
from quartet_plugin.tuner.launches import Launches
from quartet_plugin.tuner.run_folder import TuningRun
from quartet_plugin.tuner.time_budget import TimeBudget
from quartet_plugin.tuner.trial_launcher import TrialLauncher

# Between two runs of one plan lie a few percent; more than this, and than so many deviations of what lies
# between two launches, is the machine.
DRIFT, DEVIATIONS = 0.1, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftMeasurement:
    """The baseline's objective after `num_tried` trials, over what it was at the start."""

    num_tried: int
    ratio: float


@dataclass(slots=True, kw_only=True)
class DriftMonitor:
    """Measures the baseline again after every `study.control` trials, and tells what came of it."""

    run: TuningRun
    launches: Launches
    launching: TrialLauncher
    observer: Observer
    events: EventLog
    budget: TimeBudget
    found: list[DriftMeasurement] = field(default_factory=list)
    _asked: set[int] = field(default_factory=set)

    def after(self, num_tried: int, *, trials: Sequence[FinishedTrial], num_left: int, is_over: bool) -> None:
        """Measure again where it is time to and there is time; `num_left` launches are still to come.

        A search that is over only gets what was measured before: the final rounds measure the baseline next.
        """
        every = self.run.config.study.control
        for due in range(every, num_tried + 1, every) if every else ():
            is_now = due == num_tried and not is_over and self.budget.fits(num_launches=1, then=num_left)
            if due not in self._asked and (is_now or self._is_recorded(due)):
                self._asked.add(due)
                self._measure(due, noise=_noise_at(due, trials), num_left=num_left)

    def restore(self, num_tried: int, *, trials: Sequence[FinishedTrial]) -> None:
        """Take in what an earlier process measured, and measure nothing."""
        self.after(num_tried, trials=trials, num_left=0, is_over=True)

    def _is_recorded(self, due: int) -> bool:
        return self.launches.recorded(self.run.folder.control(due), plan_key=None) is not None

    def _measure(self, due: int, *, noise: float, num_left: int) -> None:
        own = self.launching.yardstick
        assert own is not None
        result = self.launching.launch(
            None,
            number=BASELINE,
            folder=self.run.folder.control(due),
            label=f"{BASELINE} again",
            stage="search",
            num_left=num_left + 1,
        )
        if not result.is_measured:
            return
        ratio = score(own.plan, iteration_s=result.iteration_s).value(own.objective) / own.value
        self.found.append(DriftMeasurement(num_tried=due, ratio=ratio))
        self.events.add("control", trial=BASELINE, after=due, ratio=ratio)
        has_drifted = is_drift(ratio, noise=noise)
        self.launching.drift = ratio if has_drifted else 1.0
        if has_drifted:
            self.observer.message(
                f"after {due} trials your own command runs at {ratio:.2f}x of its first measurement: "
                "the machine has changed; what comes now is compared with that"
            )


def is_drift(ratio: float, *, noise: float) -> bool:
    """Whether the baseline's speed over its first is more than chance where launches lie `noise` apart."""
    return abs(math.log(ratio)) > max(math.log1p(DRIFT), DEVIATIONS * math.sqrt(2.0) * noise)


def _noise_at(due: int, trials: Sequence[FinishedTrial]) -> float:
    """How far launches lay apart in the first `due` trials: the same when it is asked again later."""
    measured, num_spent = [], 0
    for trial in trials:
        num_spent += trial.is_spent
        if num_spent > due:
            break
        if trial.record.repeats is None:
            measured.append(trial.record)
    return launch_noise(measured)
