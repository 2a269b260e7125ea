"""The final rounds as they are run: the best plans and the baseline in turns, until the winner is decided."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quartet_plugin.errors import InfrastructureError
from quartet_plugin.model.launch import LaunchPosition
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial
from quartet_plugin.trial.request import Outcome, TrialResult
from quartet_plugin.tuner.context import TuningContext
from quartet_plugin.tuner.finalists import (
    first_rounds_of,
    is_failure,
    log_values,
    order_of_round,
    rank,
    sequential_test_of,
)
from quartet_plugin.tuner.history_rows import read_events
from quartet_plugin.tuner.launches_left import final_launches
from quartet_plugin.tuner.parity import ParityKeeper
from quartet_plugin.tuner.sequential_search import MAX_LOST_IN_A_ROW
from quartet_plugin.tuner.sequential_test import BASELINE, MIN_ROUNDS, SequentialTest
from quartet_plugin.tuner.time_share import finalists_in_time
from quartet_plugin.tuner.trial_launcher import BaselineScore, TrialLaunch, TrialLauncher, supersede_part
from quartet_plugin.tuner.winner_choice import CLEAR_GAIN, FinalistResult

# Measured results by trial number and round.
type RoundResults = dict[int, dict[int, TrialResult]]

# What "proven" means; the figure is the sequential test's, measured by `python -m benchmarks.final_rounds`.
PROOF_WORDS = "sequential test, false-positive rate below 2 % per search"


def proven_finalists(
    ranked: Sequence[FinishedTrial], *, context: TuningContext, parity: ParityKeeper
) -> list[FinishedTrial]:
    """The `study.top_k` best of `ranked` trials that pass the parity gate where they need a receipt.

    The best of the user's own model has a place among them: another model has to be faster by a clear gain.
    Where time is short there are fewer of them: one at least, and those that an earlier session has begun.
    A plan that fails the gate takes those of its kind with it that had passed before.
    """
    finalists: list[FinishedTrial] = []

    def drop(trial: FinishedTrial, reason: str) -> None:
        context.observer.message(f"trial {trial.number} is not a finalist: {reason}")

    config = context.run.config.study
    proofs = parity.num_runs_to_prove(trial.plan for trial in ranked[: config.top_k])
    count = finalists_in_time(
        config.top_k, num_rounds=config.rounds, num_proofs=proofs, budget=context.budget
    )
    count = max(count, _num_begun(ranked[: config.top_k], context=context))
    ranked = with_own_model(ranked, count=count)
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


def _num_begun(trials: Sequence[FinishedTrial], *, context: TuningContext) -> int:
    """The number of trials that an earlier session has launched in a final round."""
    launches = context.run.folder.final_launches()

    def is_begun(trial: FinishedTrial) -> bool:
        first = context.run.folder.final_launch(trial.number, round_number=0)
        folders = (first, *launches.get(trial.number, {}).values())
        key = trial.plan.key
        return any(context.backend.recorded(folder, plan_key=key) is not None for folder in folders)

    return sum(map(is_begun, trials))


def finalist_words(
    ranked: Sequence[FinishedTrial],
    *,
    finalists: Sequence[FinishedTrial],
    speedups: Mapping[int, float],
    rank_words: str,
) -> str:
    """One line: the finalists, what they are ranked by, each value, and the next plan, which is left out.

    `ranked` are the candidates without those that the parity gate refused; `speedups` are over the baseline,
    by trial. Empty without a candidate.
    """
    if not finalists:
        return ""

    def name(trial: FinishedTrial) -> str:
        speedup = speedups.get(trial.number)
        return f"trial {trial.number}" if speedup is None else f"trial {trial.number} {speedup:.2f}x"

    numbers = [trial.number for trial in finalists]
    left = [trial for trial in ranked if trial.number not in numbers]
    words = (
        f"{len(finalists)} finalists (at most study.top_k) of {len(ranked)} plans that are not clearly "
        f"slower than your command, ranked by {rank_words}: "
    )
    words += ", ".join(map(name, finalists))
    if left:
        words += f"; first plan not included: {name(left[0])}"
    order = [trial.number for trial in ranked]
    if left and order.index(left[0].number) < max(map(order.index, numbers)):
        words += f"; trial {numbers[-1]} is included as the best plan of your own model"
    return words


def with_own_model(ranked: Sequence[FinishedTrial], *, count: int) -> list[FinishedTrial]:
    """The trials, the best of the user's own model moved up to the last of the first `count` places.

    Where there is one place, another model keeps it if its trial was faster by CLEAR_GAIN.
    """
    trials = list(ranked)
    best = next((trial for trial in trials if not trial.plan.is_other_model), None)
    if best is None or best in trials[:count]:
        return trials
    if count == 1 and (trials[0].record.value or 0.0) >= CLEAR_GAIN * (best.record.value or 0.0):
        return trials
    trials.remove(best)
    trials.insert(count - 1, best)
    return trials


def most_iterations(trials: Sequence[FinishedTrial], *, finalists: Sequence[FinishedTrial]) -> int | None:
    """The measured iterations of each launch of the final rounds, where trials choose their own number.

    As many for the baseline as for each finalist: the most that one of their trials needed. None where no
    trial has a number.
    """
    counted = [trial for trial in trials if trial.number == BASELINE]
    return max((trial.record.num_iterations or 0 for trial in (*counted, *finalists)), default=0) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalRounds:
    """Measures finalists against the baseline, round by round, as far as there is time.

    A finalist that is new in a resumed run joins behind the rounds of earlier sessions, so that the baseline
    is launched again in turns with it; whoever was launched before keeps those rounds.
    A round that an earlier session began and did not end is launched again as a whole: the machine may differ
    by now, and launches of one round are compared.
    """

    context: TuningContext
    launcher: TrialLauncher
    baseline: BaselineScore

    def measure(self, finalists: Sequence[FinishedTrial]) -> list[FinalistResult]:
        """The finalists in order of choice, after as many rounds as the sequential test needs.

        Raises InfrastructureError where several launches in a row are lost: nothing measured is not
        "nothing better".
        """
        config, context = self.context.run.config.study, self.context
        if not finalists:
            return []
        plans = {BASELINE: self.baseline.plan, **{trial.number: trial.plan for trial in finalists}}
        progress = self._progress(finalists)
        test = progress.test
        for num_done in itertools.count():
            if test.is_over:
                break
            is_enough = num_done >= test.latest_first_round + MIN_ROUNDS
            if is_enough and not self._has_time(plans, progress, round_number=num_done):
                context.observer.message(f"time limit reached after {num_done} final rounds")
                context.budget.was_short = True
                break
            self._launch_round(plans, progress, round_number=num_done)
            values = log_values(plans, launches=progress.results, objective=self.baseline.objective)
            before = (*test.live,)
            test.decide(values, num_done=num_done + 1, failed=progress.failed.keys())
            self._say_decisions(test, before=before, num_done=num_done + 1)
        return rank(
            finalists,
            baseline=self.baseline.plan,
            launches=progress.results,
            objective=self.baseline.objective,
            seed=config.seed,
            num_asked=config.rounds,
            failed=progress.failed,
            test=test,
        )

    def _progress(self, finalists: Sequence[FinishedTrial]) -> "_Progress":
        """The state before the first round that this session launches; the user reads who is new."""
        config, folder = self.context.run.config.study, self.context.run.folder
        launched, events = folder.final_launches(), read_events(folder.events_file)
        num_begun = folder.num_final_rounds
        test = sequential_test_of(
            finalists,
            num_rounds=config.rounds,
            first_rounds=first_rounds_of(events, launched=launched),
        )
        new = [n for n in test.finalists if n not in launched and test.first_rounds[n] == num_begun > 0]
        if new:
            numbers = ", ".join(map(str, new))
            self.context.observer.message(
                f"new in the final rounds: trial {numbers}; your command is launched again in turns with the "
                f"new plans, from round {num_begun + 1} on"
            )
        return _Progress(
            test=test,
            results={number: {} for number in (BASELINE, *test.finalists)},
            num_left=final_launches(config),
            num_over=num_begun - _is_interrupted(events) if num_begun else 0,
        )

    def _launch_round(self, plans: Mapping[int, Plan], progress: "_Progress", *, round_number: int) -> None:
        """Add the round's measured results; a plan that fails joins `failed`, and cannot win.

        What was lost for reasons outside of the plan only lacks that round.
        """
        config = self.context.run.config.study
        test = progress.test
        numbers = [BASELINE, *test.participants(round_number)]
        in_turn = order_of_round(numbers, seed=config.seed, round_number=round_number)
        launches = [self._launch_of(number, plans[number], round_number=round_number) for number in in_turn]
        if round_number == progress.num_over:
            self._supersede_part(launches, round_number=round_number)
        num_later = progress.num_later(round_number)
        for turn, launch in enumerate(launches):
            if self._is_lost(launch, progress, round_number=round_number):
                continue
            result = self.launcher.launch(launch, num_left=len(launches) - turn + num_later)
            progress.num_lost = progress.num_lost + 1 if result.outcome is Outcome.INFRA else 0
            if progress.num_lost >= MAX_LOST_IN_A_ROW:
                raise InfrastructureError(
                    f"{progress.num_lost} launches of the final rounds in a row were lost: {result.reason}; "
                    "fix that, then add --resume"
                )
            if result.is_measured:
                progress.results[launch.number][round_number] = result
            elif is_failure(launch.number, result):
                progress.failed[launch.number] = round_number

    def _supersede_part(self, launches: Sequence[TrialLaunch], *, round_number: int) -> None:
        """Let the measurements of a round count no more where an earlier session made only a part of them."""
        context, rounds = self.context, self.context.run.folder.final_launches().values()
        folders = [by_round[round_number] for by_round in rounds if round_number in by_round]
        num_superseded = supersede_part(launches, folders=folders, launcher=self.launcher)
        if num_superseded:
            context.events.add("final-round-again", round=round_number + 1, superseded=num_superseded)
            context.observer.message(
                f"final round {round_number + 1} was interrupted: the whole round is launched again, since "
                "the machine may differ by now"
            )

    def _launch_of(self, number: int, plan: Plan, *, round_number: int) -> TrialLaunch:
        """A plan's launch in a round."""
        return TrialLaunch(
            number=number,
            label=f"{number} round {round_number + 1}",
            plan=self.baseline.launched_plan if number == BASELINE else plan,
            folder=self.context.run.folder.final_launch(number, round_number=round_number),
            phase="final",
            position=LaunchPosition.of_round(round_number, num_rounds=self.context.run.config.study.rounds),
        )

    def _is_lost(self, launch: TrialLaunch, progress: "_Progress", *, round_number: int) -> bool:
        """Whether an earlier session went on without the launch: the round's others are of that time."""
        return round_number < progress.num_over and self.launcher.recorded(launch) is None

    def _has_time(self, plans: Mapping[int, Plan], progress: "_Progress", *, round_number: int) -> bool:
        """Whether the round is likely to end in time; one that an earlier session launched takes none."""
        numbers = (BASELINE, *progress.test.participants(round_number))
        launches = (self._launch_of(number, plans[number], round_number=round_number) for number in numbers)
        return self.context.budget.fits(num_launches=len(numbers)) or all(
            self.launcher.recorded(launch) is not None
            or self._is_lost(launch, progress, round_number=round_number)
            for launch in launches
        )

    def _say_decisions(self, test: SequentialTest, *, before: Sequence[int], num_done: int) -> None:
        """Say and log who left, and why the rounds end."""
        gone = [number for number in before if test.dropped.get(number) == num_done]
        proven = [number for number, rounds in test.proven.items() if rounds == num_done]
        if gone or proven or test.is_over:
            self.context.events.add(
                "final-round",
                trial=test.leader,
                round=num_done,
                live=list(test.live),
                dropped=gone,
                proven=sorted(test.proven),
                is_over=test.is_over,
            )
        say = self.context.observer.message
        rounds = f"{num_done} final round{'s' if num_done > 1 else ''}"
        if test.is_over:
            words = faster_words(sorted(test.proven))
            say(f"decided after {rounds}: {words}")
        elif gone:
            say(f"dropped after {rounds}, unlikely to win: trial {', '.join(map(str, gone))}")


def _is_interrupted(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the latest session that launched final rounds did not come to its end."""
    is_interrupted = False
    for event in events:
        if event["kind"] == "launch" and event.get("stage") == "final":
            is_interrupted = True
        elif event["kind"] == "end":
            is_interrupted = False
    return is_interrupted


def faster_words(proven: Sequence[int]) -> str:
    """The trials that the final rounds have proven faster; the winner among several is chosen afterwards."""
    if not proven:
        return "no plan is proven faster"
    if len(proven) == 1:
        return f"trial {proven[0]} is proven faster than your command ({PROOF_WORDS})"
    numbers = f"{', '.join(map(str, proven[:-1]))} and {proven[-1]}"
    return f"trials {numbers} are proven faster than your command ({PROOF_WORDS})"


@dataclass(slots=True, kw_only=True)
class _Progress:
    """The state of the rounds. `num_left` is the estimate of the launches to come, which never grows.

    `num_over` rounds were ended by earlier sessions: what they lack is not launched any more. `failed` has
    the round in which a finalist did.
    """

    test: SequentialTest
    results: RoundResults
    num_left: int
    num_over: int = 0
    failed: dict[int, int] = field(default_factory=dict)
    num_lost: int = 0

    def num_later(self, round_number: int) -> int:
        """The launches expected after this round."""
        num_live = 1 + len(self.test.participants(round_number + 1))
        expected = num_live * (self.test.num_rounds_expected(num_done=round_number) - round_number - 1)
        later = max(0, min(self.num_left - num_live, expected))
        self.num_left = later
        return later


def winner_of(rankings: Sequence[FinalistResult]) -> FinalistResult | None:
    """The first finalist in order of choice, where it beats the baseline."""
    return next((ranking for ranking in rankings if ranking.is_win), None)
