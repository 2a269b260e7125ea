"""One launch after another: from a trial's folder or from a launch now, shown, logged and timed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from quartet_plugin.calibration.observations import spread_of
from quartet_plugin.errors import InfrastructureError, InterruptedByUserError
from quartet_plugin.launchers.command import Command
from quartet_plugin.model.launch import LaunchRecord, Observer, Phase
from quartet_plugin.model.measurement import Objective
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.score import Score, score, score_of_median
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord, Verdict
from quartet_plugin.study.tune_study import REFUSED_EXCESS
from quartet_plugin.trial.request import Outcome, Progress, Timeouts, TrialRequest, TrialResult
from quartet_plugin.tuner.events import EventLog
from quartet_plugin.tuner.launches import Launches, ShouldStop
from quartet_plugin.tuner.run_folder import TuningRun
from quartet_plugin.tuner.time_budget import TimeBudget

_VERDICTS: dict[Outcome, Verdict] = {
    Outcome.OK: "measured",
    Outcome.UNSTABLE: "measured",
    Outcome.INFEASIBLE: "infeasible",
    Outcome.WRONG: "wrong",
    Outcome.INFRA: "lost",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineScore:
    """What the user's own configuration does: its plan, score and what it is compared by."""

    plan: Plan
    score: Score
    objective: Objective

    @property
    def value(self) -> float:
        """The baseline's objective."""
        return self.score.value(self.objective)


class TrialLauncher:
    """Has plans launched for a run. `yardstick` is None until trial 0 is measured.

    `drift` is the baseline's speed at the latest control over that of trial 0, 1 where they are as good as
    equal: what the search measures now is compared with the yardstick times that.
    """

    def __init__(
        self,
        run: TuningRun,
        *,
        command: Command,
        launches: Launches,
        observer: Observer,
        events: EventLog,
        should_stop: ShouldStop,
        fence: Callable[[], None],
        budget: TimeBudget,
    ) -> None:
        self._run = run
        self._command = command
        self._launches = launches
        self._observer = observer
        self._events = events
        self._should_stop = should_stop
        self._fence = fence
        self._budget = budget
        self.yardstick: BaselineScore | None = None
        self.best_value: float | None = None
        self.drift = 1.0
        self._timeouts = Timeouts.within(run.config.trial.deadline_s)

    def launch(
        self, plan: Plan | None, *, number: int, folder: Path, label: str, stage: Phase, num_left: int
    ) -> TrialResult:
        """The settled result of one launch; None is the user's own command.

        `num_left` launches, this one included, are still to come. Raises InterruptedByUserError when asked
        to stop, InfrastructureError where it ran on other devices than the baseline.
        """
        known = self._launches.recorded(folder, plan_key=None if plan is None else plan.key)
        # A baseline that failed was mended, or given more time, by whoever starts again.
        is_mended = known is not None and not known.is_measured and stage == "baseline"
        if known is not None and not is_mended and not self._elsewhere(known):
            self.found(label, plan, known, stage=stage)
            return known
        self.began(number, label, plan, folder=folder, stage=stage, num_left=num_left)
        result = self._launches.run(
            self.request(plan, folder=folder, stage=stage),
            on_progress=self._progressed,
            should_stop=self._should_stop,
        )
        self.ended(number, label, plan, result, stage=stage)
        if found := self._elsewhere(result):
            raise InfrastructureError(
                f"{label}: {found}; --resume where the baseline ran, or begin another run"
            )
        # A preemption ends ranks and tuner alike; the attempt is closed, and its trial is there to resume.
        is_lost = result.outcome is Outcome.INFRA and self._should_stop()
        if result.outcome is Outcome.CANCELLED or is_lost:
            raise self._interrupted()
        return result

    def found(self, label: str, plan: Plan | None, result: TrialResult, *, stage: Phase) -> None:
        """A launch was measured by an earlier process."""
        self._budget.add(result.wall_s)
        self._learn(result)
        if self.yardstick is not None:
            self.show(label, plan, result, stage=stage)

    def began(
        self, number: int, label: str, plan: Plan | None, *, folder: Path, stage: Phase, num_left: int
    ) -> None:
        """A launch is about to begin. Raises InterruptedByUserError when asked to stop."""
        self.check_stop()
        self._fence()
        left_s = self._budget.forecast_s(num_launches=num_left)
        self._observer.plan_started(label, plan, stage=stage, time_left_s=left_s)
        self._events.add("launch", trial=number, stage=stage, folder=folder.name)

    def ended(self, number: int, label: str, plan: Plan | None, result: TrialResult, *, stage: Phase) -> None:
        """A launch has ended."""
        self._budget.add(result.wall_s)
        self._learn(result)
        self._events.add("outcome", trial=number, outcome=result.outcome.value, reason=result.reason)
        if self.yardstick is not None or not result.is_measured:
            self.show(label, plan, result, stage=stage)

    def _elsewhere(self, result: TrialResult) -> str:
        """Why its times do not compare with the baseline's: it ran on other devices; empty where they do."""
        own = self.yardstick
        if own is None or not result.is_measured:
            return ""
        expected = [node.node_class for node in own.plan.made_for.nodes]
        found = [node.node_class for node in self._launches.nodes(result)]
        if found == expected:
            return ""
        return f"it ran on {', '.join(found)}, the baseline on {', '.join(expected)}: times do not compare"

    def _learn(self, result: TrialResult) -> None:
        """A later start may take some times as long as the longest so far before it counts as a hang."""
        if result.is_measured:
            self._timeouts = self._timeouts.learned(start_s=result.start_s, first_step_s=result.first_step_s)

    def check_stop(self) -> None:
        """Raise InterruptedByUserError when asked to stop."""
        if self._should_stop():
            raise self._interrupted()

    def _interrupted(self) -> InterruptedByUserError:
        self._events.add("interrupted")
        return InterruptedByUserError(
            "stopped; everything measured is kept: the same command with --resume goes on"
        )

    def request(self, plan: Plan | None, *, folder: Path, stage: Phase) -> TrialRequest:
        """What is launched for a plan; None is the user's own command."""
        config = self._run.config
        predicted_s = None if self.yardstick is None else self.yardstick.score.iteration_s
        if predicted_s is not None and plan is not None and plan.prediction is not None:
            predicted_s *= max(1.0, plan.prediction.relative_cost or 1.0)
        return TrialRequest(
            folder=folder,
            command=self._command,
            plan=plan,
            warmup=config.trial.warmup,
            measure=config.trial.measure,
            deadline_s=config.trial.deadline_s,
            device=config.device,
            predicted_iteration_s=predicted_s,
            timeouts=self._timeouts,
            slow_above_s=self._slow_above_s(plan) if stage == "search" else None,
            cwd=self._run.cwd,
        )

    def _slow_above_s(self, plan: Plan | None) -> float | None:
        """Seconds an iteration above which a plan is far behind the best so far."""
        if plan is None or self.yardstick is None or not self.best_value:
            return None
        in_a_second = score_of_median(plan, iteration_s=1.0).value(self.yardstick.objective)
        return self._run.config.trial.cut_above * in_a_second / (self.best_value * self.drift)

    def _progressed(self, progress: Progress) -> None:
        self._fence()
        self._observer.progressed(
            progress.phase,
            iteration=progress.iteration,
            num_iterations=progress.num_iterations,
        )

    def show(self, label: str, plan: Plan | None, result: TrialResult, *, stage: Phase) -> None:
        """Tell the observer; what a time is worth is known once there is a yardstick.

        In the final rounds a launch is compared with the baseline of its own round alone, and at their end;
        a cropped model with nothing.
        """
        own = self.yardstick
        scored, is_compared = None, stage in ("baseline", "search")
        drift = self.drift if stage == "search" and plan is not None else 1.0
        shown = plan or (own.plan if own else None)
        if result.is_measured and shown is not None:
            scored = score(shown, iteration_s=result.iteration_s)
        self._observer.plan_finished(
            LaunchRecord(
                label=label,
                plan=plan,
                outcome=result.outcome.value,
                reason=result.reason,
                iteration_s=scored.iteration_s if scored else None,
                tokens_per_s=scored.tokens_per_s if scored and stage != "cropped" else None,
                versus_baseline=(
                    scored.value(own.objective) / own.value / drift
                    if scored and own and is_compared
                    else None
                ),
            )
        )

    def show_told(self, trial: FinishedTrial) -> None:
        """Tell the observer of a trial that an earlier process told the study."""
        record, own = trial.record, self.yardstick
        self._observer.plan_finished(
            LaunchRecord(
                label=str(trial.number),
                plan=trial.plan,
                outcome=record.outcome,
                reason=record.reason,
                iteration_s=record.iteration_s,
                tokens_per_s=record.tokens_per_s,
                versus_baseline=record.value / own.value if record.value is not None and own else None,
            )
        )


def record_of(plan: Plan, result: TrialResult, *, objective: Objective, drift: float = 1.0) -> TrialRecord:
    """What the study keeps of a result; not for cancelled trials or faults of the harness.

    `drift` is the machine's, see `TrialLauncher`.
    """
    common = TrialRecord(
        verdict=_VERDICTS[result.outcome],
        outcome=result.outcome.value,
        reason=result.reason,
        attempt_id=result.attempt_id,
        peak_memory_bytes=result.peak_memory_bytes,
        wall_s=result.wall_s,
        drift=drift,
    )
    if result.is_measured:
        measured = replace(
            common, num_iterations=len(result.iteration_s), spread=spread_of(result.iteration_s)
        )
        return measured.scored(score(plan, iteration_s=result.iteration_s), objective=objective)
    if result.outcome is Outcome.INFEASIBLE:
        return replace(common, excess=float(result.memory_excess_bytes) or REFUSED_EXCESS)
    return replace(common, excess=1.0 if result.outcome is Outcome.WRONG else 0.0)
