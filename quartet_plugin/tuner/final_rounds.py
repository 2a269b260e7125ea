"""The final rounds as they are run: the best plans and the baseline in turns, until the winner is decided."""

from collections.abc import Sequence
from dataclasses import dataclass

from quartet_plugin.errors import InfrastructureError
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial
from quartet_plugin.trial.request import Outcome, TrialResult
from quartet_plugin.tuner.context import TuningContext
from quartet_plugin.tuner.finalists import (
    BASELINE,
    MAX_EXTENDED,
    order_of_round,
    rank,
)
from quartet_plugin.tuner.parity import ParityKeeper
from quartet_plugin.tuner.sequential_search import MAX_LOST_IN_A_ROW
from quartet_plugin.tuner.trial_launcher import BaselineScore, TrialLaunch, TrialLauncher
from quartet_plugin.tuner.winner_choice import MIN_ROUNDS, FinalistResult

# Measured results by trial number and round.
type RoundResults = dict[int, dict[int, TrialResult]]


def proven_finalists(
    ranked: Sequence[FinishedTrial], *, context: TuningContext, parity: ParityKeeper
) -> list[FinishedTrial]:
    """The `study.top_k` best of `ranked` trials that pass the parity gate where they need a receipt.

    A plan that fails the gate takes those of its kind with it that had passed before.
    """
    finalists: list[FinishedTrial] = []

    def drop(trial: FinishedTrial, reason: str) -> None:
        context.observer.message(f"trial {trial.number} is out: {reason}")

    for trial in ranked:
        if len(finalists) == context.run.config.study.top_k:
            break
        context.check_stop()
        refusal = parity.prove(trial.plan, trial=trial.number)
        if refusal is None:
            finalists.append(trial)
            continue
        drop(trial, refusal.reason)
        for passed in tuple(finalists):
            if (refusal := parity.refusal_of(passed.plan)) is not None:
                finalists.remove(passed)
                drop(passed, refusal.reason)
    return finalists


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalRounds:
    """Measures finalists against the baseline, round by round, as far as there is time."""

    context: TuningContext
    launcher: TrialLauncher
    baseline: BaselineScore

    def measure(self, finalists: Sequence[FinishedTrial]) -> list[FinalistResult]:
        """The finalists in order of choice.

        A leader by little, over few rounds or unsurely is measured again.
        """
        config, baseline = self.context.run.config.study, self.baseline
        all_plans = {BASELINE: baseline.plan, **{trial.number: trial.plan for trial in finalists}}
        plans = all_plans
        results: RoundResults = {number: {} for number in plans}
        rankings: list[FinalistResult] = []
        confirmed: set[int] = set()
        failed: set[int] = set()
        rounds = range(config.rounds)
        while finalists:
            self._launch_rounds(plans, results, failed, rounds=rounds)
            rankings = rank(
                [trial for trial in finalists if trial.number not in failed],
                baseline=baseline.plan,
                launches=results,
                objective=baseline.objective,
                seed=config.seed,
                num_asked=config.rounds,
            )
            leader = self._to_measure_again(rankings, confirmed, num_rounds=rounds.stop)
            if leader is None:
                break
            plans = {number: all_plans[number] for number in (BASELINE, leader.trial.number)}
            rounds = range(rounds.stop, rounds.stop + config.rounds)
        return rankings

    def _to_measure_again(
        self, rankings: Sequence[FinalistResult], confirmed: set[int], *, num_rounds: int
    ) -> FinalistResult | None:
        """The leader whom more rounds may decide, if there is time; a win by little is confirmed once."""
        context = self.context
        if not context.budget.fits(num_launches=2):
            return None
        leader = winner_of(rankings)
        if leader is not None:
            if leader.is_certain or leader.trial.number in confirmed:
                return None
            confirmed.add(leader.trial.number)
            why = "leads by little, or over few rounds"
        else:
            contenders = [result for result in rankings if result.is_contender]
            if not contenders or num_rounds >= MAX_EXTENDED * context.run.config.study.rounds:
                return None
            leader = max(contenders, key=lambda result: result.comparison.speedup.median)
            why = "leads, but launches scatter too much to be certain"
        context.observer.message(f"trial {leader.trial.number} {why}: it and the baseline are measured again")
        return leader

    def _launch_rounds(
        self, plans: dict[int, Plan], results: RoundResults, failed: set[int], *, rounds: range
    ) -> None:
        """Add measured results to `results[number][round]`; a plan that fails joins `failed`, and cannot win.

        What was lost for reasons outside of the plan only lacks that round. Raises InfrastructureError where
        several launches in a row are lost: nothing measured is not "nothing better".
        """
        context = self.context
        left = list(plans)
        num_lost = 0
        for round_number in rounds:
            if left == [BASELINE]:
                break
            if round_number >= MIN_ROUNDS and not context.budget.fits(num_launches=len(left)):
                context.observer.message(f"time is up after {round_number} final rounds")
                break
            in_turn = order_of_round(left, seed=context.run.config.study.seed, round_number=round_number)
            for turn, number in enumerate(in_turn):
                launch = TrialLaunch(
                    number=number,
                    label=f"{number} round {round_number + 1}",
                    plan=None if number == BASELINE else plans[number],
                    folder=context.run.folder.final_launch(number, round_number=round_number),
                    phase="final",
                )
                num_left = len(left) * (rounds.stop - round_number) - turn
                result = self.launcher.launch(launch, num_left=num_left)
                num_lost = num_lost + 1 if result.outcome is Outcome.INFRA else 0
                if num_lost >= MAX_LOST_IN_A_ROW:
                    raise InfrastructureError(
                        f"{num_lost} launches of the final rounds in a row were lost: {result.reason}; "
                        "mend that, then --resume"
                    )
                if result.is_measured:
                    results[number][round_number] = result
                elif number != BASELINE and result.outcome is not Outcome.INFRA:
                    left.remove(number)
                    failed.add(number)


def winner_of(rankings: Sequence[FinalistResult]) -> FinalistResult | None:
    """The first finalist in order of choice, where it beats the baseline."""
    return next((ranking for ranking in rankings if ranking.is_win), None)
