"""Reads a run back, while it runs or after: from its folder, and from its study where that is asked for.

Nothing is written and no lease is taken. A file that cannot be read costs its trial's row that much and is
named in `faults`; only a folder that is no run, or a study that is damaged, is an error.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from quartet_plugin.errors import ConfigError, QuartetError
from quartet_plugin.model.axis_gains import read_axis_gains
from quartet_plugin.model.history import Finalist, LaunchSeconds, RunHistory, RunningLaunch, TrialRow
from quartet_plugin.model.launch import Phase
from quartet_plugin.model.measurement import Objective, read_regret
from quartet_plugin.model.plan import NodeInfo, Plan, read_plan
from quartet_plugin.model.shape_curve import read_shape_curve
from quartet_plugin.model.training_job import TrainingJob, parse_training_job
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord, score
from quartet_plugin.protocol.masking import masked_argv
from quartet_plugin.space.features import locked_axes
from quartet_plugin.space.plan_space import baseline_plan
from quartet_plugin.study.tune_study import labels_of
from quartet_plugin.study.view import StudyView
from quartet_plugin.trial.attempt import PREFIX, read_result
from quartet_plugin.trial.request import Outcome, TrialResult
from quartet_plugin.tuner.attempts import AttemptState, holder_of, read_launch, workers_of
from quartet_plugin.tuner.finalists import BASELINE, first_rounds_of, is_failure, rank
from quartet_plugin.tuner.history_rows import (
    baseline_note_of,
    drift_checks_of,
    expected_improvements_of,
    limits_of,
    objective_by_events,
    read_events,
    seconds_of_sessions,
    slow_nodes_of,
    state_of,
    time_left_of,
    with_events,
    with_record,
)
from quartet_plugin.tuner.run_folder import TuningRun, begun_run
from quartet_plugin.tuner.trial_backend import nodes_of
from quartet_plugin.tuner.trial_launcher import VERDICTS

_NoTrialPhase = Literal["cropped", "control", "parity"]


def read_history(path: Path, *, study: StudyView | None = None) -> RunHistory:
    """The run in `path`, with what `study` adds.

    Raises ConfigError where `path` is no run, or its config.json is damaged.
    """
    return _Reader(open_run(path), study=study).read()


def open_run(path: Path) -> TuningRun:
    """The run in `path` as it was begun. Raises ConfigError where there is none."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such run; name a folder that `quartet tune` wrote")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path}: no run: it has no config.json; name a folder that `quartet tune` wrote")
    return begun_run(path, config=None, command=None)


class _Reader:
    """Puts a history together."""

    def __init__(self, run: TuningRun, *, study: StudyView | None) -> None:
        self._run = run
        self._study_rows = {row.number: row for row in study.rows} if study else {}
        self._objective = study.objective if study else None
        self._now = time.time()
        self._events = read_events(run.folder.events_file)
        self._holder = holder_of(run.folder.path, now=self._now)
        self._workers = workers_of(run.folder.path, now=self._now)
        self._state = state_of(
            self._events,
            is_held=self._holder is not None,
            is_alive=self._holder.is_alive if self._holder else None,
        )
        self._faults: list[str] = []
        self._job: TrainingJob | None = None
        self._nodes: tuple[NodeInfo, ...] = ()
        self._baseline: Plan | None = None
        self._finals: dict[int, dict[int, AttemptState]] = {}

    def read(self) -> RunHistory:
        """See `read_history`."""
        launches = {
            int(path.name): read_launch(path, faults=self._faults)
            for path in sorted(self._run.folder.trials.glob("[0-9]*"))
            if path.name.isdecimal() and path.is_dir()
        }
        self._open_baseline(launches.get(BASELINE))
        self._read_finals()
        finished = {number for number, row in self._study_rows.items() if row.is_finished}
        numbers = sorted(set(launches) | finished)
        rows = [self._row(number, launches.get(number)) for number in numbers]
        if not self._study_rows:
            rows = with_events(rows, self._events)
        rows = self._with_predictions(rows)
        running = [
            *(
                self._running(launch, number=number, phase="baseline" if number == BASELINE else "search")
                for number, launch in launches.items()
            ),
            *(
                self._running(launch, number=number, phase="final", round_index=index)
                for number, rounds in self._finals.items()
                for index, launch in rounds.items()
            ),
            *(self._launch_of_no_trial(phase) for phase in get_args(_NoTrialPhase)),
        ]
        return self._history(tuple(rows), running=tuple(filter(None, running)) if self._goes_on else ())

    @property
    def _goes_on(self) -> bool:
        return self._state in ("running", "elsewhere")

    def _history(self, rows: tuple[TrialRow, ...], *, running: tuple[RunningLaunch, ...]) -> RunHistory:
        run, events, config = self._run, self._events, self._run.config
        spent = [
            row
            for row in rows
            if row.number != BASELINE
            and row.verdict not in ("", "lost")
            and row.repeats is None
            and row.source is None
        ]
        begins = [event["time"] for event in events if event["kind"] == "begin"]
        ends = [event["time"] for event in events if event["kind"] == "end"]
        latest = float(events[-1]["time"]) if events else self._now
        until = self._now if self._goes_on else latest
        features = self._job.features if self._job else ()
        locked = locked_axes(features, change_class=config.search.change_class)
        launch_s, launch_parts = self._launch_seconds()
        objective = self._objective or objective_by_events(rows, asked=config.study.objective)
        return RunHistory(
            baseline_note=baseline_note_of(events),
            name=run.name,
            path=str(run.folder.path),
            cwd=str(run.cwd),
            command=tuple(masked_argv(run.command)),
            config=config.model_dump(mode="json"),
            quartet_version=self._version(),
            storage=run.storage.shown,
            state=self._state,
            holder=self._holder,
            running=running,
            began_at=begins[0] if begins else None,
            ended_at=ends[-1] if ends and self._state == "finished" else None,
            elapsed_s=max(0.0, until - begins[-1]) if begins else 0.0,
            time_left_s=time_left_of(events, now_s=self._now) if self._state == "running" else None,
            num_asked=config.study.trials,
            num_spent=len(spent),
            objective=objective,
            nodes=self._nodes,
            features=features,
            precision=self._job.product_precision if self._job else "bf16",
            neutralised=self._job.neutralised if self._job else (),
            locked={axis.value: feature for axis, feature in locked.items()},
            trials=tuple(self._valued(row, objective=objective) for row in rows),
            finalists=self._finalists(objective=objective),
            winner=self._read_if_there(read_plan, self._run.folder.best_plan),
            faults=tuple(self._faults),
            drift_checks=drift_checks_of(events),
            limits=limits_of(events),
            slow_nodes=slow_nodes_of(events),
            workers=self._workers if self._goes_on else (),
            regret=self._read_if_there(read_regret, self._run.folder.best_regret),
            axis_gains=self._read_if_there(read_axis_gains, self._run.folder.best_axes),
            shape_curve=self._read_if_there(read_shape_curve, self._run.folder.best_shapes),
            launch_s=launch_s,
            launch_parts=launch_parts,
            search_s=seconds_of_sessions(events, until_s=until),
        )

    def _launch_seconds(self) -> tuple[float, LaunchSeconds]:
        """The seconds of every finished, readable launch, by phase."""
        folder, launch_s, parts = self._run.folder, 0.0, LaunchSeconds()
        places = (
            folder.trials,
            folder.depth_proxies,
            folder.drift_checks,
            folder.final,
            folder.full_size,
            folder.parity,
        )
        for place in places:
            for attempt in place.glob(f"*/{PREFIX}*"):
                with contextlib.suppress(QuartetError):
                    result = read_result(attempt)
                    if result is None:
                        continue
                    launch_s += result.wall_s
                    parts = replace(
                        parts,
                        num_warm=parts.num_warm + (result.start == "warm"),
                        num_cold=parts.num_cold + (result.start == "cold"),
                        num_measured=parts.num_measured + result.is_measured,
                        num_unstable=parts.num_unstable + (result.outcome is Outcome.UNSTABLE),
                    )
                    if place == folder.parity:
                        parts = replace(parts, gate_s=parts.gate_s + result.wall_s)
                        continue
                    parts = replace(
                        parts,
                        gate_s=parts.gate_s + result.compared_s,
                        warmup_s=parts.warmup_s + max(0.0, result.warmup_s - result.compared_s),
                        measured_s=parts.measured_s + sum(result.iteration_s),
                    )
        return launch_s, parts

    # Trial 0

    def _open_baseline(self, launch: AttemptState | None) -> None:
        result = launch.result if launch else None
        if launch is None or result is None or result.job is None:
            return
        try:
            self._job = parse_training_job(result.job, where=str(result.folder))
            self._nodes = nodes_of(launch.reports)
            self._baseline = baseline_plan(
                self._job, nodes=self._nodes, run=self._run.name, seed=self._run.config.study.seed
            )
        except QuartetError as error:
            self._faults.append(str(error))

    def _version(self) -> str:
        from quartet_plugin.model.files import read_json

        content = read_json(self._run.folder.config_file)
        return str(content.get("quartet_version", "")) if isinstance(content, dict) else ""

    # Rows

    def _row(self, number: int, launch: AttemptState | None) -> TrialRow:
        row = TrialRow(number=number) if launch is None else launch.row(number)
        if number == BASELINE and row.plan is None:
            row = replace(row, plan=self._baseline)
        result = launch.result if launch else None
        if result is not None:
            row = replace(row, verdict=VERDICTS.get(result.outcome, "lost"))
        elif launch is not None:
            row = replace(row, is_running=self._goes_on)
        if row.plan is not None:
            row = replace(row, labels=labels_of(row.plan))
        in_study = self._study_rows.get(number)
        return row if in_study is None else with_record(row, in_study)

    def _valued(self, row: TrialRow, *, objective: str) -> TrialRow:
        """The row with its objective, which is known once all rows are read."""
        if row.plan is None or row.iteration_s is None:
            return row
        scored = score(row.plan, iteration_s=row.iterations_s or (row.iteration_s,))
        value = scored.tokens_per_s if objective == "tokens_per_s" else scored.model_flops_per_s_per_device
        return replace(
            row,
            value=row.value if row.value is not None else value,
            tokens_per_s=scored.tokens_per_s,
            model_flops_per_s_per_device=scored.model_flops_per_s_per_device,
        )

    def _with_predictions(self, rows: list[TrialRow]) -> list[TrialRow]:
        """The rows with predicted seconds per iteration; a relative cost is for equal model FLOPs."""
        baseline = next((row for row in rows if row.number == BASELINE), TrialRow(number=BASELINE))
        baseline_s = baseline.iteration_s
        baseline_flops = baseline.plan.shape.model_flops_per_sequence if baseline.plan else None
        improvements = expected_improvements_of(self._events)
        predicted = []
        for row in (replace(row, expected_improvement=improvements.get(row.number)) for row in rows):
            prediction = row.plan.prediction if row.plan is not None else None
            if prediction is None or row.plan is None:
                predicted.append(row)
                continue
            predicted_s = prediction.iteration_s
            if predicted_s is None and prediction.relative_cost and baseline_flops and baseline_s:
                work = row.plan.shape.model_flops_per_sequence / baseline_flops
                predicted_s = prediction.relative_cost * baseline_s * work
            if predicted_s is not None:
                predicted_s /= row.drift  # it was for the machine as it was at the start
            predicted.append(
                replace(
                    row,
                    predicted_iteration_s=predicted_s,
                    predicted_memory_bytes=prediction.peak_memory_bytes,
                )
            )
        return predicted

    # The final rounds

    def _read_finals(self) -> None:
        """Read `_finals[number][round]`, rounds counted from 0."""
        for number, rounds in self._run.folder.final_launches().items():
            self._finals[number] = {
                index: read_launch(path, faults=self._faults) for index, path in rounds.items()
            }

    def _finalists(self, *, objective: Objective) -> tuple[Finalist, ...]:
        if self._baseline is None:
            return ()
        results: dict[int, dict[int, TrialResult]] = {
            number: {
                index: state.result
                for index, state in rounds.items()
                if state.result and state.result.is_measured
            }
            for number, rounds in self._finals.items()
        }
        failed = {
            number: index
            for number, rounds in self._finals.items()
            for index, state in rounds.items()
            if state.result and is_failure(number, state.result)
        }
        trials = []
        for number, per in self._finals.items():
            plan = next((launch.plan for launch in per.values() if launch.plan), None)
            if number != BASELINE and plan is not None:
                record = TrialRecord(verdict="measured", outcome="OK", reason="", attempt_id="")
                trials.append(FinishedTrial(number=number, plan=plan, record=record))
        # They have a plan where one stands in for the user's command.
        baseline_launches = self._finals.get(BASELINE, {}).values()
        rankings = rank(
            trials,
            baseline=next((launch.plan for launch in baseline_launches if launch.plan), self._baseline),
            launches=results,
            objective=objective,
            seed=self._run.config.study.seed,
            num_asked=self._run.config.study.rounds,
            failed=failed,
            first_rounds=first_rounds_of(self._events, launched=self._finals),
        )
        return tuple(
            Finalist(number=ranking.trial.number, comparison=ranking.comparison) for ranking in rankings
        )

    def _read_if_there[Content](self, read: Callable[[Path], Content], path: Path) -> Content | None:
        if not path.exists():
            return None
        try:
            return read(path)
        except QuartetError as error:
            self._faults.append(str(error))
            return None

    # Running launches

    def _launch_of_no_trial(self, phase: "_NoTrialPhase") -> RunningLaunch | None:
        """The latest launch that belongs to no trial, where it runs."""
        folders = [path.parent for path in (self._run.folder.path / phase).glob("*/attempt-*")]
        latest = max(folders, key=lambda path: path.stat().st_mtime_ns, default=None)
        if latest is None:
            return None
        return self._running(read_launch(latest, faults=self._faults), number=BASELINE, phase=phase)

    def _running(
        self, launch: AttemptState, *, number: int, phase: Phase, round_index: int | None = None
    ) -> RunningLaunch | None:
        if launch.result is not None or launch.began_at is None:
            return None
        return RunningLaunch(
            number=number,
            stage=phase,
            round_number=round_index,
            attempt=launch.attempt,
            phase=launch.phase,
            iteration=launch.iteration,
            num_iterations=launch.num_iterations,
            elapsed_s=max(0.0, self._now - launch.began_at),
            worker=next(
                (worker.name for worker in self._workers if phase == "search" and worker.trial == number), ""
            ),
        )
