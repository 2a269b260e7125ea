"""The search with workers: several trials under way, one writer, and alone what must be measured alone.

The coordinator asks, hands out and tells. A control and a check of the parity gate wait until no trial is
under way; the coordinator then runs them itself, on the first worker's share.
"""

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from quartet_plugin.errors import ExitCode, InfrastructureError, QuartetError, StorageError
from quartet_plugin.model.launch import Observer
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial
from quartet_plugin.study.tune_study import Proposal, TuneStudy
from quartet_plugin.trial.request import TrialResult
from quartet_plugin.tuner.sequential_search import SequentialSearch, all_unfinished, check_rows, num_spent
from quartet_plugin.tuner.workers.dispatcher import Dispatcher, EndedTrial
from quartet_plugin.tuner.workers.worker_pool import WorkerPool

_POLL_S = 0.1
# How often processes and the lease are looked at; results are looked for at every turn.
_LOOK_S = 0.5


@dataclass(slots=True, kw_only=True)
class ParallelSearch:
    """Spends a study's trials with several workers. Leaves none of them behind."""

    search: SequentialSearch
    desk: Dispatcher
    crew: WorkerPool
    observer: Observer
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _flying: dict[int, Proposal] = field(default_factory=dict)
    _waiting: deque[Proposal] = field(default_factory=deque)
    _twins: list[Proposal] = field(default_factory=list)
    _alone: Proposal | None = None
    _num_workers: int = 0
    _next_look_s: float = float("-inf")
    _num_controlled: int = 0
    _num_exhausted: int = -1

    def spend(self, study: TuneStudy) -> str:
        """Spend the trials; returns why the search ended."""
        try:
            trials = study.trials()
            self.search.controls.restore(num_spent(trials), trials=trials)
            self._adopt(study)
            num_before = len(study.trials())
            why = self._fill(study)
            while why is None or self._flying:
                self.sleep(_POLL_S)
                # A new worker comes behind the end of what a killed one left, so that it has its share.
                if self._turn(study):
                    check_rows(study.trials(), num_before=num_before)
                    why = self._fill(study)
            return why
        finally:
            self._close()

    # What is under way

    def _adopt(self, study: TuneStudy) -> None:
        """Trials that an earlier coordinator handed out: some workers have them still."""
        trials = study.trials()
        finished = {trial.number for trial in trials}
        for order in self.desk.board.orders():
            if order.trial in finished:
                self.desk.board.withdraw(order.trial)
        for proposal in all_unfinished(study):
            if self.desk.adopt(proposal.number, proposal.plan):
                self._flying[proposal.number] = self.search.predict(proposal, trials)
            elif found := self.desk.recorded(proposal.number, proposal.plan):
                # Before a control that is due by now.
                self._take(study, self.search.predict(proposal, trials), found)
            else:
                self._waiting.append(proposal)

    def _turn(self, study: TuneStudy) -> bool:
        """Tell what has ended and, now and then, see to the workers; whether more may be handed out."""
        self.search.launching.check_stop()
        is_time = self.clock() >= self._next_look_s
        found = self.desk.look(at_workers=is_time)
        for ended in found:
            self._end(study, ended)
        num_before = self._num_workers
        if is_time:
            self._next_look_s = self.clock() + _LOOK_S
            self.search.fence()
            if self._flying or self._num_workers:
                self._see_to_crew()
        return bool(found) or self._num_workers != num_before or not self._flying

    def _see_to_crew(self) -> None:
        """Raises InfrastructureError, or StorageError, when no worker of this host is left."""
        self.crew.look()
        if not self.crew.num_running:
            kind = StorageError if self.crew.last_code == ExitCode.STORAGE else InfrastructureError
            raise kind(f"no worker of this host is left: {self.crew.last_words}")
        self._num_workers = max(self.crew.num_running, len(self.desk.crew()))

    def _end(self, study: TuneStudy, ended: EndedTrial) -> None:
        """A trial has come to its result."""
        proposal = self._flying[ended.number]
        if self._is_elsewhere(ended):
            return
        del self._flying[ended.number]
        label, plan = str(ended.number), proposal.plan
        self.search.launching.ended(ended.number, label, plan, ended.result, stage="search")
        self.search.tell(study, proposal, ended.result)
        self.desk.told(ended.number)

    def _is_elsewhere(self, ended: EndedTrial) -> bool:
        """Whether it was measured on other devices than the baseline: then it is measured again."""
        own = self.search.launching.yardstick
        if not ended.result.is_measured or own is None:
            return False
        expected = [node.node_class for node in own.plan.made_for.nodes]
        found = [node.node_class for node in self.desk.launches.nodes(ended.result)]
        if found == expected:
            return False
        self.observer.message(
            f"worker {ended.worker} runs on {', '.join(found)}, the baseline on {', '.join(expected)}: "
            f"times do not compare; it is sent away, and trial {ended.number} is handed out again"
        )
        self.desk.board.dismiss(ended.worker)
        self.desk.again(ended.number, "measured on other devices than the baseline")
        return True

    def _hand_out(self, proposal: Proposal, *, tried: int) -> None:
        number, plan = proposal.number, proposal.plan
        launching, folder = self.search.launching, self.search.run.folder.trial(proposal.number)
        num_left = -(-self.search.num_left(tried=tried) // max(1, self._num_workers))
        launching.began(number, str(number), plan, folder=folder, stage="search", num_left=num_left)
        # A mapping names the slots of the host that it was made for.
        host = None if plan.mapping.is_stock else plan.made_for.nodes[0].host
        self.desk.publish(number, launching.request(plan, folder=folder, stage="search"), host=host)
        self._flying[number] = proposal

    # What comes next

    def _fill(self, study: TuneStudy) -> str | None:
        """Give every worker something to do; why there is nothing more, where that is so."""
        self._answer_twins(study)
        while True:
            trials = study.trials()
            tried = num_spent(trials)
            if self.search.is_over(tried):
                return f"{tried} plans were tried"
            if self._is_control_due(tried):
                if self._flying:
                    return None
                self._control(trials, tried=tried)
            no_time = f"{tried} plans were tried; the time that is left is kept for the final rounds"
            if not self.search.has_time(trials):
                return no_time
            if not self._num_workers:
                self._see_to_crew()
            if self._is_full(tried):
                return None
            proposal = self._next(study, trials)
            if proposal is None:
                return f"{tried} plans were tried; there are no others to try"
            if not self.search.has_time(trials, then_try=proposal.plan):
                self._alone = proposal  # it stays open, for a run that is resumed with more time
                return no_time
            if not self._place(study, proposal, trials, tried=tried):
                return None

    def _is_full(self, tried: int) -> bool:
        """Whether every worker has a trial, or the trials that are left are under way or held back."""
        num_held = len(self._twins) + (self._alone is not None and bool(self._flying))
        num_asked = len(self._flying) + num_held
        return num_asked >= self._num_workers or tried + num_asked >= self.search.run.config.study.trials

    def _next(self, study: TuneStudy, trials: list[FinishedTrial]) -> Proposal | None:
        if self._alone is not None:
            held, self._alone = self._alone, None
            return held
        if self._waiting:
            return self.search.predict(self._waiting.popleft(), trials)
        if self._num_exhausted == len(trials):
            return None  # nothing was told since
        pending = [*self._plans(), *(twin.plan for twin in self._twins)]
        proposal = self.search.ask(study, trials, pending=pending)
        if proposal is None:
            self._num_exhausted = len(trials)
        return proposal

    def _place(
        self, study: TuneStudy, proposal: Proposal, trials: list[FinishedTrial], *, tried: int
    ) -> bool:
        """Answer a proposal, hand it out, or hold it back; False where nothing else may be begun now."""
        if proposal.plan.execution in {plan.execution for plan in self._plans()}:
            self._twins.append(proposal)
            return True
        found = self.desk.recorded(proposal.number, proposal.plan)
        if found is None and self._flying and self.search.parity.num_runs_to_admit(proposal.plan):
            self._alone = proposal
            return False
        if self.search.answer(study, proposal, trials):
            return True
        if found is None:
            self._hand_out(proposal, tried=tried)
            return True
        self._take(study, proposal, found)
        return True

    def _take(self, study: TuneStudy, proposal: Proposal, found: TrialResult) -> None:
        """Tell what an earlier coordinator's worker has measured."""
        self.search.launching.found(str(proposal.number), proposal.plan, found, stage="search")
        self.search.tell(study, proposal, found)
        self.desk.told(proposal.number)

    def _answer_twins(self, study: TuneStudy) -> None:
        """What was proposed twice at once is told with what came of the first."""
        begun = {plan.execution for plan in self._plans()}
        for twin in [one for one in self._twins if one.plan.execution not in begun]:
            self._twins.remove(twin)
            if not self.search.answer(study, twin, study.trials()):
                self._waiting.append(twin)

    def _plans(self) -> list[Plan]:
        return [proposal.plan for proposal in self._flying.values()]

    # What is measured alone

    def _is_control_due(self, tried: int) -> bool:
        every = self.search.run.config.study.control
        return bool(every) and tried // every > self._num_controlled

    def _control(self, trials: list[FinishedTrial], *, tried: int) -> None:
        """The baseline again, after as many trials as it was due, though more have ended meanwhile."""
        every = self.search.run.config.study.control
        self._num_controlled = tried // every
        self.search.controls.after(
            every * self._num_controlled,
            trials=trials,
            num_left=self.search.num_left(tried=tried),
            is_over=False,
        )

    def _close(self) -> None:
        """End every worker. What one that had to be killed left behind is ended by its attempt's files."""
        board = self.desk.board
        is_second = isinstance(sys.exception(), KeyboardInterrupt)
        is_ours = all_ended = False
        try:
            self.search.fence()  # another tuner's board is left alone
            is_ours = True
            board.close()
        except QuartetError:
            pass
        except KeyboardInterrupt:
            is_second = True
        try:
            all_ended = self.crew.close(at_once=is_second)
        finally:
            if is_ours and not all_ended:
                for number in self._flying:
                    with contextlib.suppress(QuartetError):
                        self.desk.launches.recover(board.trial_folder(number), should_stop=lambda: True)
