"""The final rounds as they are run: the best plans and the baseline in turns, until it is decided."""

from collections.abc import Sequence
from dataclasses import dataclass

from quartet_plugin.errors import InfrastructureError
from quartet_plugin.model.launch import Observer
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial
from quartet_plugin.trial.request import Outcome, TrialResult
from quartet_plugin.tuner.finalists import (
    BASELINE,
    MAX_EXTENDED,
    MIN_ROUNDS,
    FinalistResult,
    order_of_round,
    rank,
)
from quartet_plugin.tuner.run_folder import TuningRun
from quartet_plugin.tuner.sequential_search import MAX_LOST_IN_A_ROW
from quartet_plugin.tuner.time_budget import TimeBudget
from quartet_plugin.tuner.trial_launcher import BaselineScore, TrialLauncher

type Found = dict[int, dict[int, TrialResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalRounds:
    """Measures candidates against the baseline, round by round, as far as there is time."""

    run: TuningRun
    launching: TrialLauncher
    budget: TimeBudget
    observer: Observer

    def measure(self, chosen: Sequence[FinishedTrial], *, yardstick: BaselineScore) -> list[FinalistResult]:
        """The candidates, ranked. A leader by little, over few rounds or unsurely is measured again."""
        config = self.run.config.study
        every = {BASELINE: yardstick.plan, **{trial.number: trial.plan for trial in chosen}}
        plans = every
        found: Found = {number: {} for number in plans}
        rankings: list[FinalistResult] = []
        confirmed: set[int] = set()
        failed: set[int] = set()
        rounds = range(config.rounds)
        while chosen:
            self._launch_rounds(plans, found, failed, rounds=rounds)
            rankings = rank(
                [trial for trial in chosen if trial.number not in failed],
                baseline=yardstick.plan,
                launches=found,
                objective=yardstick.objective,
                seed=config.seed,
                num_asked=config.rounds,
            )
            leader = self._to_measure_again(rankings, confirmed, num_rounds=rounds.stop)
            if leader is None:
                break
            plans = {number: every[number] for number in (BASELINE, leader.trial.number)}
            rounds = range(rounds.stop, rounds.stop + config.rounds)
        return rankings

    def _to_measure_again(
        self, rankings: Sequence[FinalistResult], confirmed: set[int], *, num_rounds: int
    ) -> FinalistResult | None:
        """Whom more rounds may decide, if there is time; a win by little is confirmed once."""
        if not self.budget.fits(num_launches=2):
            return None
        leader = winner_of(rankings)
        if leader is not None:
            if leader.is_certain or leader.trial.number in confirmed:
                return None
            confirmed.add(leader.trial.number)
            why = "leads by little, or over few rounds"
        else:
            contenders = [one for one in rankings if one.is_contender]
            if not contenders or num_rounds >= MAX_EXTENDED * self.run.config.study.rounds:
                return None
            leader = max(contenders, key=lambda one: one.comparison.speedup.median)
            why = "leads, but launches scatter too much to be certain"
        self.observer.message(f"trial {leader.trial.number} {why}: it and the baseline are measured again")
        return leader

    def _launch_rounds(
        self, plans: dict[int, Plan], found: Found, failed: set[int], *, rounds: range
    ) -> None:
        """Add measured results to `found[number][round]`; a plan that fails once is `failed` and cannot win.

        What was lost for reasons outside of the plan only lacks that round. Raises InfrastructureError where
        several launches in a row are lost: nothing measured is not "nothing better".
        """
        left = list(plans)
        num_lost = 0
        for round_number in rounds:
            if left == [BASELINE]:
                break
            if round_number >= MIN_ROUNDS and not self.budget.fits(num_launches=len(left)):
                self.observer.message(f"time is up after {round_number} final rounds")
                break
            seed = self.run.config.study.seed
            in_turn = order_of_round(left, seed=seed, round_number=round_number)
            for at, number in enumerate(in_turn):
                num_left = len(left) * (rounds.stop - round_number) - at
                result = self._launch(plans, number, round_number=round_number, num_left=num_left)
                num_lost = num_lost + 1 if result.outcome is Outcome.INFRA else 0
                if num_lost >= MAX_LOST_IN_A_ROW:
                    raise InfrastructureError(
                        f"{num_lost} launches of the final rounds in a row were lost: {result.reason}; "
                        "mend that, then --resume"
                    )
                if result.is_measured:
                    found[number][round_number] = result
                elif number != BASELINE and result.outcome is not Outcome.INFRA:
                    left.remove(number)
                    failed.add(number)

    def _launch(
        self, plans: dict[int, Plan], number: int, *, round_number: int, num_left: int
    ) -> TrialResult:
        return self.launching.launch(
            None if number == BASELINE else plans[number],
            number=number,
            folder=self.run.folder.final_launch(number, round_number=round_number),
            label=f"{number} round {round_number + 1}",
            stage="final",
            num_left=num_left,
        )


def winner_of(rankings: Sequence[FinalistResult]) -> FinalistResult | None:
    """The first ranking that wins."""
    return next((ranking for ranking in rankings if ranking.is_win), None)
