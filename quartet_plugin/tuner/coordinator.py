"""The coordinator: the one process that asks the study, has plans launched, and tells what came of them.

Trial 0 is the user's own command, untouched. Its report opens the space; the study spends the trials; the
best plans and the baseline are measured again in turns. Whatever was measured is on disk before the study
is told, and telling is by trial and attempt, so a killed coordinator resumes as if it had not been.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from quartet_plugin.cost.relative_cost import relative_cost
from quartet_plugin.errors import InfrastructureError, QuartetError, SeamError, StorageError
from quartet_plugin.launchers.command import Command
from quartet_plugin.launchers.device_slices import DeviceSlice
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.launch import Observer
from quartet_plugin.model.measurement import Objective
from quartet_plugin.model.plan import NodeInfo, Plan
from quartet_plugin.model.receipt import Receipt
from quartet_plugin.model.regret import Regret
from quartet_plugin.model.schema import dump
from quartet_plugin.model.score import objective_of, score
from quartet_plugin.model.training_job import TrainingJob, parse_training_job
from quartet_plugin.model.trial_record import FinishedTrial
from quartet_plugin.space.features import Axis, batching_features
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.study.tune_study import TuneStudy
from quartet_plugin.trial.request import Outcome, TrialResult
from quartet_plugin.tuner.depth_proxy import depth_proxy_for
from quartet_plugin.tuner.drift import DriftMeasurement, DriftMonitor
from quartet_plugin.tuner.earlier_run import Prior, read_prior
from quartet_plugin.tuner.events import EventLog
from quartet_plugin.tuner.final_rounds import FinalRounds, winner_of
from quartet_plugin.tuner.finalists import BASELINE, FinalistResult, candidates
from quartet_plugin.tuner.launches import Launches, ShouldStop, read_judged
from quartet_plugin.tuner.parity import ParityKeeper
from quartet_plugin.tuner.proposer import proposer_of
from quartet_plugin.tuner.regret import FinishedSearch, regret_of
from quartet_plugin.tuner.run_folder import TuningRun
from quartet_plugin.tuner.sequential_search import SequentialSearch
from quartet_plugin.tuner.time_budget import TimeBudget
from quartet_plugin.tuner.trial_launcher import BaselineScore, TrialLauncher, record_of
from quartet_plugin.tuner.workers.dispatcher import Dispatcher
from quartet_plugin.tuner.workers.messages import Offer, worker_name
from quartet_plugin.tuner.workers.parallel_search import ParallelSearch
from quartet_plugin.tuner.workers.work_queue import WorkQueue
from quartet_plugin.tuner.workers.worker_pool import WorkerPool, end_earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """What a run found. `winner` is None where nothing beat the baseline.

    `receipt` is the parity gate's for a winner with a schedule of ours, `controls` the baseline's
    re-measurements during the search, `regret` what it may have missed.
    """

    objective: Objective
    baseline: Plan
    trials: tuple[FinishedTrial, ...]
    rankings: tuple[FinalistResult, ...]
    winner: FinalistResult | None
    receipt: Receipt | None = None
    controls: tuple[DriftMeasurement, ...] = ()
    regret: Regret | None = None


class Coordinator:
    """Runs one tuning run, from its baseline to its winner.

    `fence` is called before every write and raises where another tuner has taken the run. `prior` is the
    folder of another run, whose measurements a study that begins is given. With `slices` of this host trials
    run beside each other, a worker on each (docs/workers.md). `make_room` frees disk space that
    was kept for the last words.
    """

    def __init__(
        self,
        run: TuningRun,
        *,
        command: Command,
        launches: Launches,
        observer: Observer,
        should_stop: ShouldStop = lambda: False,
        fence: Callable[[], None] = lambda: None,
        max_minutes: float | None = None,
        prior: Path | None = None,
        slices: tuple[DeviceSlice, ...] = (),
        make_room: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._config = run.config.study
        self._launches = launches
        self._observer = observer
        self._should_stop = should_stop
        self._fence = fence
        self._prior = prior
        self._make_room = make_room
        self._slices = slices
        self._command = command.words
        self._events = EventLog(run.folder.events_file)
        limit_s = None if max_minutes is None else 60.0 * max_minutes
        self._budget = TimeBudget(limit_s=limit_s, clock=clock)
        self._launching = TrialLauncher(
            run,
            command=command,
            launches=launches,
            observer=observer,
            events=self._events,
            should_stop=should_stop,
            fence=fence,
            budget=self._budget,
        )
        self._parity = ParityKeeper(
            run=run,
            command=command,
            launches=launches,
            observer=observer,
            events=self._events,
            should_stop=should_stop,
            fence=fence,
        )
        self._controls = DriftMonitor(
            run=run,
            launches=launches,
            launching=self._launching,
            observer=observer,
            events=self._events,
            budget=self._budget,
        )
        self._search = SequentialSearch(
            run=run,
            launching=self._launching,
            parity=self._parity,
            controls=self._controls,
            events=self._events,
            budget=self._budget,
            fence=fence,
        )

    def tune(self) -> TuneResult:
        """The whole run.

        Raises InfrastructureError when the user's own command fails or trials cannot be run, SeamError where
        the plugin does not fit the framework, InfeasibleError when nothing fits, InterruptedByUserError when
        asked to stop, StorageError when the folder or the study fails.
        """
        try:
            return self._tune()
        except StorageError as error:
            self._leave_last_words(str(error))
            raise

    def _leave_last_words(self, reason: str) -> None:
        """Say why the run ended, where the disk takes it and no other tuner has the run meanwhile."""
        self._make_room()
        with contextlib.suppress(QuartetError, OSError):
            self._fence()
            self._events.add("storage", reason=reason)

    def _tune(self) -> TuneResult:
        self._events.add("begin", run=self._run.name)
        places = self._run.folder
        in_work = end_earlier(WorkQueue(folder=places.path), keeps_joined=bool(self._slices))
        for folder in (places.trials, places.croppings, places.controls, places.final, places.parity):
            self._launches.recover(folder, should_stop=self._should_stop, skip=in_work)
        self._open_board()
        result = self._measure_baseline()
        space = self._open_space(result)
        yardstick = BaselineScore(
            plan=space.baseline,
            score=score(space.baseline, iteration_s=result.iteration_s),
            objective=objective_of(
                self._config.objective, num_shapes=len({space.baseline.shape, *space.shapes})
            ),
        )
        self._launching.yardstick = yardstick
        self._launching.show(str(BASELINE), None, result, stage="baseline")
        try:
            self._parity.open(space.job)
            found = self._spend(space, result, yardstick)
        finally:
            self._parity.close()
        self._events.add("end", winner=None if found.winner is None else found.winner.trial.number)
        return found

    def _spend(self, space: Space, result: TrialResult, yardstick: BaselineScore) -> TuneResult:
        """The study and the final rounds."""
        study = self._open_study(space, result, yardstick)
        proposer = proposer_of(space, run=self._run, objective=yardstick.objective)
        cropping = depth_proxy_for(
            space,
            result,
            run=self._run,
            proposer=proposer,
            is_alone=not self._slices,
            launches=self._launches,
            launching=self._launching,
            observer=self._observer,
            events=self._events,
        )
        self._search = replace(
            self._search, proposer=proposer, cropping=cropping, why_forbidden=space.refusal_of
        )
        try:
            self._parity.restore(study.trials())
            self._observer.message(self._spender().spend(study))
            trials = study.trials()
        finally:
            study.close()
        return self._finish(space, trials, yardstick)

    # Workers

    def _open_board(self) -> None:
        """Let workers come, where there are to be any."""
        if not self._slices:
            return
        first = self._slices[0]
        WorkQueue(folder=self._run.folder.path).open(
            Offer(device=first.device, num_devices=first.num_devices)
        )
        labels = "; ".join(dict.fromkeys(part.label for part in self._slices))
        self._observer.message(f"workers on this host: {len(self._slices)}, on {labels}")
        if len(self._slices) > 1 and first.device == "cpu":
            self._observer.message(
                "workers of one machine share its memory bandwidth: times are noisier than those of one "
                "alone; the baseline and the final rounds are measured alone"
            )

    def _spender(self) -> SequentialSearch | ParallelSearch:
        """What spends the trials: this process alone, or its workers."""
        if not self._slices:
            return self._search
        board, host = WorkQueue(folder=self._run.folder.path), socket.gethostname()
        say = self._observer.message
        desk = Dispatcher(
            board=board,
            launches=self._launches,
            read=read_judged,
            fence=self._fence,
            say=say,
            events=self._events,
        )
        names = tuple(worker_name(host, os.getpid(), part.index) for part in self._slices)
        crew = WorkerPool(board=board, command=self._command, slices=self._slices, names=names, say=say)
        return ParallelSearch(search=self._search, desk=desk, crew=crew, observer=self._observer)

    # Trial 0 and what it opens

    def _measure_baseline(self) -> TrialResult:
        result = self._launching.launch(
            None,
            number=BASELINE,
            folder=self._run.folder.trial(BASELINE),
            label=str(BASELINE),
            stage="baseline",
            num_left=self._search.num_left(tried=0) + 1,
        )
        if result.is_measured and result.job is not None:
            return result
        for line in result.last_lines:
            self._observer.message(f"  | {line}")
        if result.outcome is Outcome.HARNESS:
            raise SeamError(f"your own command could not be measured: {result.reason}")
        advice = "make it run by itself first; nothing is searched"
        if result.outcome is Outcome.INFEASIBLE and result.wall_s >= self._run.config.trial.deadline_s:
            advice = "raise trial.deadline_s, or make it start faster; nothing is searched"
        if result.reason.startswith("hang:"):
            advice = "if it only starts slowly, raise trial.deadline_s; nothing is searched"
        if result.outcome is Outcome.WRONG:
            advice = "the training itself diverges: mend that first; nothing is searched"
        raise InfrastructureError(f"your own command failed: {result.reason}; {advice}")

    def _open_space(self, result: TrialResult) -> Space:
        job = parse_training_job(result.job or {}, where=str(result.folder))
        nodes = self._launches.nodes(result)
        self._write_cluster(nodes)
        search = self._run.config.search
        space = build_space(
            job,
            nodes=nodes,
            search=search,
            run=self._run.name,
            seed=self._config.seed,
            relative_cost=relative_cost,
        )
        self._tell_limits(space, job)
        return space

    def _write_cluster(self, nodes: tuple[NodeInfo, ...]) -> None:
        content = {"schema_version": 1, "nodes": [dump(node) for node in nodes]}
        write_json_atomic(self._run.folder.cluster_file, content)

    def _tell_limits(self, space: Space, job: TrainingJob) -> None:
        """What is not tuned and why, and what trials leave out: never silently."""
        by_feature: dict[str, list[str]] = {}
        for axis, feature in space.locked.items():
            by_feature.setdefault(feature, []).append(axis.value)
        batching = () if space.search.change_class == "C" else batching_features(job.features)
        for feature, axes in by_feature.items():
            more = " (search.change_class: C tunes degrees and micro_batch)" if feature in batching else ""
            self._observer.message(f"{feature} keeps as they are: {', '.join(axes)}{more}")
        if space.no_custom_schedules is not None and Axis.SCHEDULE not in space.locked:
            self._observer.message(f"{space.no_custom_schedules} keeps the framework's own schedules")
        if job.neutralised:
            self._observer.message(f"left out in trials: {', '.join(job.neutralised)}")
        if self._run.config.search.scaling is not None and space.shapes == (job.shape,):
            self._observer.message("scaling: no other shape is inside the tolerance and the band")

    def _open_study(self, space: Space, result: TrialResult, yardstick: BaselineScore) -> TuneStudy:
        config = self._config
        place = replace(self._run.storage, say=self._observer.message, should_stop=self._should_stop_waiting)
        study = TuneStudy.open(
            place, space=space, seed=config.seed, name=self._run.name, sampler=config.sampler
        )
        if study is not None:
            self._observer.message(place.tool_line)
            for trial in study.trials():
                if trial.record.repeats is None and trial.record.source is None:
                    self._budget.add(trial.record.wall_s)
                    if trial.number != BASELINE:
                        self._launching.show_told(trial)
            return study
        prior = Prior()
        if self._prior is not None:
            prior = read_prior(
                self._prior, space=space, baseline=yardstick.score, objective=yardstick.objective
            )
            self._observer.message(prior.words)
        study = TuneStudy.create(
            place,
            space=space,
            seed=config.seed,
            name=self._run.name,
            objective=yardstick.objective,
            baseline=record_of(space.baseline, result, objective=yardstick.objective),
            starts=prior.starts,
            prior=[(one.params, one.record) for one in prior.trials],
            sampler=config.sampler,
        )
        self._observer.message(place.tool_line)
        return study

    def _should_stop_waiting(self) -> bool:
        """Asked while the study's server is lost: the run is kept meanwhile, or given up where taken."""
        self._fence()
        return self._should_stop()

    # The final rounds

    def _finish(self, space: Space, trials: list[FinishedTrial], yardstick: BaselineScore) -> TuneResult:
        rounds = FinalRounds(
            run=self._run, launching=self._launching, budget=self._budget, observer=self._observer
        )
        rankings = rounds.measure(self._proven(trials, yardstick), yardstick=yardstick)
        winner = winner_of(rankings)
        ended = FinishedSearch(
            baseline=yardstick.plan,
            trials=trials,
            rankings=rankings,
            winner=winner,
            objective=yardstick.objective,
            seed=self._config.seed,
        )
        return TuneResult(
            objective=yardstick.objective,
            baseline=yardstick.plan,
            trials=tuple(trials),
            rankings=tuple(rankings),
            winner=winner,
            receipt=None if winner is None else self._parity.receipt_of(winner.trial.plan),
            controls=tuple(self._controls.found),
            regret=regret_of(space, ended, proposer=self._search.proposer),
        )

    def _proven(self, trials: list[FinishedTrial], yardstick: BaselineScore) -> list[FinishedTrial]:
        """The best plans, each of ours checked by itself: what cannot win is not measured again."""
        chosen: list[FinishedTrial] = []
        believed = self._search.posterior_means(trials)
        ranked = candidates(trials, baseline_value=yardstick.value, top_k=len(trials), believed=believed)
        for trial in ranked:
            if len(chosen) == self._config.top_k:
                break
            self._launching.check_stop()
            refusal = self._parity.prove(trial.plan, trial=trial.number)
            if refusal is None:
                chosen.append(trial)
            else:
                self._observer.message(f"trial {trial.number} is out: {refusal.reason}")
                chosen = self._still_in(chosen)
        return chosen

    def _still_in(self, chosen: list[FinishedTrial]) -> list[FinishedTrial]:
        """Without those that had passed before another plan of their kind failed."""
        kept: list[FinishedTrial] = []
        for trial in chosen:
            refusal = self._parity.refusal_of(trial.plan)
            if refusal is None:
                kept.append(trial)
            else:
                self._observer.message(f"trial {trial.number} is out: {refusal.reason}")
        return kept
