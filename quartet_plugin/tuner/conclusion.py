"""How a run ends: from the study's trials to finalists, final rounds, and the result with its winner."""

from dataclasses import dataclass, replace

from quartet_plugin.calibration.predictor import PlanPredictor
from quartet_plugin.model.trial_record import FinishedTrial
from quartet_plugin.space.plan_space import Space
from quartet_plugin.tuner.axis_gains import axis_gains_of
from quartet_plugin.tuner.context import TuningContext
from quartet_plugin.tuner.final_rounds import (
    FinalRounds,
    finalist_words,
    most_iterations,
    proven_finalists,
    winner_of,
)
from quartet_plugin.tuner.finalists import BASELINE
from quartet_plugin.tuner.full_size import FullSizeNodes, FullSizeStudy, full_size_study
from quartet_plugin.tuner.memory_limit import stand_in_of
from quartet_plugin.tuner.parity import ParityKeeper
from quartet_plugin.tuner.proposer import Proposer
from quartet_plugin.tuner.regret import regret_of
from quartet_plugin.tuner.sequential_search import SequentialSearch
from quartet_plugin.tuner.shape_curve import shape_curve_of
from quartet_plugin.tuner.trial_launcher import BaselineScore, TrialLauncher
from quartet_plugin.tuner.tune_result import TuneResult
from quartet_plugin.tuner.winner_choice import FinalistResult, choice_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """The end of a run whose trials are spent.

    `full_size_nodes` is how launches at full size start where trials have fewer replicas, or why none can.
    """

    context: TuningContext
    space: Space
    baseline: BaselineScore
    parity: ParityKeeper
    launcher: TrialLauncher
    search: SequentialSearch
    proposer: Proposer | None
    predictor: PlanPredictor
    full_size_nodes: FullSizeNodes | str

    def result(self, trials: list[FinishedTrial]) -> TuneResult:
        """The run's result, after the final rounds of the best of `trials`, of which the first is 0."""
        full_size = full_size_study(
            self.context,
            self.space,
            nodes=self.full_size_nodes,
            predictor=None if self.proposer is None else self.proposer.predictor,
        )
        ranked = self.search.best_trials(trials)
        if full_size is not None:
            ranked = full_size.ranked(ranked, trials=trials)
        baseline, stand_in = self.baseline, None
        if not baseline.is_within_memory:
            stand_in = self._stand_in(ranked)
        if stand_in is not None:
            ranked = [trial for trial in ranked if trial.number != stand_in.number]
            baseline = replace(baseline, plan=stand_in.plan, launched_plan=stand_in.plan)
            if full_size is not None:
                full_size.stand_in = stand_in.plan
        finalists = proven_finalists(ranked, context=self.context, parity=self.parity)
        selection = self._show_finalists(
            [trial for trial in ranked if trial in finalists or self.parity.refusal_of(trial.plan) is None],
            finalists=finalists,
            means=None if full_size is not None else self.search.posterior_means(trials),
        )
        if self.context.run.config.trial.measure == "auto":
            self.launcher.num_measured_finally = most_iterations(trials, finalists=finalists)
        rounds = FinalRounds(context=self.context, launcher=self.launcher, baseline=baseline)
        tuned = self._chosen(rounds.measure(finalists), trials=trials, baseline=baseline, full_size=full_size)
        return self._with_gains(replace(tuned, stand_in=stand_in), selection=selection)

    def _chosen(
        self,
        rankings: list[FinalistResult],
        *,
        trials: list[FinishedTrial],
        baseline: BaselineScore,
        full_size: FullSizeStudy | None,
    ) -> TuneResult:
        """The winner of the final rounds; of a look at full size its own, with its launch there."""
        seed, at_full_size = self.context.run.config.study.seed, None
        if full_size is not None:
            rankings = full_size.in_order(rankings)
        winner = winner_of(rankings)
        if full_size is not None and winner is not None:
            at_full_size = full_size.winner(winner, baseline=baseline, launcher=self.launcher)
        return TuneResult(
            objective=baseline.objective,
            seed=seed,
            baseline=baseline.plan,
            trials=tuple(trials),
            rankings=tuple(rankings),
            winner=winner,
            choice=choice_of(rankings, seed=seed) if full_size is None else full_size.choice(rankings),
            receipt=None if winner is None else self.parity.receipt_of(winner.trial.plan),
            drift_checks=tuple(self.search.drift_monitor.measurements),
            full_size=at_full_size,
        )

    def _with_gains(self, tuned: TuneResult, *, selection: str) -> TuneResult:
        """The result with how its finalists were selected, its regret, and what each axis and shape gave."""
        if tuned.choice is not None:
            tuned = replace(tuned, choice=replace(tuned.choice, selection=selection or None))
        space, proposer = self.space, self.proposer
        return replace(
            tuned,
            regret=regret_of(space, tuned, predictor=self.predictor, proposer=proposer),
            axis_gains=axis_gains_of(space, tuned, proposer=proposer),
            shape_curve=shape_curve_of(space, tuned, proposer=proposer),
        )

    def _show_finalists(
        self,
        ranked: list[FinishedTrial],
        *,
        finalists: list[FinishedTrial],
        means: dict[int, float] | None,
    ) -> str:
        """Say, log and return the finalists, their rank values and the next plan.

        `means` is None at full size.
        """
        values = {trial.number: trial.record.value for trial in ranked if trial.record.value is not None}
        speedups: dict[int, float] = {}
        rank_words = "the predicted throughput with all replicas"
        if means is not None:
            rank_words = "the speedup fitted to all measurements" if means else "their trials' speedup"
            reference = means.get(BASELINE, self.baseline.value)
            speedups = {number: value / reference for number, value in {**values, **means}.items()}
        words = finalist_words(ranked, finalists=finalists, speedups=speedups, rank_words=rank_words)
        if words:
            self.context.observer.message(words)
        self.context.events.add(
            "finalists",
            trials=[trial.number for trial in finalists],
            first_round=self.context.run.folder.num_final_rounds,
            ranked=[{"trial": trial.number, "speedup": speedups.get(trial.number)} for trial in ranked],
        )
        return words

    def _stand_in(self, ranked: list[FinishedTrial]) -> FinishedTrial | None:
        """The trial whose plan is the baseline of the final rounds; said and logged."""
        stand_in, say = stand_in_of(ranked, command=self.baseline.plan), self.context.observer.message
        if stand_in is None:
            say("no stock plan that fits was measured; plans are compared with your command")
            return None
        say(f"the baseline is the best stock plan that fits, trial {stand_in.number}")
        self.context.events.add("stand-in", trial=stand_in.number)
        return stand_in
