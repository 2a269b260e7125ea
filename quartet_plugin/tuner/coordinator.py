"""The coordinator: the one process that asks the study, has plans launched, and writes the study's records.

Trial 0 is the user's command, untouched. Its report opens the space; the study spends the trials; the
best plans and the baseline are measured again in turns. Every measurement is on disk before the study gets
it, by trial and attempt, so a killed coordinator resumes as if it had not been.
"""

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from quartet_plugin.errors import QuartetError, StorageError
from quartet_plugin.launchers.device_slices import DeviceSlice
from quartet_plugin.launchers.local import resolve_device
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial, objective_of, score
from quartet_plugin.protocol.work_queue_files import WorkerRequirement, worker_name
from quartet_plugin.space.plan_space import Space
from quartet_plugin.study.study_log import StudyLog
from quartet_plugin.study.tune_study import TuneStudy
from quartet_plugin.trial.request import Timeouts, TrialResult
from quartet_plugin.tuner.axis_gains import axis_gains_of
from quartet_plugin.tuner.baseline_space import check_baseline, open_space
from quartet_plugin.tuner.compared_trials import (
    ComparedTrials,
    baseline_start,
    discard_weights,
    launch_baseline,
)
from quartet_plugin.tuner.context import TuningContext
from quartet_plugin.tuner.depth_proxy import depth_proxy_for
from quartet_plugin.tuner.drift import DriftMonitor
from quartet_plugin.tuner.earlier_run import EarlierMeasurements, read_earlier_measurements
from quartet_plugin.tuner.final_rounds import (
    FinalRounds,
    finalist_words,
    most_iterations,
    proven_finalists,
    winner_of,
)
from quartet_plugin.tuner.finalists import BASELINE
from quartet_plugin.tuner.full_size import FullSizeNodes, full_size_study
from quartet_plugin.tuner.launches_left import launches_left
from quartet_plugin.tuner.memory_limit import LimitedBackend, above_limit, stand_in_of
from quartet_plugin.tuner.parity import ParityKeeper
from quartet_plugin.tuner.proposer import kept_machine, predictor_of, proposer_of
from quartet_plugin.tuner.regret import regret_of
from quartet_plugin.tuner.sequential_search import SequentialSearch
from quartet_plugin.tuner.shape_curve import shape_curve_of
from quartet_plugin.tuner.slow_nodes import NodeMonitor
from quartet_plugin.tuner.study_remake import with_folders, with_remake
from quartet_plugin.tuner.time_share import iterations_in_time
from quartet_plugin.tuner.trial_backend import read_judged
from quartet_plugin.tuner.trial_launcher import BaselineScore, TrialLaunch, TrialLauncher, record_of
from quartet_plugin.tuner.tune_result import TuneResult
from quartet_plugin.tuner.winner_choice import choice_of
from quartet_plugin.tuner.workers.dispatcher import Dispatcher
from quartet_plugin.tuner.workers.parallel_search import ParallelSearch
from quartet_plugin.tuner.workers.work_queue import WorkQueue
from quartet_plugin.tuner.workers.worker_pool import WorkerPool, end_earlier

_OTHER_MODELS = (
    "models of several shapes are compared: a speedup is in model FLOP/s per device; "
    "s/iteration and tokens/s are each model's own"
)


class Coordinator:
    """Runs one tuning run, from its baseline to its winner.

    `earlier_run` is the folder of another run, whose measurements a study that begins is given. With `slices`
    of this host trials run at the same time, a worker on each (docs/workers.md). `make_room` frees the
    reserved disk space. `full_size` is how launches at full size start where trials have fewer
    replicas, or why none can.
    """

    def __init__(
        self,
        context: TuningContext,
        *,
        earlier_run: Path | None = None,
        slices: tuple[DeviceSlice, ...] = (),
        make_room: Callable[[], None] = lambda: None,
        full_size: FullSizeNodes | str = "no nodes are given for it",
    ) -> None:
        limit_bytes = kept_machine(context.run.folder).memory_limit_bytes
        if limit_bytes is not None:
            context = replace(context, backend=LimitedBackend(context.backend, limit_bytes))
        self._limit_bytes = limit_bytes
        self._context = context
        self._run = context.run
        self._config = context.run.config.study
        self._say = context.observer.message
        self._earlier_run = earlier_run
        self._make_room = make_room
        self._slices = slices
        self._full_size = full_size

    def tune(self) -> TuneResult:
        """The result of the whole run.

        Raises InfrastructureError when the user's command fails or trials cannot be run, SeamError where
        the plugin does not fit the framework, InfeasibleError when nothing fits, InterruptedByUserError when
        asked to stop, StorageError when the folder or the study fails.
        """
        try:
            return self._tune()
        except StorageError as error:
            self._make_room()
            with contextlib.suppress(QuartetError, OSError):
                self._context.fence()  # another tuner may have the run meanwhile
                self._context.events.add("storage", reason=str(error))
            raise
        finally:
            discard_weights(self._context)

    def _tune(self) -> TuneResult:
        context, folder = self._context, self._run.folder
        context.events.add("begin", run=self._run.name)
        in_work = end_earlier(WorkQueue(folder=folder.path), keeps_joined=bool(self._slices))
        parts = (folder.trials, folder.depth_proxies, folder.drift_checks, folder.final, folder.parity)
        for path in (*parts, folder.full_size):
            context.backend.recover(path, should_stop=context.should_stop, skip=in_work)
        self._open_work_queue()
        deadline_s = self._run.config.trial.deadline_s
        is_cold = resolve_device(self._run.config.device, environment=os.environ) == "cuda"
        first = TrialLauncher(
            context=context,
            baseline=None,
            timeouts=Timeouts.cold(deadline_s) if is_cold else Timeouts.within(deadline_s),
            node_monitor=NodeMonitor(context=context),
        )
        launch = TrialLaunch(
            number=BASELINE,
            label=str(BASELINE),
            plan=None,
            folder=folder.trial(BASELINE),
            phase="baseline",
            start=baseline_start(context),
        )
        result = launch_baseline(first, launch, num_left=launches_left(self._config, num_tried=0) + 1)
        check_baseline(context, result)
        space = open_space(context, result)
        baseline = BaselineScore(
            plan=space.baseline,
            score=score(space.baseline, iteration_s=result.iteration_s),
            objective=objective_of(
                self._config.objective, num_shapes=len({space.baseline.shape, *space.shapes})
            ),
            is_within_memory=self._limit_bytes is None or result.peak_memory_bytes <= self._limit_bytes,
        )
        if not baseline.is_within_memory:
            self._show_excess(result)
        if baseline.objective == "model_flops_per_s_per_device":
            self._say(_OTHER_MODELS)
        timeouts = Timeouts.within(deadline_s).learned(
            start_s=result.start_s, first_step_s=result.first_step_s
        )
        context.budget.share()
        asked = len(result.iteration_s)
        num_measured: int | None = iterations_in_time(
            asked, iteration_s=baseline.score.iteration_s, budget=context.budget
        )
        if num_measured is not None and num_measured < asked:
            context.budget.expect_shorter((asked - num_measured) * baseline.score.iteration_s)
            self._say(f"--max-minutes is short: trials measure {num_measured} iterations instead of {asked}")
        else:
            num_measured = None
        launcher = TrialLauncher(
            context=context,
            baseline=baseline,
            timeouts=timeouts,
            node_monitor=first.node_monitor,
            num_measured=num_measured,
            longest_begin_s=result.start_s + result.first_step_s,
            modules=context.backend.modules(result),
            cold_reason=first.cold_reason,
        )
        launcher.show(launch, result)
        compared = ComparedTrials.open(
            context, baseline=space.baseline, result=result, is_sequential=not self._slices
        )
        parity = ParityKeeper.open(context, job=space.job, compared=compared)
        launcher.judge = parity.judged
        tuned = self._search(space, result, launcher=launcher, baseline=baseline, parity=parity)
        context.events.add(
            "end",
            winner=None if tuned.winner is None else tuned.winner.trial.number,
            runner_up=None if tuned.choice is None else tuned.choice.runner_up,
            chance_better=None if tuned.choice is None else tuned.choice.chance_better,
            out_of_time=context.budget.was_short,
        )
        return tuned

    def _search(
        self,
        space: Space,
        result: TrialResult,
        *,
        launcher: TrialLauncher,
        baseline: BaselineScore,
        parity: ParityKeeper,
    ) -> TuneResult:
        """Spend the study and run the final rounds; `result` is the baseline's."""
        context = self._context
        study = self._open_study(space, result, launcher=launcher, baseline=baseline)
        proposer = proposer_of(space, run=self._run, objective=baseline.objective)
        predictor = (
            predictor_of(space, run=self._run, machine=kept_machine(self._run.folder))
            if proposer is None
            else proposer.predictor
        )
        search = SequentialSearch(
            context=context,
            space=space,
            baseline=baseline,
            study=study,
            launcher=launcher,
            parity=parity,
            drift_monitor=DriftMonitor(context=context, launcher=launcher, baseline=baseline),
            predictor=predictor,
            proposer=proposer,
            depth_proxy=depth_proxy_for(
                space,
                result,
                context=context,
                launcher=launcher,
                baseline=baseline,
                proposer=proposer,
                is_sequential=not self._slices,
            ),
        )
        try:
            parity.restore(study.trials())
            if len(space.nodes) > 1 or any(part.num_nodes for part in self._slices):
                search.restore_nodes(study.trials())
            self._say(self._with_workers(search).spend() if self._slices else search.spend())
            baseline_trial, *others = study.trials()
            # Those of an earlier process come without a prediction.
            trials = [
                baseline_trial,
                *(replace(trial, plan=search.with_relative_cost(trial.plan)) for trial in others),
            ]
        finally:
            study.close()
        ranked = search.best_trials(trials)
        full_size = full_size_study(
            context, space, nodes=self._full_size, predictor=None if proposer is None else proposer.predictor
        )
        if full_size is not None:
            ranked = full_size.ranked(ranked, trials=trials)
        stand_in = None if baseline.is_within_memory else self._stand_in(ranked, command=baseline.plan)
        if stand_in is not None:
            ranked = [trial for trial in ranked if trial.number != stand_in.number]
            plan = stand_in.plan
            baseline = replace(baseline, plan=plan, launched_plan=plan)
        finalists = proven_finalists(ranked, context=context, parity=parity)
        selection = self._show_finalists(
            [trial for trial in ranked if trial in finalists or parity.refusal_of(trial.plan) is None],
            finalists=finalists,
            means=None if full_size is not None else search.posterior_means(trials),
            baseline=baseline,
        )
        if self._run.config.trial.measure == "auto":
            launcher.num_measured_finally = most_iterations(trials, finalists=finalists)
        rankings = FinalRounds(context=context, launcher=launcher, baseline=baseline).measure(finalists)
        rankings = rankings if full_size is None else full_size.in_order(rankings)
        winner = winner_of(rankings)
        choice = (
            choice_of(rankings, seed=self._config.seed) if full_size is None else full_size.choice(rankings)
        )
        at_full_size = None
        if full_size is not None and winner is not None:
            at_full_size = full_size.winner(winner, baseline=baseline, launcher=launcher)
        tuned = TuneResult(
            objective=baseline.objective,
            seed=self._config.seed,
            baseline=baseline.plan,
            trials=tuple(trials),
            rankings=tuple(rankings),
            winner=winner,
            choice=None if choice is None else replace(choice, selection=selection or None),
            receipt=None if winner is None else parity.receipt_of(winner.trial.plan),
            drift_checks=tuple(search.drift_monitor.measurements),
            stand_in=stand_in,
            full_size=at_full_size,
        )
        return replace(
            tuned,
            regret=regret_of(space, tuned, predictor=predictor, proposer=proposer),
            axis_gains=axis_gains_of(space, tuned, proposer=proposer),
            shape_curve=shape_curve_of(space, tuned, proposer=proposer),
        )

    def _show_finalists(
        self,
        ranked: list[FinishedTrial],
        *,
        finalists: list[FinishedTrial],
        means: dict[int, float] | None,
        baseline: BaselineScore,
    ) -> str:
        """Say, log and return the finalists, their rank values and the next plan.

        `means` is None at full size.
        """
        values = {trial.number: trial.record.value for trial in ranked if trial.record.value is not None}
        speedups: dict[int, float] = {}
        rank_words = "the predicted throughput with all replicas"
        if means is not None:
            rank_words = "the speedup fitted to all measurements" if means else "their trials' speedup"
            reference = means.get(BASELINE, baseline.value)
            speedups = {number: value / reference for number, value in {**values, **means}.items()}
        words = finalist_words(ranked, finalists=finalists, speedups=speedups, rank_words=rank_words)
        if words:
            self._say(words)
        self._context.events.add(
            "finalists",
            trials=[trial.number for trial in finalists],
            ranked=[{"trial": trial.number, "speedup": speedups.get(trial.number)} for trial in ranked],
        )
        return words

    # A command that does not fit

    def _show_excess(self, result: TrialResult) -> None:
        """Say and log that the user's command is above the memory limit."""
        assert self._limit_bytes is not None
        peak_bytes = result.peak_memory_bytes
        self._say(
            f"your command does not fit: {above_limit(peak_bytes, self._limit_bytes)}; "
            "the best stock plan that fits becomes the baseline"
        )
        self._context.events.add("over-limit", peak_bytes=peak_bytes, limit_bytes=self._limit_bytes)

    def _stand_in(self, ranked: list[FinishedTrial], *, command: Plan) -> FinishedTrial | None:
        """The trial whose plan is the baseline of the final rounds; said and logged."""
        stand_in = stand_in_of(ranked, command=command)
        if stand_in is None:
            self._say("no stock plan that fits was measured; plans are compared with your command")
            return None
        self._say(f"the baseline is the best stock plan that fits, trial {stand_in.number}")
        self._context.events.add("stand-in", trial=stand_in.number)
        return stand_in

    # Workers

    def _open_work_queue(self) -> None:
        """Let workers come, where there are to be any."""
        if not self._slices:
            return
        first = self._slices[0]
        offer = WorkerRequirement(device=first.device, num_devices=first.num_devices)
        WorkQueue(folder=self._run.folder.path).open(offer)
        labels = "; ".join(dict.fromkeys(part.label for part in self._slices))
        self._say(f"workers on this host: {len(self._slices)}, on {labels}")
        if len(self._slices) > 1 and first.device == "cpu" and not first.num_nodes:
            self._say(
                "workers on one machine share its memory bandwidth: times are noisier than those of one "
                "alone; the baseline and the final rounds are measured alone"
            )

    def _with_workers(self, search: SequentialSearch) -> ParallelSearch:
        """The same search with a worker on each slice."""
        context, queue = self._context, WorkQueue(folder=self._run.folder.path)
        dispatcher = Dispatcher(
            queue=queue,
            backend=context.backend,
            read=self._read,
            fence=context.fence,
            say=self._say,
            events=context.events,
        )
        names = tuple(worker_name(socket.gethostname(), os.getpid(), part.index) for part in self._slices)
        pool = WorkerPool(
            queue=queue, command=context.command.words, slices=self._slices, names=names, say=self._say
        )
        return ParallelSearch(search=search, dispatcher=dispatcher, pool=pool)

    def _read(self, attempt: Path) -> TrialResult | None:
        """A worker's result, under the memory limit."""
        result, backend = read_judged(attempt), self._context.backend
        if result is None or not isinstance(backend, LimitedBackend):
            return result
        return backend.judged(result)

    # The study

    def _open_study(
        self, space: Space, result: TrialResult, *, launcher: TrialLauncher, baseline: BaselineScore
    ) -> TuneStudy:
        """The run's study: an earlier process's, or a new one with the baseline as trial 0."""
        config = self._config
        storage = replace(
            self._run.storage,
            say=self._say,
            should_stop=self._should_stop_waiting,
        )
        is_self_contained = self._earlier_run is None and not self._slices
        storage, log = with_remake(storage, self._run.folder, is_self_contained=is_self_contained)
        study = TuneStudy.open(storage, space=space, seed=config.seed, sampler=config.sampler)
        if study is not None and log is not None and study.lacks(log):
            study.close()
            storage.put_aside("is missing finished trials")
            study = None
        if study is not None:
            self._say(storage.tool_line)
            self._show_finished(study.trials(), launcher=launcher)
            return study
        if log is not None:
            log = with_folders(log, self._run.folder, space=space)
        earlier = self._earlier_measurements_of(log, space=space, baseline=baseline)
        study = TuneStudy.create(
            storage,
            space=space,
            seed=config.seed,
            objective=baseline.objective,
            baseline=record_of(
                space.baseline,
                result,
                objective=baseline.objective,
                node_slowdowns=launcher.node_monitor.slowdowns_in(result),
            ),
            starts=earlier.starts,
            earlier_trials=earlier.trials,
            sampler=config.sampler,
            log=log,
        )
        if num_unknown := study.num_unknown:
            self._say(
                f"{num_unknown} trials are skipped: their plan is in neither events.jsonl nor their folder"
            )
        self._say(storage.tool_line)
        if log is not None:
            self._show_finished([t for t in study.trials() if t.number in log.trials], launcher=launcher)
        return study

    def _show_finished(self, trials: list[FinishedTrial], *, launcher: TrialLauncher) -> None:
        """Show the trials that an earlier tuner had launched, and count their seconds."""
        for trial in trials:
            if trial.record.repeats is None and trial.record.source is None:
                self._context.budget.add(trial.record.wall_s)
                if trial.number != BASELINE:
                    launcher.show_finished(trial)

    def _earlier_measurements_of(
        self, log: StudyLog | None, *, space: Space, baseline: BaselineScore
    ) -> EarlierMeasurements:
        """The measurements that the study begins with: those that it began with before, or another run's."""
        if log is not None and log.earlier_trials is not None:
            return EarlierMeasurements(trials=log.earlier_trials, starts=log.starts)
        if self._earlier_run is None:
            return EarlierMeasurements()
        earlier = read_earlier_measurements(
            self._earlier_run, space=space, baseline=baseline.score, objective=baseline.objective
        )
        trials = [{"params": params, "record": asdict(record)} for params, record in earlier.trials]
        self._context.events.add("from", run=str(self._earlier_run), trials=trials, starts=earlier.starts)
        self._say(earlier.words)
        return earlier

    def _should_stop_waiting(self) -> bool:
        """Asked while the study's server is lost: the run is kept meanwhile, or given up where taken."""
        self._context.fence()
        return self._context.should_stop()
