"""Drift checks: the user's configuration, measured again now and then during a search.

Trials are compared with a baseline that was measured at the start. Where the machine has become slower or
faster since, by more than its launches scatter, the user reads it, and later measurements are compared with
the latest check; the final rounds, which measure in turns, are not touched by it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from quartet_plugin.calibration.observations import launch_noise
from quartet_plugin.model.history import LEAST_DRIFT, DriftMeasurement
from quartet_plugin.model.trial_record import FinishedTrial, score, speedup
from quartet_plugin.tuner.context import TuningContext
from quartet_plugin.tuner.finalists import BASELINE
from quartet_plugin.tuner.slow_nodes import MAX_UNCONFIRMED_CHECKS
from quartet_plugin.tuner.trial_launcher import BaselineScore, TrialLaunch, TrialLauncher

# A change of more deviations of the scatter between two launches is the machine's.
DEVIATIONS = 3.0


@dataclass(slots=True, kw_only=True)
class DriftMonitor:
    """Measures the baseline again after every `study.control` trials; `measurements` are all so far."""

    context: TuningContext
    launcher: TrialLauncher
    baseline: BaselineScore
    measurements: list[DriftMeasurement] = field(default_factory=list)
    _checked: set[int] = field(default_factory=set)
    _drift: float = 1.0
    _num_unconfirmed_checks: int = 0
    _known_slowdowns: dict[str, float] = field(default_factory=dict)

    def check(
        self, num_tried: int, *, trials: Sequence[FinishedTrial], num_left: int, is_over: bool = False
    ) -> float:
        """The machine's speed after `num_tried` trials over its first, 1 where they are as good as equal.

        The baseline is measured again where that is due and there is time; `num_left` launches are still to
        come. A search that is over only takes the checks of an earlier process: the final rounds measure the
        baseline next.
        """
        every = self.context.run.config.study.control
        for due in sorted({*self._launched(), num_tried} - {0}):
            if due > num_tried:
                break
            is_due = every > 0 and due % every == 0 and due == num_tried and not is_over
            is_now = is_due and self._fits(num_left)
            if due not in self._checked and (is_now or self._is_recorded(due)):
                self._checked.add(due)
                self._drift = self._measure(due, noise=_noise_after(due, trials), num_left=num_left)
        return self._drift

    @property
    def drift(self) -> float:
        """The machine's speed at the latest check over its first, 1 where they are as good as equal."""
        return self._drift

    def check_nodes(self, num_tried: int, *, trials: Sequence[FinishedTrial], num_left: int) -> float:
        """The drift after a launch, the `num_tried`-th trial, in which the speed of a node has changed.

        The baseline is measured again at once: that is the second check at the node, and what its speed does
        to the machine. Nothing is measured without drift checks, without time, or twice after one trial; nor
        for a suspicion where MAX_UNCONFIRMED_CHECKS others were none.
        """
        monitor = self.launcher.node_monitor
        is_suspect = bool(monitor.suspects) and self._num_unconfirmed_checks < MAX_UNCONFIRMED_CHECKS
        has_changed = is_suspect or monitor.slowdowns != self._known_slowdowns
        every, is_new = self.context.run.config.study.control, num_tried not in self._checked
        if has_changed and every and is_new and self._fits(num_left):
            self._checked.add(num_tried)
            noise = _noise_after(num_tried, trials)
            self._drift = self._measure(num_tried, noise=noise, num_left=num_left)
        return self._drift

    def _fits(self, num_left: int) -> bool:
        return self.context.budget.fits(num_launches=1, then=num_left)

    def _launched(self) -> set[int]:
        """After how many trials checks were launched, also those of an earlier `study.control`."""
        names = (folder.name for folder in self.context.run.folder.drift_checks.glob("*"))
        return {int(name) for name in names if name.isdecimal()}

    def _is_recorded(self, due: int) -> bool:
        folder = self.context.run.folder.drift_check(due)
        return self.context.backend.recorded(folder, plan_key=None) is not None

    def _measure(self, due: int, *, noise: float, num_left: int) -> float:
        """The drift by a new check; the former one where the check fails."""
        context, baseline = self.context, self.baseline
        launch = TrialLaunch(
            number=BASELINE,
            label=f"{BASELINE} again",
            plan=None,
            folder=context.run.folder.drift_check(due),
            phase="control",
        )
        monitor = self.launcher.node_monitor
        suspects, before = set(monitor.suspects), dict(monitor.slowdowns)
        result = self.launcher.launch(launch, num_left=num_left + 1)
        self._known_slowdowns = dict(monitor.slowdowns)
        self._num_unconfirmed_checks += bool(suspects) and before == monitor.slowdowns
        if not result.is_measured:
            return self._drift
        value = score(baseline.plan, iteration_s=result.iteration_s).value(baseline.objective)
        ratio = speedup(value, baseline_value=baseline.value)
        limit = chance_limit(noise)
        check = DriftMeasurement(num_tried=due, ratio=ratio, chance_limit=limit)
        self.measurements.append(check)
        context.events.add("control", trial=BASELINE, after=due, ratio=ratio, chance_limit=limit)
        if not check.is_within_chance or abs(math.log(ratio)) > math.log1p(LEAST_DRIFT):
            context.observer.message(check.sentence)
        return 1.0 if check.is_within_chance else ratio


def chance_limit(noise: float) -> float:
    """The largest ratio of two measurements of one plan that is within chance; the least is its inverse.

    `noise` is the standard deviation of the logarithm of one launch.
    """
    return math.exp(max(math.log1p(LEAST_DRIFT), DEVIATIONS * math.sqrt(2.0) * noise))


def _noise_after(due: int, trials: Sequence[FinishedTrial]) -> float:
    """The scatter between launches in the first `due` trials: the same when it is computed again later."""
    measured, num_spent = [], 0
    for trial in trials:
        num_spent += trial.is_spent
        if num_spent > due:
            break
        if trial.record.repeats is None:
            measured.append(trial.record)
    return launch_noise(measured)
