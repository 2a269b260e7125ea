"""The search with workers: several trials at a time, one writer, and exclusive launches where necessary.

The coordinator asks, hands out and tells. A drift check and a check of the parity gate wait until no trial is
in flight; the coordinator then runs them itself, on the first worker's device slice.
"""

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from quartet_plugin.errors import ExitCode, InfrastructureError, QuartetError, StorageError
from quartet_plugin.launchers.engines import LOCAL
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial
from quartet_plugin.study.tune_study import Proposal
from quartet_plugin.trial.request import TrialResult
from quartet_plugin.tuner.sequential_search import SequentialSearch, all_unfinished, check_progress, num_spent
from quartet_plugin.tuner.slow_nodes import MAX_UNCONFIRMED_CHECKS
from quartet_plugin.tuner.workers.dispatcher import Dispatcher, EndedTrial
from quartet_plugin.tuner.workers.worker_pool import WorkerPool

_POLL_S = 0.1
# How often processes and the lease are looked at; results are looked for at every turn.
_LOOK_S = 0.5


@dataclass(slots=True, kw_only=True)
class ParallelSearch:
    """Spends the trials of `search` with several workers. Leaves none of them behind.

    `_duplicates` were proposed while a plan that executes alike was in flight; `_held_back` waits until
    nothing is; `_drift` is that of the latest check.
    """

    search: SequentialSearch
    dispatcher: Dispatcher
    pool: WorkerPool
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _in_flight: dict[int, Proposal] = field(default_factory=dict)
    _waiting: deque[Proposal] = field(default_factory=deque)
    _duplicates: list[Proposal] = field(default_factory=list)
    _held_back: Proposal | None = None
    _num_workers: int = 0
    _next_look_s: float = float("-inf")
    _num_drift_checks: int = 0
    _num_exhausted: int = -1
    _drift: float = 1.0

    def spend(self) -> str:
        """Spend the trials; returns why the search ended."""
        search = self.search
        try:
            trials = search.study.trials()
            self._drift = search.drift_monitor.check(
                num_spent(trials), trials=trials, num_left=0, is_over=True
            )
            self._adopt()
            num_before = len(search.study.trials())
            why = self._fill()
            while why is None or self._in_flight:
                self.sleep(_POLL_S)
                # A new worker comes behind the end of what a killed one left, so that it has its devices.
                if self._turn():
                    check_progress(search.study.trials(), num_before=num_before)
                    why = self._fill()
            return why
        finally:
            self._close()

    # Trials in flight

    def _adopt(self) -> None:
        """Take over the trials that an earlier coordinator queued; some workers may still run them."""
        search, queue = self.search, self.dispatcher.queue
        trials = search.study.trials()
        finished = {trial.number for trial in trials}
        for queued in queue.queued_trials():
            if queued.trial in finished:
                queue.withdraw(queued.trial)
        for proposal in all_unfinished(search.study):
            if self.dispatcher.adopt(proposal.number, proposal.plan):
                self._in_flight[proposal.number] = search.predict(proposal, trials)
            elif result := self.dispatcher.recorded(proposal.number, proposal.plan):
                # Before a drift check that is due by now.
                self._take(search.predict(proposal, trials), result)
            else:
                self._waiting.append(proposal)

    def _turn(self) -> bool:
        """Report finished trials and check the workers at intervals; returns whether more may be queued."""
        self.search.context.check_stop()
        is_time = self.clock() >= self._next_look_s
        ended_trials = self.dispatcher.collect(at_workers=is_time)
        for ended in ended_trials:
            self._end(ended)
        num_before = self._num_workers
        if is_time:
            self._next_look_s = self.clock() + _LOOK_S
            self.search.context.fence()
            if self._in_flight or self._num_workers:
                self._see_to_workers()
        return bool(ended_trials) or self._num_workers != num_before or not self._in_flight

    def _see_to_workers(self) -> None:
        """Raises InfrastructureError, or StorageError, when no worker of this host is left."""
        self.pool.start_missing()
        if not self.pool.num_running:
            kind = StorageError if self.pool.last_code == ExitCode.STORAGE else InfrastructureError
            raise kind(f"no worker is left on this host: {self.pool.last_line}")
        self._num_workers = max(self.pool.num_running, len(self.dispatcher.workers()))

    def _end(self, ended: EndedTrial) -> None:
        """Finish a trial that has come to its result."""
        proposal = self._in_flight[ended.number]
        if self._is_elsewhere(ended):
            return
        search = self.search
        search.launcher.end(
            search.launch_of(proposal, search.study.trials(), drift=self._drift), ended.result
        )
        if self._is_on_slow_node(ended):
            return
        del self._in_flight[ended.number]
        search.tell(proposal, ended.result, drift=self._drift)
        self.dispatcher.finished(ended.number)

    def _is_elsewhere(self, ended: EndedTrial) -> bool:
        """Whether it was measured on other devices than the baseline: then it is measured again."""
        search = self.search
        other_devices = search.launcher.other_devices(ended.result)
        if not other_devices:
            return False
        search.context.observer.message(
            f"worker {ended.worker} runs {other_devices}; "
            f"it is dismissed, and trial {ended.number} is queued again"
        )
        self.dispatcher.queue.dismiss(ended.worker)
        self.dispatcher.again(ended.number, "measured on other devices than the baseline")
        return True

    def _is_on_slow_node(self, ended: EndedTrial) -> bool:
        """Whether a node of the worker was slow, and not of the baseline's: then it is measured again.

        After a second look the worker is sent away, unless it is the last one.
        """
        search, monitor = self.search, self.search.launcher.node_monitor
        hosts = {speed.host for speed in monitor.speeds(ended.result)}
        hosts -= {node.host for node in search.space.nodes}
        slow = sorted(host for host in hosts if host in monitor.slowdowns or self._is_suspect(host))
        if not slow or len(self.dispatcher.workers()) < 2:
            return False
        why = f"node {slow[0]} seems slow: it is measured again"
        if slow[0] in monitor.slowdowns:
            why = f"node {slow[0]} is slow: its worker gets no more trials"
            search.context.observer.message(
                f"worker {ended.worker} is dismissed because node {slow[0]} is slow; "
                f"trial {ended.number} is queued again"
            )
            self.dispatcher.queue.dismiss(ended.worker)
        self.dispatcher.again(ended.number, why)
        return True

    def _is_suspect(self, host: str) -> bool:
        """Whether a second check is made at a node that was slow in its latest launch."""
        monitor = self.search.launcher.node_monitor
        return (
            monitor.suspects.get(host, 1.0) > 1.0
            and monitor.num_unconfirmed_checks[host] < MAX_UNCONFIRMED_CHECKS
        )

    def _hand_out(self, proposal: Proposal, trials: list[FinishedTrial]) -> None:
        search, plan = self.search, proposal.plan
        launch = search.launch_of(proposal, trials, drift=self._drift, num_in_flight=len(self._in_flight))
        search.launcher.begin(launch, num_left=search.num_left(trials, num_workers=self._num_workers))
        # A mapping is of the slots of this host, where trials run on the hosts of their workers.
        is_pinned = not plan.mapping.is_stock and search.context.run.config.launcher == LOCAL
        host = self.dispatcher.host if is_pinned else None
        self.dispatcher.publish(proposal.number, search.launcher.request(launch), host=host)
        self._in_flight[proposal.number] = proposal

    # The next trial

    def _fill(self) -> str | None:
        """Give every worker a trial; why there is none left, where that is so."""
        search = self.search
        self._answer_duplicates()
        while True:
            trials = search.study.trials()
            tried = num_spent(trials)
            if why := search.why_over(trials, tried=tried):
                return why
            if self._is_drift_check_due(tried):
                if self._in_flight:
                    return None
                self._check_drift(trials, tried=tried)
            no_time = f"{tried} plans were tried; the remaining time is reserved for the final rounds"
            if not search.has_time(trials):
                return no_time
            if not self._num_workers:
                self._see_to_workers()
            if self._is_full(tried):
                return None
            proposal = self._next(trials)
            if proposal is None:
                return f"{tried} plans were tried; no untried plan is left"
            if not search.has_time(trials, then_try=proposal.plan):
                self._held_back = proposal  # it stays open, for a run that is resumed with more time
                return no_time
            if not self._place(proposal, trials):
                return None

    def _is_full(self, tried: int) -> bool:
        """Whether every worker has a trial, or the trials that are left are in flight or held back."""
        num_held = len(self._duplicates) + (self._held_back is not None and bool(self._in_flight))
        num_asked = len(self._in_flight) + num_held
        return num_asked >= self._num_workers or self.search.is_over(tried + num_asked)

    def _next(self, trials: list[FinishedTrial]) -> Proposal | None:
        if self._held_back is not None:
            held, self._held_back = self._held_back, None
            return held
        if self._waiting:
            return self.search.predict(self._waiting.popleft(), trials)
        if self._num_exhausted == len(trials):
            return None  # no trial has finished since
        pending = [*self._plans(), *(duplicate.plan for duplicate in self._duplicates)]
        proposal = self.search.ask(trials, pending=pending)
        if proposal is None:
            self._num_exhausted = len(trials)
        return proposal

    def _place(self, proposal: Proposal, trials: list[FinishedTrial]) -> bool:
        """Answer a proposal, hand it out, or hold it back; False where nothing else may be begun now."""
        if proposal.plan.execution in {plan.execution for plan in self._plans()}:
            self._duplicates.append(proposal)
            return True
        result = self.dispatcher.recorded(proposal.number, proposal.plan)
        if result is None and self._in_flight and self.search.parity.num_runs_to_admit(proposal.plan):
            self._held_back = proposal
            return False
        if self.search.answer(proposal, trials):
            return True
        if result is None:
            self._hand_out(proposal, trials)
            return True
        self._take(proposal, result)
        return True

    def _take(self, proposal: Proposal, result: TrialResult) -> None:
        """Finish a trial that an earlier coordinator's worker has measured."""
        search = self.search
        search.launcher.reuse(search.launch_of(proposal, search.study.trials(), drift=self._drift), result)
        search.tell(proposal, result, drift=self._drift)
        self.dispatcher.finished(proposal.number)

    def _answer_duplicates(self) -> None:
        """Finish plans that were proposed twice with the record of the first."""
        in_flight = {plan.execution for plan in self._plans()}
        for duplicate in [d for d in self._duplicates if d.plan.execution not in in_flight]:
            self._duplicates.remove(duplicate)
            if not self.search.answer(duplicate, self.search.study.trials()):
                self._waiting.append(duplicate)

    def _plans(self) -> list[Plan]:
        return [proposal.plan for proposal in self._in_flight.values()]

    # Drift checks, which are measured alone

    def _is_drift_check_due(self, tried: int) -> bool:
        every = self.search.context.run.config.study.control
        return bool(every) and tried // every > self._num_drift_checks

    def _check_drift(self, trials: list[FinishedTrial], *, tried: int) -> None:
        """Measure the baseline as if it were after as many trials as it was due, though more have ended."""
        every = self.search.context.run.config.study.control
        self._num_drift_checks = tried // every
        self._drift = self.search.drift_monitor.check(
            every * self._num_drift_checks, trials=trials, num_left=self.search.num_left(trials)
        )

    def _close(self) -> None:
        """End every worker. What one that had to be killed left behind is ended by its attempt's files."""
        context, queue = self.search.context, self.dispatcher.queue
        is_second = isinstance(sys.exception(), KeyboardInterrupt)
        has_run = all_ended = False
        try:
            context.fence()  # another tuner's work queue is left alone
            has_run = True
            queue.close()
        except QuartetError:
            pass
        except KeyboardInterrupt:
            is_second = True
        try:
            all_ended = self.pool.close(is_forced=is_second)
        finally:
            if has_run and not all_ended:
                for number in self._in_flight:
                    with contextlib.suppress(QuartetError):
                        context.backend.recover(queue.trial_folder(number), should_stop=lambda: True)
