"""The search without workers: the study is asked, what needs no launch is answered, the rest is launched.

`ask` and `tell` are the two places where the study's next point is chosen and where a measurement reaches it,
however many trials are under way.
"""

import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace

from quartet_plugin.calibration.observations import launch_noise
from quartet_plugin.calibration.predictor import PlanPredictor, SlowNodes
from quartet_plugin.errors import InfeasibleError, InfrastructureError, SeamError
from quartet_plugin.model.launch import FORBIDDEN, LaunchPosition
from quartet_plugin.model.measurement import Prediction
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord, score_of_median
from quartet_plugin.schedule.search.effort import stopped_by
from quartet_plugin.space.plan_space import Space
from quartet_plugin.study.tune_study import Proposal, TuneStudy
from quartet_plugin.trial.request import Outcome, TrialResult
from quartet_plugin.tuner.context import TuningContext
from quartet_plugin.tuner.depth_proxy import DepthProxy
from quartet_plugin.tuner.drift import DEVIATIONS, DriftMonitor
from quartet_plugin.tuner.finalists import BASELINE, candidates
from quartet_plugin.tuner.launches_left import launches_left
from quartet_plugin.tuner.parity import ParityKeeper, ParityRefusal
from quartet_plugin.tuner.patience import patience_words
from quartet_plugin.tuner.proposer import Proposer
from quartet_plugin.tuner.trial_launcher import BaselineScore, TrialLaunch, TrialLauncher, record_of

MAX_INFEASIBLE_IN_A_ROW = 30
MAX_LOST_IN_A_ROW = 3
MAX_REPEATS_IN_A_ROW = 8
# An iteration that takes longer than the best plan's by this factor at least is clearly slower.
CLEARLY_SLOWER = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialSearch:
    """Runs a study's trials one after the other. `proposer` is None if only the sampler proposes plans."""

    context: TuningContext
    space: Space
    baseline: BaselineScore
    study: TuneStudy
    launcher: TrialLauncher
    parity: ParityKeeper
    drift_monitor: DriftMonitor
    predictor: PlanPredictor
    proposer: Proposer | None
    depth_proxy: DepthProxy | None

    def spend(self) -> str:
        """Spend the trials; returns why the search ended."""
        study, proxy = self.study, self.depth_proxy
        unfinished = all_unfinished(study)
        trials = study.trials()
        num_before = len(trials)
        if proxy is not None and proxy.is_begun:
            proxy.open(trials, num_left=self.num_left(trials), drift=1.0)
        while True:
            trials = study.trials()
            check_progress(trials, num_before=num_before)
            tried = num_spent(trials)
            num_left, why = self.num_left(trials), self.why_over(trials, tried=tried)
            drift = self.drift_monitor.check(tried, trials=trials, num_left=num_left, is_over=why is not None)
            if why is not None:
                return why
            if not self.has_time(trials):
                return f"{tried} plans were tried; the remaining time is reserved for the final rounds"
            if proxy is not None and not proxy.is_open:
                proxy.open(trials, num_left=num_left, drift=drift)
                continue
            proposal = self.predict(unfinished.popleft(), trials) if unfinished else self.ask(trials)
            if proposal is None:
                return f"{tried} plans were tried; no untried plan is left"
            if not self.has_time(trials, then_try=proposal.plan):
                return f"{tried} plans were tried; the remaining time is reserved for the final rounds"
            if self.answer(proposal, trials) or self._is_behind(proposal, num_left=num_left, drift=drift):
                continue
            launch = self.launch_of(proposal, trials, drift=drift)
            result = self.launcher.launch(launch, num_left=num_left)
            if result.is_measured:
                drift = self.drift_monitor.check_nodes(tried + 1, trials=trials, num_left=num_left)
            self.tell(proposal, result, drift=drift)

    def restore_nodes(self, trials: list[FinishedTrial]) -> None:
        """Take in the speeds of nodes in the trials and drift checks that an earlier process measured."""
        for index, trial in enumerate(trials):
            if not trial.is_spent:
                continue
            folder = self.context.run.folder.trial(trial.number)
            result = self.context.backend.recorded(folder, plan_key=trial.plan.key)
            if result is not None:
                self.launcher.node_monitor.observe(result, label=str(trial.number))
            until = trials[: index + 1]
            self.drift_monitor.check(num_spent(until), trials=until, num_left=0, is_over=True)

    def ask(self, trials: list[FinishedTrial], *, pending: Collection[Plan] = ()) -> Proposal | None:
        """A new proposal; None where no new plan is left. After some repeats chance draws one.

        The calibrated cost model puts its point before the study where it is its turn. `pending` plans are
        under way and not finished yet.
        """
        self.context.check_stop()
        repeats = in_a_row(trials, lambda trial: trial.record.repeats is not None)
        known = frozenset(plan.execution for plan in (*(trial.plan for trial in trials), *pending))

        def is_known(plan: Plan) -> bool:
            if plan.execution in known or self._forbidden(plan) is not None:
                return True
            return self.parity.refusal_of(plan) is not None

        scored = None
        if repeats >= MAX_REPEATS_IN_A_ROW:
            if not self.study.enqueue_fresh(is_known=is_known):
                return None
        elif self.proposer is not None:
            self.context.fence()
            self._show_slow_nodes(self.proposer)
            # A stop does not wait for the end of a search of orders.
            with stopped_by(self.context.check_stop):
                scored = self.proposer.prepare(self.study, trials, is_known=is_known, pending=list(pending))
        with stopped_by(self.context.check_stop):
            # The study keeps a trial that a stop ends here as one that runs: a resumed run goes on with it.
            asked = self.study.ask()
        proposal = self.predict(asked, trials)
        by_model: dict[str, object] = {}
        if scored is not None and self.proposer is not None:
            prediction = scored.prediction
            by_model = {
                "predicted_s": prediction.iteration_s,
                "spread": prediction.spread,
                "gain": scored.expected_improvement,
                "cut_off": list(self.proposer.limits),
            }
            for line in self.proposer.unsaid_limits():
                self.context.observer.message(f"the space is too large to predict every plan: {line}")
        self.context.events.add("proposed", trial=proposal.number, **by_model, params=proposal.params)
        return proposal

    def predict(self, proposal: Proposal, trials: list[FinishedTrial]) -> Proposal:
        """The proposal with its predictions: before any trial, and calibrated where there is a proposer."""
        proposal = replace(proposal, plan=self.with_relative_cost(proposal.plan))
        if self.proposer is None:
            return proposal
        self._show_slow_nodes(self.proposer)
        return self.proposer.predict(proposal, trials)

    def with_relative_cost(self, plan: Plan) -> Plan:
        """The plan with what is predicted before any trial, where it has no prediction."""
        if plan.prediction is not None:
            return plan
        cost = self.predictor.relative_cost(plan, baseline=self.space.baseline)
        prediction = Prediction(iteration_s=None, relative_cost=cost, peak_memory_bytes=None)
        return replace(plan, prediction=prediction)

    def _show_slow_nodes(self, proposer: Proposer) -> None:
        """Let plans be predicted as they run on nodes that are slow now."""
        monitor = self.launcher.node_monitor
        proposer.predictor.slow_nodes = SlowNodes(
            slowdowns=dict(monitor.slowdowns),
            known=frozenset(monitor.ever_slow),
            drift=self.drift_monitor.drift,
        )

    def answer(self, proposal: Proposal, trials: list[FinishedTrial]) -> bool:
        """Whether the proposal is finished without a launch: its plan was measured before, or is refused."""
        self.context.fence()
        execution = proposal.plan.execution
        for trial in trials:
            if trial.plan.execution == execution and trial.record.verdict != "lost":
                record = replace(trial.record, repeats=trial.number, wall_s=0.0)
                self._tell_study(proposal, record, kind="repeat", of=trial.number)
                return True
        return self._is_refused(proposal, trials)

    def launch_of(
        self, proposal: Proposal, trials: list[FinishedTrial], *, drift: float, num_in_flight: int = 0
    ) -> TrialLaunch:
        """The launch of a proposal, which is cut short where it is far behind the best of `trials`."""
        counted = trials if self.baseline.is_within_memory else [x for x in trials if x.number != BASELINE]
        best = max((trial.record.value for trial in counted if trial.record.value is not None), default=None)
        slow_above_s = slower_than_s = None
        if best:
            in_a_second = score_of_median(proposal.plan, iteration_s=1.0).value(self.baseline.objective)
            best_s = in_a_second / (best * drift)
            slow_above_s = self.context.run.config.trial.cut_above * best_s
            slower_than_s = min(slow_above_s, clearly_slower(trials) * best_s)
        return TrialLaunch(
            number=proposal.number,
            label=str(proposal.number),
            plan=proposal.plan,
            folder=self.context.run.folder.trial(proposal.number),
            phase="search",
            drift=drift,
            slow_above_s=slow_above_s,
            slower_than_s=slower_than_s,
            start=self.parity.start_of(proposal.plan),
            position=LaunchPosition.of_trial(
                num_spent(trials) + num_in_flight, num_asked=self.context.run.config.study.trials
            ),
        )

    def tell(self, proposal: Proposal, result: TrialResult, *, drift: float) -> None:
        """Give the study the record of a launch. Raises SeamError for a fault of the plugin itself."""
        if result.outcome is Outcome.HARNESS:
            raise SeamError(f"trial {proposal.number}: {result.reason}; see {result.folder}")
        record = record_of(
            proposal.plan,
            result,
            objective=self.baseline.objective,
            drift=drift,
            node_slowdowns=self.launcher.node_monitor.slowdowns_in(result),
        )
        self._finish(proposal, record, value=record.value, drift=record.drift)
        self.parity.quarantine(proposal.plan, record, trial=proposal.number)

    def is_over(self, tried: int) -> bool:
        """Whether every trial is used up."""
        return tried >= self.context.run.config.study.trials

    def why_over(self, trials: list[FinishedTrial], *, tried: int) -> str | None:
        """Why no other trial is asked for: all are used up, or the last ones were no gain; None otherwise."""
        words = f"{tried} plans were tried"
        if self.is_over(tried):
            return words
        if not self.baseline.is_within_memory:
            # Plans that fit need not be faster than a command that does not.
            trials = [trial for trial in trials if trial.number != BASELINE]
        no_gain = patience_words(trials, patience=self.context.run.config.study.patience)
        return None if no_gain is None else f"{words}; {no_gain}"

    def has_time(self, trials: list[FinishedTrial], *, then_try: Plan | None = None) -> bool:
        """Whether another trial and the final rounds are likely to end in time, parity checks included.

        The budget notes where they are not: the search ends there.
        """
        budget, config = self.context.budget, self.context.run.config.study
        if budget.limit_s is None:
            return True
        ahead = 0 if then_try is None else self.parity.num_runs_to_admit(then_try)
        ahead += self.depth_proxy is not None and self.depth_proxy.is_on
        best = self.best_trials(trials)[: config.top_k]
        proofs = self.parity.num_runs_to_prove(trial.plan for trial in best)
        fits = budget.fits(num_launches=1 + ahead, then=config.num_final_launches + proofs)
        budget.was_short |= not fits
        return fits

    def best_trials(self, trials: list[FinishedTrial]) -> list[FinishedTrial]:
        """The trials that may win, the best first, by the posterior where there is a cost model."""
        if self.proposer is not None:
            self._show_slow_nodes(self.proposer)
        means = self.posterior_means(trials)
        return candidates(trials, baseline_value=self.baseline.value_to_beat, posterior_means=means)

    def posterior_means(self, trials: list[FinishedTrial]) -> dict[int, float]:
        """The objective of each measured plan by trial, as all measurements give it; {} without a model."""
        return {} if self.proposer is None else self.proposer.posterior_means(trials)

    def num_left(self, trials: list[FinishedTrial], *, num_workers: int = 1) -> int:
        """Launches one after the other that are still to come, checks and final rounds included."""
        config = self.context.run.config.study
        best = candidates(trials, baseline_value=self.baseline.value_to_beat)[: config.top_k]
        num_unknown = 0 if self.space.no_custom_schedules else config.top_k - len(best)
        proofs = self.parity.num_runs_to_prove((trial.plan for trial in best), num_unknown=num_unknown)
        return launches_left(
            config, num_tried=num_spent(trials), num_parity_runs=proofs, num_workers=num_workers
        )

    def _is_behind(self, proposal: Proposal, *, num_left: int, drift: float) -> bool:
        """Whether the proposal's depth proxy is so slow that the trial ends with it."""
        if self.depth_proxy is None:
            return False
        record = self.depth_proxy.judge(proposal, num_left=num_left, drift=drift)
        if record is None:
            return False
        self._finish(proposal, record, value=record.value, outcome=record.outcome)
        self._show(proposal, record)
        return True

    def _forbidden(self, plan: Plan) -> ParityRefusal | None:
        """The user's own refusal of a plan."""
        why = self.space.refusal_of(plan)
        if why is None:
            return None
        return ParityRefusal(verdict="infeasible", outcome=FORBIDDEN, reason=why, culprit="")

    def _is_refused(self, proposal: Proposal, trials: list[FinishedTrial]) -> bool:
        """Whether the user or the parity gate refuses the proposal, which finishes its trial."""
        plan = proposal.plan
        proxy = self.depth_proxy
        refusal = self._forbidden(plan) or self.parity.admit(
            plan,
            trial=proposal.number,
            num_left=self.num_left(trials),
            has_depth_proxy=proxy is not None and proxy.comes_first(proposal),
        )
        if refusal is None:
            return False
        repeats = None
        if refusal.culprit is not None:
            culprits = (trial.number for trial in trials if trial.plan.key == refusal.culprit)
            repeats = next(culprits, BASELINE)
        record = refusal.record(repeats=repeats)
        self._finish(proposal, record, reason=record.reason, of=repeats)
        if repeats is None:
            self._show(proposal, record)
        return True

    def _finish(self, proposal: Proposal, record: TrialRecord, **fields: str | float | None) -> None:
        """Give the study the record of a trial and log it."""
        self.context.fence()
        self._tell_study(proposal, record, kind="told", verdict=record.verdict, **fields)

    def _tell_study(
        self, proposal: Proposal, record: TrialRecord, *, kind: str, **fields: str | float | None
    ) -> None:
        """Tell the study, then log what a lost study is made again from."""
        kept = asdict(self.study.tell(proposal, record))
        self.context.events.add(kind, trial=proposal.number, **fields, params=proposal.params, record=kept)

    def _show(self, proposal: Proposal, record: TrialRecord) -> None:
        trial = FinishedTrial(number=proposal.number, plan=proposal.plan, record=record)
        self.launcher.show_finished(trial)


def all_unfinished(study: TuneStudy) -> deque[Proposal]:
    """The trials that an earlier process asked for and did not live to tell; several where it had workers."""
    proposals: deque[Proposal] = deque()
    while (proposal := study.unfinished()) is not None:
        proposals.append(proposal)
    return proposals


def check_progress(trials: list[FinishedTrial], *, num_before: int = 0) -> None:
    """End a search that goes nowhere: raises InfeasibleError or InfrastructureError.

    Trials that an earlier tuner lost, among the first `num_before`, do not count: the cause has been mended
    since.
    """
    launched = [trial for trial in trials if trial.record.repeats is None and trial.record.source is None]
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
            f"{lost} trials in a row could not run: {trials[-1].record.reason}; fix that, then add --resume"
        )


def clearly_slower(trials: list[FinishedTrial]) -> float:
    """The ratio of a plan's seconds per iteration to the best plan's above which it cannot be the best.

    The best of several is partly lucky and launches scatter, so that a smaller lead may turn round.
    """
    noise = launch_noise(trial.record for trial in trials if trial.record.repeats is None)
    return max(CLEARLY_SLOWER, math.exp(DEVIATIONS * math.sqrt(2.0) * noise))


def num_spent(trials: list[FinishedTrial]) -> int:
    """The number of trials that used up one of the study's."""
    return sum(trial.is_spent for trial in trials)


def in_a_row(trials: list[FinishedTrial], condition: Callable[[FinishedTrial], bool]) -> int:
    """The number of latest trials that meet the condition without a break."""
    count = 0
    for trial in reversed(trials):
        if not condition(trial):
            break
        count += 1
    return count
