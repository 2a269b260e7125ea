"""The final rounds as they are run: the best plans and the baseline in turns, until the winner is decided."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quartet_plugin.errors import InfrastructureError
from quartet_plugin.model.launch import LaunchPosition
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
from quartet_plugin.tuner.launches_left import final_launches, repeated_launches
from quartet_plugin.tuner.parity import ParityKeeper
from quartet_plugin.tuner.sequential_search import MAX_LOST_IN_A_ROW
from quartet_plugin.tuner.time_share import finalists_in_time
from quartet_plugin.tuner.trial_launcher import BaselineScore, TrialLaunch, TrialLauncher
from quartet_plugin.tuner.winner_choice import MIN_ROUNDS, NUM_RESAMPLES, FinalistResult

# Enough for the time that is left, which is said before every round.
_RESAMPLES_OF_AN_ESTIMATE = 300

# Measured results by trial number and round.
type RoundResults = dict[int, dict[int, TrialResult]]


def proven_finalists(
    ranked: Sequence[FinishedTrial], *, context: TuningContext, parity: ParityKeeper
) -> list[FinishedTrial]:
    """The `study.top_k` best of `ranked` trials that pass the parity gate where they need a receipt.

    Where time is short there are fewer of them, one at least.
    A plan that fails the gate takes those of its kind with it that had passed before.
    """
    finalists: list[FinishedTrial] = []

    def drop(trial: FinishedTrial, reason: str) -> None:
        context.observer.message(f"trial {trial.number} is out: {reason}")

    config = context.run.config.study
    proofs = parity.num_runs_to_prove(trial.plan for trial in ranked[: config.top_k])
    count = finalists_in_time(
        config.top_k, num_rounds=config.rounds, num_proofs=proofs, budget=context.budget
    )
    for index, trial in enumerate(ranked):
        if len(finalists) == count:
            break
        context.check_stop()
        others = (other.plan for other in ranked[index + 1 : index + count - len(finalists)])
        num_left = parity.num_runs_to_prove(others) + final_launches(config)
        refusal = parity.prove(trial.plan, trial=trial.number, num_left=num_left)
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

        def ranked(num_resamples: int = NUM_RESAMPLES) -> list[FinalistResult]:
            return rank(
                [trial for trial in finalists if trial.number not in failed],
                baseline=baseline.plan,
                launches=results,
                objective=baseline.objective,
                seed=config.seed,
                num_asked=config.rounds,
                num_resamples=num_resamples,
            )

        def num_repeated(num_to_come: int) -> int:
            """Launches of the next rounds, where the rounds so far do not rule them out."""
            so_far = ranked(_RESAMPLES_OF_AN_ESTIMATE)
            is_open = not so_far or self._undecided(
                so_far, confirmed, num_rounds=rounds.stop, num_to_come=num_to_come
            )
            return repeated_launches(config) if is_open else 0

        while finalists:
            self._launch_rounds(plans, results, failed, rounds=rounds, num_repeated=num_repeated)
            rankings = ranked()
            undecided = self._undecided(rankings, confirmed, num_rounds=rounds.stop)
            if undecided is None or not self.context.budget.fits(num_launches=2):
                break
            leader, why = undecided.trial.number, "leads, but launches scatter too much to be certain"
            if undecided.is_win:
                confirmed.add(leader)
                why = "leads by little, or over few rounds"
            self.context.observer.message(f"trial {leader} {why}: it and the baseline are measured again")
            plans = {number: all_plans[number] for number in (BASELINE, leader)}
            rounds = range(rounds.stop, rounds.stop + config.rounds)
        return rankings

    def _undecided(
        self,
        rankings: Sequence[FinalistResult],
        confirmed: set[int],
        *,
        num_rounds: int,
        num_to_come: int = 0,
    ) -> FinalistResult | None:
        """The leader after `num_rounds` rounds whom more may decide; a win by little is confirmed once.

        Of the rounds `num_to_come` are still to come: they are taken to say what those before say.
        """
        leader = winner_of(rankings)
        if leader is not None:
            is_over = leader.is_certain_after(len(leader.ratios) + num_to_come)
            return None if is_over or leader.trial.number in confirmed else leader
        contenders = [result for result in rankings if result.is_contender]
        if not contenders or num_rounds >= MAX_EXTENDED * self.context.run.config.study.rounds:
            return None
        return max(contenders, key=lambda result: result.comparison.speedup.median)

    def _launch_rounds(
        self,
        plans: dict[int, Plan],
        results: RoundResults,
        failed: set[int],
        *,
        rounds: range,
        num_repeated: Callable[[int], int],
    ) -> None:
        """Add measured results to `results[number][round]`; a plan that fails joins `failed`, and cannot win.

        `num_repeated` says for a number of rounds to come how many launches may follow them.

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
            num_after = num_repeated(rounds.stop - round_number)
            in_turn = order_of_round(left, seed=context.run.config.study.seed, round_number=round_number)
            for turn, number in enumerate(in_turn):
                launch = TrialLaunch(
                    number=number,
                    label=f"{number} round {round_number + 1}",
                    plan=self.baseline.launched_plan if number == BASELINE else plans[number],
                    folder=context.run.folder.final_launch(number, round_number=round_number),
                    phase="final",
                    position=LaunchPosition.of_round(
                        round_number, num_rounds=context.run.config.study.rounds
                    ),
                )
                num_left = len(left) * (rounds.stop - round_number) - turn + num_after
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
