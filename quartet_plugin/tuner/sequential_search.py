"""The search as it is spent: the study is asked, what needs no launch is answered, the rest launched, told.

`ask` and `tell` are the two places where the study's next point is chosen and where a measurement reaches it,
however many trials are under way.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from quartet_plugin.errors import InfeasibleError, InfrastructureError, SeamError
from quartet_plugin.model.launch import FORBIDDEN
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.receipt import needs_receipt
from quartet_plugin.model.trial_record import FinishedTrial
from quartet_plugin.study.tune_study import Proposal, TuneStudy
from quartet_plugin.trial.request import Outcome, TrialResult
from quartet_plugin.tuner.depth_proxy import DepthProxy
from quartet_plugin.tuner.drift import DriftMonitor
from quartet_plugin.tuner.events import EventLog
from quartet_plugin.tuner.finalists import BASELINE, candidates
from quartet_plugin.tuner.parity import ParityKeeper, ParityRefusal
from quartet_plugin.tuner.proposer import Proposer
from quartet_plugin.tuner.run_folder import TuningRun
from quartet_plugin.tuner.time_budget import TimeBudget
from quartet_plugin.tuner.trial_launcher import TrialLauncher, record_of

MAX_INFEASIBLE_IN_A_ROW = 30
MAX_LOST_IN_A_ROW = 3
MAX_REPEATS_IN_A_ROW = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialSearch:
    """Spends a study's trials, one after the other."""

    run: TuningRun
    launching: TrialLauncher
    parity: ParityKeeper
    controls: DriftMonitor
    events: EventLog
    budget: TimeBudget
    fence: Callable[[], None]
    proposer: Proposer | None = None
    cropping: DepthProxy | None = None
    why_forbidden: Callable[[Plan], str | None] = lambda _: None

    def spend(self, study: TuneStudy) -> str:
        """Spend the trials; returns why the search ended."""
        begun = all_unfinished(study)
        trials = study.trials()
        num_before = len(trials)
        if self.cropping is not None and self.cropping.is_begun:
            self.cropping.open(trials, num_left=self.num_left(tried=num_spent(trials)))
        while True:
            trials = study.trials()
            check_rows(trials, num_before=num_before)
            tried = num_spent(trials)
            over = self.is_over(tried)
            self.controls.after(tried, trials=trials, num_left=self.num_left(tried=tried), is_over=over)
            if over:
                return f"{tried} plans were tried"
            if not self.has_time(trials):
                return f"{tried} plans were tried; the time that is left is kept for the final rounds"
            if self.cropping is not None and not self.cropping.is_open:
                self.cropping.open(trials, num_left=self.num_left(tried=tried))
                continue
            proposal = self.predict(begun.popleft(), trials) if begun else self.ask(study, trials)
            if proposal is None:
                return f"{tried} plans were tried; there are no others to try"
            if not self.has_time(trials, then_try=proposal.plan):
                return f"{tried} plans were tried; the time that is left is kept for the final rounds"
            self._try(study, proposal, trials, tried=tried)

    def ask(
        self, study: TuneStudy, trials: list[FinishedTrial], *, pending: Collection[Plan] = ()
    ) -> Proposal | None:
        """A new proposal; None where no new plan is left. After some repeats chance finds one.

        The calibrated cost model puts its point before the study where it is its turn.

        `pending` plans are under way and not told yet.
        """
        self.launching.check_stop()
        repeats = in_a_row(trials, lambda trial: trial.record.repeats is not None)
        known = frozenset(plan.execution for plan in (*(trial.plan for trial in trials), *pending))

        def is_known(plan: Plan) -> bool:
            if plan.execution in known or self._forbidden(plan) is not None:
                return True
            return self.parity.refusal_of(plan) is not None

        promise = None
        if repeats >= MAX_REPEATS_IN_A_ROW:
            if not study.enqueue_fresh(is_known=is_known):
                return None
        elif self.proposer is not None:
            self.fence()
            promise = self.proposer.prepare(study, trials, is_known=is_known, pending=list(pending))
        proposal = self.predict(study.ask(), trials)
        if promise is not None:
            forecast = promise.forecast
            self.events.add(
                "proposed",
                trial=proposal.number,
                predicted_s=forecast.iteration_s,
                spread=forecast.spread,
                gain=promise.gain,
            )
        return proposal

    def predict(self, proposal: Proposal, trials: list[FinishedTrial]) -> Proposal:
        """The proposal with what the calibrated cost model says of it, where there is one."""
        return proposal if self.proposer is None else self.proposer.predict(proposal, trials)

    def answer(self, study: TuneStudy, proposal: Proposal, trials: list[FinishedTrial]) -> bool:
        """Whether the study was told without a launch: the plan was measured before, or it is refused."""
        self.fence()
        self.launching.best_value = max(r.record.value for r in trials if r.record.value is not None)
        same = proposal.plan.execution
        known = next(
            (one for one in trials if one.plan.execution == same and one.record.verdict != "lost"), None
        )
        if known is not None:
            study.tell(proposal, replace(known.record, repeats=known.number, wall_s=0.0))
            self.events.add("repeat", trial=proposal.number, of=known.number)
            return True
        return self._is_refused(study, proposal, trials)

    def tell(self, study: TuneStudy, proposal: Proposal, result: TrialResult) -> None:
        """Tell the study what came of a launch. Raises SeamError for a fault of our own."""
        yardstick = self.launching.yardstick
        assert yardstick is not None
        if result.outcome is Outcome.HARNESS:
            raise SeamError(f"trial {proposal.number}: {result.reason}; see {result.folder}")
        self.fence()
        record = record_of(proposal.plan, result, objective=yardstick.objective, drift=self.launching.drift)
        study.tell(proposal, record)
        self.events.add(
            "told", trial=proposal.number, verdict=record.verdict, value=record.value, drift=record.drift
        )
        if record.verdict == "wrong" and needs_receipt(proposal.plan):
            self.parity.quarantine(proposal.plan, record.reason, trial=proposal.number)

    def is_over(self, tried: int) -> bool:
        """Whether every trial is used up."""
        return tried >= self.run.config.study.trials

    def has_time(self, trials: list[FinishedTrial], *, then_try: Plan | None = None) -> bool:
        """Whether another trial and the final rounds are likely to end in time, parity checks included."""
        if self.budget.limit_s is None:
            return True
        ahead = 0 if then_try is None else self.parity.num_runs_to_admit(then_try)
        ahead += self.cropping is not None and self.cropping.is_on
        own = self.launching.yardstick
        assert own is not None
        best = candidates(
            trials,
            baseline_value=own.value,
            top_k=self.run.config.study.top_k,
            believed=self.posterior_means(trials),
        )
        proofs = self.parity.num_runs_to_prove(trial.plan for trial in best)
        return self.budget.fits(num_launches=1 + ahead, then=self.num_in_final() + proofs)

    def posterior_means(self, trials: list[FinishedTrial]) -> dict[int, float]:
        """What measured plans are worth by all that is known, by trial; nothing without a cost model."""
        return {} if self.proposer is None else self.proposer.posterior_means(trials)

    def num_in_final(self) -> int:
        """Launches of the final rounds."""
        study = self.run.config.study
        return study.rounds * (study.top_k + 1)

    def num_left(self, *, tried: int) -> int:
        """Launches that are still to come after so many trials."""
        return self.run.config.study.trials - tried + self.num_in_final()

    def _try(self, study: TuneStudy, proposal: Proposal, trials: list[FinishedTrial], *, tried: int) -> None:
        """Launch the proposal, or answer it from what was measured, and tell the study."""
        if self.answer(study, proposal, trials) or self._is_behind(study, proposal, tried=tried):
            return
        result = self.launching.launch(
            proposal.plan,
            number=proposal.number,
            folder=self.run.folder.trial(proposal.number),
            label=str(proposal.number),
            stage="search",
            num_left=self.num_left(tried=tried),
        )
        self.tell(study, proposal, result)

    def _is_behind(self, study: TuneStudy, proposal: Proposal, *, tried: int) -> bool:
        """Whether a model with fewer layers shows enough of the proposal; then the study is told."""
        if self.cropping is None:
            return False
        record = self.cropping.judge(proposal, num_left=self.num_left(tried=tried))
        if record is None:
            return False
        self.fence()
        study.tell(proposal, record)
        self.events.add(
            "told", trial=proposal.number, verdict=record.verdict, value=record.value, outcome=record.outcome
        )
        self.launching.show_told(FinishedTrial(number=proposal.number, plan=proposal.plan, record=record))
        return True

    def _forbidden(self, plan: Plan) -> ParityRefusal | None:
        """The user's own refusal of a plan."""
        why = self.why_forbidden(plan)
        if why is None:
            return None
        return ParityRefusal(verdict="infeasible", outcome=FORBIDDEN, reason=why, culprit="")

    def _is_refused(self, study: TuneStudy, proposal: Proposal, trials: list[FinishedTrial]) -> bool:
        """Whether the user or the parity gate keeps the proposal from being timed; then the study is told."""
        plan, number = proposal.plan, proposal.number
        refusal = self._forbidden(plan) or self.parity.admit(plan, trial=number)
        if refusal is None:
            return False
        self.fence()
        repeats = None
        if refusal.culprit is not None:
            repeats = next((r.number for r in trials if r.plan.key == refusal.culprit), BASELINE)
        record = refusal.told(repeats=repeats)
        study.tell(proposal, record)
        self.events.add("told", trial=number, verdict=record.verdict, reason=record.reason, of=repeats)
        if repeats is None:
            self.launching.show_told(FinishedTrial(number=number, plan=plan, record=record))
        return True


def all_unfinished(study: TuneStudy) -> deque[Proposal]:
    """The trials that an earlier process asked for and did not live to tell; several where it had workers."""
    found: deque[Proposal] = deque()
    while (proposal := study.unfinished()) is not None:
        found.append(proposal)
    return found


def check_rows(trials: list[FinishedTrial], *, num_before: int = 0) -> None:
    """End a search that goes nowhere: raises InfeasibleError or InfrastructureError.

    What an earlier tuner lost, the first `num_before` records, has been mended since: a resumed run goes on.
    """
    launched = [one for one in trials if one.record.repeats is None and one.record.source is None]
    infeasible = in_a_row(launched, lambda trial: trial.record.verdict == "infeasible")
    if infeasible >= MAX_INFEASIBLE_IN_A_ROW:
        nearest = min(launched[-infeasible:], key=lambda trial: trial.record.excess)
        raise InfeasibleError(
            f"{infeasible} plans in a row did not fit; the nearest was trial {nearest.number} "
            f"({nearest.plan.layout.label}): {nearest.record.reason}; narrow the search in q.yaml"
        )
    lost = in_a_row(trials[num_before:], lambda trial: trial.record.verdict == "lost")
    if lost >= MAX_LOST_IN_A_ROW:
        raise InfrastructureError(
            f"{lost} trials in a row could not be run: {trials[-1].record.reason}; mend that, then --resume"
        )


def num_spent(trials: list[FinishedTrial]) -> int:
    """How many trials used up one of the study's."""
    return sum(trial.is_spent for trial in trials)


def in_a_row(trials: list[FinishedTrial], is_one: Callable[[FinishedTrial], bool]) -> int:
    """How many of the latest records are such."""
    count = 0
    for trial in reversed(trials):
        if not is_one(trial):
            break
        count += 1
    return count
