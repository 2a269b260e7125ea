"""One launch of a tuning run: taken from its folder or made now by the backend, shown, logged and timed."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quartet_plugin.calibration.observations import spread_of
from quartet_plugin.errors import InfrastructureError, QuartetError
from quartet_plugin.model.launch import LaunchPosition, LaunchRecord, Phase
from quartet_plugin.model.measurement import Objective
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import (
    REFUSED_EXCESS,
    FinishedTrial,
    Score,
    TrialRecord,
    Verdict,
    score,
    speedup,
)
from quartet_plugin.protocol.measured_window import EarlyEnd
from quartet_plugin.protocol.training_start import read_starts, words_of
from quartet_plugin.trial.attempt import PREFIX, read_result
from quartet_plugin.trial.compared_start import ComparedStart
from quartet_plugin.trial.request import (
    DEVICE_WARMUP_S,
    Outcome,
    Progress,
    Timeouts,
    TrialRequest,
    TrialResult,
)
from quartet_plugin.tuner.accepted_sources import EVENT as ACCEPTED
from quartet_plugin.tuner.accepted_sources import accepted_in
from quartet_plugin.tuner.config import PRECISION
from quartet_plugin.tuner.context import TuningContext
from quartet_plugin.tuner.slow_nodes import NodeMonitor

VERDICTS: dict[Outcome, Verdict] = {
    Outcome.OK: "measured",
    Outcome.UNSTABLE: "measured",
    Outcome.INFEASIBLE: "infeasible",
    Outcome.WRONG: "wrong",
    Outcome.NOT_AS_PLANNED: "infeasible",
    Outcome.INFRA: "lost",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineScore:
    """The configuration that plans are compared with: its plan, its measured score, and the objective.

    It is the user's own, or a plan that stands in for it in the final rounds: `launched_plan`.
    `is_within_memory` is False where the user's command needs more memory than the cluster file's devices
    have.
    """

    plan: Plan
    score: Score
    objective: Objective
    launched_plan: Plan | None = None
    is_within_memory: bool = True

    @property
    def value(self) -> float:
        """The baseline's objective."""
        return self.score.value(self.objective)

    @property
    def value_to_beat(self) -> float:
        """The objective near which a plan is measured again: 0 where the baseline does not fit."""
        return self.value if self.is_within_memory else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLaunch:
    """One launch that a tuning run wants: of a trial's plan, or of the user's command (`plan` None).

    `drift` is the machine's speed now over its speed when trial 0 was measured: the launch is compared with
    the baseline times that. Where iterations take more than `slow_above_s`, it is cut short; where their
    number is not fixed, also where they surely take more than `slower_than_s`. `position` is its place among
    the run's trials or final rounds. `start` says which of its first iterations the parity
    gate compares (None: none).
    """

    number: int
    label: str
    plan: Plan | None
    folder: Path
    phase: Phase
    drift: float = 1.0
    slow_above_s: float | None = None
    slower_than_s: float | None = None
    position: LaunchPosition | None = None
    start: ComparedStart | None = None


@dataclass(slots=True, kw_only=True)
class TrialLauncher:
    """Launches plans for a run and compares them with `baseline`; trial 0 itself is launched without one.

    `timeouts` grow with the longest start that was measured, the deadline with `longest_begin_s`, the most
    seconds until the end of a first step. `num_measured` iterations are measured at most, None: as many as
    the configuration says; each launch of the final rounds measures `num_measured_finally` of them.
    `modules` are the classes that ran in the user's command. `cold_reason` is why the latest launch did
    not start warm, as it was said. `accepted_functions` are the changed functions that the event log names as
    accepted. `node_monitor` takes in every launch. `judge` says what a launch comes to once the parity gate
    has compared its first iterations. `on_progress` is called with the folder of a running attempt and where
    it is.
    """

    context: TuningContext
    baseline: BaselineScore | None
    timeouts: Timeouts
    node_monitor: NodeMonitor
    num_measured: int | None = None
    num_measured_finally: int | None = None
    longest_begin_s: float = 0.0
    modules: tuple[str, ...] | None = None
    cold_reason: str | None = None
    accepted_functions: tuple[str, ...] = ()
    judge: Callable[[TrialLaunch, TrialResult], TrialResult] = lambda _, result: result
    on_progress: Callable[[Path, Progress], None] = lambda *_: None

    def launch(self, launch: TrialLaunch, *, num_left: int) -> TrialResult:
        """The settled result of one launch; `num_left` launches, this one included, are still to come.

        Raises InterruptedByUserError when asked to stop, InfrastructureError where it ran on other devices
        than the baseline.
        """
        context = self.context
        recorded = self.recorded(launch)
        if recorded is not None:
            recorded = self.judge(launch, recorded)
            self.reuse(launch, recorded)
            return recorded
        self.begin(launch, num_left=num_left)
        result = context.backend.run(
            self.request(launch), on_progress=self._progress_of(launch), should_stop=context.should_stop
        )
        result = self.judge(launch, result)
        self.end(launch, result)
        if other_devices := self.other_devices(result):
            raise InfrastructureError(
                f"trial {launch.label}: ran {other_devices}; "
                "resume on the devices of the baseline, or start another run"
            )
        # A preemption ends ranks and tuner alike; the attempt is closed, and its trial is there to resume.
        is_lost = result.outcome is Outcome.INFRA and context.should_stop()
        if result.outcome is Outcome.CANCELLED or is_lost:
            raise context.interruption()
        return result

    def recorded(self, launch: TrialLaunch) -> TrialResult | None:
        """The result of an earlier session that stands for this launch; None where it must be launched."""
        plan_key = None if launch.plan is None else launch.plan.key
        recorded = self.context.backend.recorded(launch.folder, plan_key=plan_key)
        # A baseline that failed was mended, or given more time, by whoever starts again.
        is_mended = recorded is not None and not recorded.is_measured and launch.phase == "baseline"
        return None if recorded is None or is_mended or self.other_devices(recorded) else recorded

    def _progress_of(self, launch: TrialLaunch) -> Callable[[Progress], None]:
        """Show the progress; and of a command that only its own start tells of, what training it starts."""
        context, shown = self.context, False
        attempt: int | None = None

        def show(progress: Progress) -> None:
            nonlocal shown, attempt
            if attempt is not None and progress.attempt > attempt:
                earlier = None
                with contextlib.suppress(QuartetError):
                    earlier = read_result(launch.folder / f"{PREFIX}{attempt}")
                reason = "" if earlier is None else f": {earlier.reason}"
                context.observer.message(f"trial {launch.label} is launched once more{reason}")
            attempt = progress.attempt
            self.on_progress(launch.folder / f"{PREFIX}{attempt}", progress)
            if not shown and launch.phase == "baseline" and context.command.starter == "other":
                words = words_of(read_starts(launch.folder / f"{PREFIX}{progress.attempt}"))
                if words is not None:
                    shown = True
                    context.observer.message(words)
            context.show_progress(progress)

        return show

    def reuse(self, launch: TrialLaunch, result: TrialResult) -> None:
        """Count and show a result that an earlier process measured."""
        self.learn(result, label=launch.label)
        if self.baseline is not None:
            self.show(launch, result)

    def begin(self, launch: TrialLaunch, *, num_left: int) -> None:
        """Show and log a launch that begins now. Raises InterruptedByUserError when asked to stop."""
        context = self.context
        context.check_stop()
        context.fence()
        left_s = context.budget.remaining_s(num_launches=num_left)
        context.observer.plan_started(
            launch.label,
            launch.plan,
            phase=launch.phase,
            time_left_s=left_s,
            position=launch.position,
            measured_share=context.budget.measured_share,
        )
        context.events.add(
            "launch",
            trial=launch.number,
            stage=launch.phase,
            folder=launch.folder.name,
            time_left_s=left_s,
        )

    def end(self, launch: TrialLaunch, result: TrialResult) -> None:
        """Count, log and show a launch that has ended."""
        self.learn(result, label=launch.label)
        self.context.budget.add_measured(sum(result.iteration_s), wall_s=result.wall_s)
        self.context.events.add(
            "outcome", trial=launch.number, outcome=result.outcome.value, reason=result.reason
        )
        accepted = [text for text in accepted_in(result) if text not in self.accepted_functions]
        if accepted:
            self.accepted_functions += (*accepted,)
            self.context.events.add(ACCEPTED, trial=launch.number, functions=accepted)
        if result.cold_reason is not None and result.cold_reason != self.cold_reason:
            self.cold_reason = result.cold_reason
            self.context.observer.message(f"processes start cold: {result.cold_reason}")
        if self.baseline is not None or not result.is_measured:
            self.show(launch, result)

    def learn(self, result: TrialResult, *, label: str) -> None:
        """Count the seconds of a launch; a later start may take as long as its start before it is a hang."""
        self.context.budget.add(result.wall_s)
        self.node_monitor.observe(result, label=label)
        if result.is_measured:
            self.timeouts = self.timeouts.learned(start_s=result.start_s, first_step_s=result.first_step_s)
            self.longest_begin_s = max(self.longest_begin_s, result.start_s + result.first_step_s)

    def other_devices(self, result: TrialResult) -> str:
        """The other devices that it ran on than the baseline, in words; empty where the times compare."""
        if self.baseline is None or not result.is_measured:
            return ""
        expected = [node.node_class for node in self.baseline.plan.made_for.nodes]
        measured_on = [node.node_class for node in self.context.backend.nodes(result)]
        if measured_on == expected:
            return ""
        here, there = ", ".join(measured_on), ", ".join(expected)
        return f"on {here}, the baseline on {there}: their times are not comparable"

    def request(self, launch: TrialLaunch) -> TrialRequest:
        """The request that the backend, or a worker, gets for a launch."""
        run, plan = self.context.run, launch.plan
        trial = run.config.trial
        predicted_s = None if self.baseline is None else self.baseline.score.iteration_s
        if predicted_s is not None and plan is not None and plan.prediction is not None:
            predicted_s *= max(1.0, plan.prediction.relative_cost or 1.0)
        start = launch.start
        device_warmup_s = min(DEVICE_WARMUP_S, trial.deadline_s / 20) if launch.phase == "baseline" else 0.0
        warmup = trial.least_warmup if start is None else start.num_warmup(trial.least_warmup)
        measure = self.num_measured or trial.most_measured
        early_end = None
        if launch.phase == "final":
            measure = min(measure, self.num_measured_finally or measure)
        elif trial.measure == "auto":
            early_end = EarlyEnd(
                least=min(trial.least_measured, measure),
                precision=PRECISION,
                slower_than_s=launch.slower_than_s,
            )
        return TrialRequest(
            folder=launch.folder,
            command=self.context.command,
            plan=plan,
            warmup=warmup,
            max_warmup=None if trial.warmup != "auto" else warmup + trial.most_warmup - trial.least_warmup,
            measure=measure,
            early_end=early_end,
            modules=self.modules if plan is not None and launch.phase in ("search", "final") else None,
            deadline_s=self._deadline_s(),
            device=run.config.device,
            predicted_iteration_s=predicted_s,
            timeouts=self.timeouts,
            slow_above_s=launch.slow_above_s if early_end is None else None,
            cwd=run.cwd,
            weights=None if start is None else start.weights,
            save_weights=None if start is None else start.save_weights,
            num_compared=None if start is None else start.num_steps,
            device_warmup_s=device_warmup_s,
        )

    def _deadline_s(self) -> float:
        """Seconds of a whole trial; the first start has as much more as its limits are longer.

        A later trial has half of its deadline after a first step as slow as the slowest so far.
        """
        deadline_s = self.context.run.config.trial.deadline_s
        if self.baseline is not None:
            return deadline_s + max(0.0, self.longest_begin_s - 0.5 * deadline_s)
        return deadline_s + max(0.0, self.timeouts.longer_than(Timeouts.within(deadline_s)))

    def show(self, launch: TrialLaunch, result: TrialResult) -> None:
        """Show a launch's end to the observer, compared with the baseline where there is one.

        In the final rounds a launch is compared with the baseline of its own round alone, and at their end;
        the model of a depth proxy with nothing.
        """
        baseline, measured, versus_baseline = self.baseline, None, None
        plan = launch.plan or (baseline.plan if baseline else None)
        if result.is_measured and plan is not None:
            measured = score(plan, iteration_s=result.iteration_s)
        if measured and baseline and launch.phase in ("baseline", "control", "search"):
            value = measured.value(baseline.objective, drift=launch.drift)
            versus_baseline = speedup(value, baseline_value=baseline.value)
        self.context.observer.plan_finished(
            LaunchRecord(
                label=launch.label,
                plan=launch.plan,
                outcome=result.outcome.value,
                reason=result.reason,
                iteration_s=measured.iteration_s if measured else None,
                tokens_per_s=measured.tokens_per_s if measured and launch.phase != "cropped" else None,
                versus_baseline=versus_baseline,
                drift=launch.drift,
            )
        )

    def show_finished(self, trial: FinishedTrial) -> None:
        """Show a trial from its record; this process has launched nothing for it."""
        record, versus_baseline = trial.record, None
        if record.value is not None and self.baseline is not None:
            versus_baseline = speedup(record.value, baseline_value=self.baseline.value)
        self.context.observer.plan_finished(
            LaunchRecord(
                label=str(trial.number),
                plan=trial.plan,
                outcome=record.outcome,
                reason=record.reason,
                iteration_s=record.iteration_s,
                tokens_per_s=record.tokens_per_s,
                versus_baseline=versus_baseline,
                drift=record.drift,
            )
        )


def supersede_part(
    launches: Sequence[TrialLaunch], *, folders: Sequence[Path], launcher: TrialLauncher
) -> int:
    """Let the measurements in `folders` count no more where earlier sessions made only a part of `launches`.

    Launches that are compared are of one session: the machine may differ by now. Returns the number of
    folders whose measurement counted.
    """
    if not folders or all(launcher.recorded(launch) is not None for launch in launches):
        return 0
    launcher.context.fence()
    return sum(map(launcher.context.backend.supersede, folders))


def record_of(
    plan: Plan,
    result: TrialResult,
    *,
    objective: Objective,
    drift: float = 1.0,
    node_slowdowns: dict[str, float] | None = None,
) -> TrialRecord:
    """The record that the study keeps of a result; not for cancelled trials or faults of the harness.

    `drift` is the machine's, see `TrialLaunch`; `node_slowdowns` are of the nodes that were slow in it.
    """
    common = TrialRecord(
        verdict=VERDICTS[result.outcome],
        outcome=result.outcome.value,
        reason=result.reason,
        attempt_id=result.attempt_id,
        peak_memory_bytes=result.peak_memory_bytes,
        untracked_memory_bytes=result.untracked_memory_bytes or 0,
        wall_s=result.wall_s,
        drift=drift,
        node_slowdowns=node_slowdowns,
    )
    if result.is_measured:
        measured = replace(
            common,
            num_iterations=len(result.iteration_s),
            spread=spread_of(result.iteration_s),
            is_cut=result.is_cut,
        )
        return measured.scored(score(plan, iteration_s=result.iteration_s), objective=objective)
    if result.outcome in (Outcome.INFEASIBLE, Outcome.NOT_AS_PLANNED):
        return replace(common, excess=float(result.memory_excess_bytes) or REFUSED_EXCESS)
    return replace(common, excess=1.0 if result.outcome is Outcome.WRONG else 0.0)
