"""The coordinator: the one process that asks the study, has plans launched, and writes the study's records.

Trial 0 is the user's command, untouched. Its report opens the space; the study spends the trials; the
best plans and the baseline are measured again in turns. Every measurement is on disk before the study gets
it, by trial and attempt, so a killed coordinator resumes as if it had not been.
"""

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from quartet_plugin.errors import QuartetError, StorageError
from quartet_plugin.launchers.device_slices import DeviceSlice
from quartet_plugin.launchers.local import resolve_device
from quartet_plugin.model.trial_record import score
from quartet_plugin.protocol.work_queue_files import WorkerRequirement, worker_name
from quartet_plugin.space.plan_space import Space
from quartet_plugin.trial.request import Timeouts, TrialResult
from quartet_plugin.tuner.baseline_space import check_baseline, open_space
from quartet_plugin.tuner.compared_trials import (
    ComparedTrials,
    baseline_start,
    discard_weights,
    launch_baseline,
)
from quartet_plugin.tuner.conclusion import Conclusion
from quartet_plugin.tuner.context import TuningContext
from quartet_plugin.tuner.depth_proxy import depth_proxy_for
from quartet_plugin.tuner.drift import DriftMonitor
from quartet_plugin.tuner.early_plans import EarlyPlans
from quartet_plugin.tuner.finalists import BASELINE
from quartet_plugin.tuner.full_size import FullSizeNodes
from quartet_plugin.tuner.launches_left import launches_left
from quartet_plugin.tuner.memory_limit import LimitedBackend, above_limit
from quartet_plugin.tuner.parity import ParityKeeper
from quartet_plugin.tuner.proposer import (
    Proposer,
    kept_machine,
    objective_in,
    predictor_of,
    proposer_of,
)
from quartet_plugin.tuner.sequential_search import SequentialSearch
from quartet_plugin.tuner.slow_nodes import NodeMonitor
from quartet_plugin.tuner.study_opening import StudyOpener
from quartet_plugin.tuner.time_share import iterations_in_time
from quartet_plugin.tuner.trial_backend import read_judged
from quartet_plugin.tuner.trial_launcher import BaselineScore, TrialLaunch, TrialLauncher
from quartet_plugin.tuner.tune_result import TuneResult
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
        self._early = EarlyPlans(context.run)

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
            self._early.stop()
            discard_weights(self._context)

    def _tune(self) -> TuneResult:
        context = self._context
        context.events.add("begin", run=self._run.name)
        self._take_over()
        self._open_work_queue()
        first = self._first_launcher()
        launch = TrialLaunch(
            number=BASELINE,
            label=str(BASELINE),
            plan=None,
            folder=self._run.folder.trial(BASELINE),
            phase="baseline",
            start=baseline_start(context),
        )
        result = launch_baseline(first, launch, num_left=launches_left(self._config, num_tried=0) + 1)
        check_baseline(context, result)
        space, proposer = open_space(context, result, early=self._early)
        baseline = self._baseline_score(space, result)
        launcher = self._trial_launcher(first, result, baseline=baseline)
        launcher.show(launch, result)
        compared = ComparedTrials.open(
            context, baseline=space.baseline, result=result, is_sequential=not self._slices
        )
        parity = ParityKeeper.open(context, job=space.job, compared=compared)
        launcher.judge = parity.judged
        tuned = self._search(
            space,
            result,
            launcher=launcher,
            baseline=baseline,
            parity=parity,
            proposer=proposer or proposer_of(space, run=self._run, objective=baseline.objective),
        )
        context.events.add(
            "end",
            winner=None if tuned.winner is None else tuned.winner.trial.number,
            runner_up=None if tuned.choice is None else tuned.choice.runner_up,
            chance_better=None if tuned.choice is None else tuned.choice.chance_better,
            out_of_time=context.budget.was_short,
        )
        return tuned

    def _take_over(self) -> None:
        """End the launches of an earlier coordinator, but for those that workers who joined have in work."""
        context, folder = self._context, self._run.folder
        in_work = end_earlier(WorkQueue(folder=folder.path), keeps_joined=bool(self._slices))
        parts = (folder.trials, folder.depth_proxies, folder.drift_checks, folder.final, folder.parity)
        for path in (*parts, folder.full_size):
            context.backend.recover(path, should_stop=context.should_stop, skip=in_work)

    # The baseline

    def _first_launcher(self) -> TrialLauncher:
        """The launcher of the user's command, of which no time is known yet."""
        deadline_s = self._run.config.trial.deadline_s
        is_cold = resolve_device(self._run.config.device, environment=os.environ) == "cuda"
        return TrialLauncher(
            context=self._context,
            baseline=None,
            timeouts=Timeouts.cold(deadline_s) if is_cold else Timeouts.within(deadline_s),
            node_monitor=NodeMonitor(context=self._context),
            on_progress=self._early.observe,
        )

    def _baseline_score(self, space: Space, result: TrialResult) -> BaselineScore:
        """What plans are compared with; said where the command does not fit or models differ."""
        baseline = BaselineScore(
            plan=space.baseline,
            score=score(space.baseline, iteration_s=result.iteration_s),
            objective=objective_in(space, run=self._run),
            is_within_memory=self._limit_bytes is None or result.peak_memory_bytes <= self._limit_bytes,
        )
        if not baseline.is_within_memory:
            self._show_excess(result)
        if baseline.objective == "model_flops_per_s_per_device":
            self._say(_OTHER_MODELS)
        return baseline

    def _show_excess(self, result: TrialResult) -> None:
        """Say and log that the user's command is above the memory limit."""
        assert self._limit_bytes is not None
        peak_bytes = result.peak_memory_bytes
        self._say(
            f"your command does not fit: {above_limit(peak_bytes, self._limit_bytes)}; "
            "the best stock plan that fits becomes the baseline"
        )
        self._context.events.add("over-limit", peak_bytes=peak_bytes, limit_bytes=self._limit_bytes)

    def _trial_launcher(
        self, first: TrialLauncher, result: TrialResult, *, baseline: BaselineScore
    ) -> TrialLauncher:
        """The launcher of the trials, with time limits and a length learned from the baseline's `result`."""
        context = self._context
        timeouts = Timeouts.within(self._run.config.trial.deadline_s).learned(
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
        return TrialLauncher(
            context=context,
            baseline=baseline,
            timeouts=timeouts,
            node_monitor=first.node_monitor,
            num_measured=num_measured,
            longest_begin_s=result.start_s + result.first_step_s,
            modules=context.backend.modules(result),
            cold_reason=first.cold_reason,
            accepted_functions=first.accepted_functions,
        )

    # The search

    def _search(
        self,
        space: Space,
        result: TrialResult,
        *,
        launcher: TrialLauncher,
        baseline: BaselineScore,
        parity: ParityKeeper,
        proposer: Proposer | None,
    ) -> TuneResult:
        """Spend the study and run the final rounds; `result` is the baseline's."""
        context = self._context
        opener = StudyOpener(
            context=context,
            storage=replace(self._run.storage, say=self._say, should_stop=self._should_stop_waiting),
            space=space,
            baseline=baseline,
            launcher=launcher,
            earlier_run=self._earlier_run,
            is_self_contained=self._earlier_run is None and not self._slices,
        )
        study = opener.open(result)
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
        conclusion = Conclusion(
            context=context,
            space=space,
            baseline=baseline,
            parity=parity,
            launcher=launcher,
            search=search,
            proposer=proposer,
            predictor=predictor,
            full_size_nodes=self._full_size,
        )
        return conclusion.result(trials)

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

    def _should_stop_waiting(self) -> bool:
        """Asked while the study's server is lost: the run is kept meanwhile, or given up where taken."""
        self._context.fence()
        return self._context.should_stop()
