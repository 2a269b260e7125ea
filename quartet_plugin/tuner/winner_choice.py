"""The choice of the winner: finalists that beat the baseline, compared with each other round by round.

The ratio of two finalists' objectives in the same round is free of drift and of the baseline's own noise; its
median over the rounds decides. The sequential test only says whether a finalist may win at all.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from quartet_plugin.model.measurement import Comparison, FinalChoice
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.receipt import needs_receipt
from quartet_plugin.model.trial_record import FinishedTrial
from quartet_plugin.tuner.sequential_test import MIN_ROUNDS, Effects, level

# The gain with which another model goes before the user's own. Where launches of one plan lie 3 % apart, the
# paired median of five rounds of equal plans is below it in 98 of 100 cases. And another model has to be
# judged anew by what it learns, which less speed does not pay for.
CLEAR_GAIN = 1.05
# The probability that there is a gain at all, for what departs further from the user's command. One of five
# rounds may go the other way, not two.
CLEAR_CHANCE = 0.9

_RULE = (
    "the fastest of the plans proven faster than your command, by the median of their speed ratios in the "
    "same rounds"
)
_RULE_OF_CUSTOM = (
    "; one whose schedule or tensor partition the plugin's runtime executes wins only if it is faster, with "
    f"a probability of at least {100 * CLEAR_CHANCE:.0f} %, than every proven plan of the same model that "
    "the framework's own runtime executes and that stayed until the rounds ended"
)
_RULE_OF_OTHER_MODELS = (
    f"; a different model wins only if it is at least {100 * (CLEAR_GAIN - 1):.0f} % faster than your "
    "command and than every proven plan of your own model, and faster than the latter with a probability of "
    f"at least {100 * CLEAR_CHANCE:.0f} %"
)

# The order of `in_order_of_choice` where none may win.
NEAREST_RULE = "chosen by the highest lower end of the 95 % interval of the speedup"

NUM_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalistResult:
    """A candidate after the final rounds. It was measured in `rounds`, as its `comparison` says.

    `proven_after` is the number of rounds after which the sequential test had it faster than the baseline,
    None where it never did. `is_live` says that it stayed until the rounds ended, `effects` is the fit of all
    launches.
    """

    trial: FinishedTrial
    comparison: Comparison
    rounds: tuple[int, ...]
    proven_after: int | None
    is_live: bool
    effects: Effects

    @property
    def is_win(self) -> bool:
        """Whether it is proven faster than the baseline, another model by a clear gain."""
        return self.proven_after is not None and self.comparison.speedup.median >= self._least_gain

    @property
    def _least_gain(self) -> float:
        return CLEAR_GAIN if self.is_other_model else 1.0

    @property
    def is_other_model(self) -> bool:
        """Whether it trains another shape than the user's own (class D)."""
        return self.trial.plan.is_other_model

    @property
    def departure(self) -> int:
        """How far its plan departs from the user's command."""
        return departure(self.trial.plan)


def departure(plan: Plan) -> int:
    """How far a plan departs from the user's command: 2 for another model, 1 for the plugin's runtime.

    The sum where it does both. Of two plans the one that departs further has to be clearly faster.
    """
    return 2 * plan.is_other_model + needs_receipt(plan)


def in_order_of_choice(results: Sequence[FinalistResult], *, seed: int) -> list[FinalistResult]:
    """The winner, the runner-up and whoever else may win, then the others by their lower end.

    A plan wins only where its gain is clear over each that departs less from the user's command. After the
    winner the comparison alone counts, so that the runner-up is the plan that came nearest.
    """
    left = [result for result in results if result.is_win]
    others = [result for result in results if not result.is_win]
    ordered = []
    pool = [
        result
        for result in left
        if all(_is_clear(result, other, seed=seed) for other in left if other.departure < result.departure)
    ]
    while left:
        ordered.append(_fastest(pool))
        left = pool = [result for result in left if result.trial.number != ordered[-1].trial.number]
    others.sort(key=lambda result: (-result.comparison.speedup.low, result.trial.number))
    return [*ordered, *others]


def rule_of(results: Sequence[FinalistResult]) -> str:
    """The rule by which the winner is chosen among these finalists, in words."""
    has_other_model = any(result.is_other_model for result in results)
    has_both_runtimes = len({_is_custom(result) for result in results}) == 2
    return (
        f"{_RULE}{_RULE_OF_CUSTOM if has_both_runtimes else ''}"
        f"{_RULE_OF_OTHER_MODELS if has_other_model else ''}"
    )


def choice_of(ordered: Sequence[FinalistResult], *, seed: int) -> FinalChoice | None:
    """The choice in numbers, of finalists as `in_order_of_choice` has them; None where none wins."""
    if not ordered or not ordered[0].is_win:
        return None
    winner, second = ordered[0], ordered[1] if len(ordered) > 1 else None
    if second is None:
        return FinalChoice(rule=rule_of(ordered))
    return FinalChoice(
        rule=rule_of(ordered),
        runner_up=second.trial.number,
        gain=math.exp(log_gain(winner, second)),
        chance_better=chance_better(winner, second, seed=seed),
        num_rounds=len(_log_ratios(winner, second)),
        is_runner_up_win=second.is_win,
        is_runner_up_other_model=second.is_other_model,
        is_only_runner_up_custom=_is_custom(second) and not _is_custom(winner),
        proof_level=None if second.proven_after is not None else level(len(second.rounds)),
    )


def _is_custom(result: FinalistResult) -> bool:
    """Whether the plugin's runtime executes its plan."""
    return needs_receipt(result.trial.plan)


def log_gain(first: FinalistResult, second: FinalistResult) -> float:
    """The logarithm of the first's objective over the second's: the median over the rounds that they share.

    With fewer than MIN_ROUNDS of them, which lost launches can leave, that of their speedups.
    """
    shared = _log_ratios(first, second)
    if len(shared) >= MIN_ROUNDS:
        return statistics.median(shared)
    return math.log(first.comparison.speedup.median) - math.log(second.comparison.speedup.median)


def chance_better(first: FinalistResult, second: FinalistResult, *, seed: int) -> float | None:
    """The probability that the first is faster; None where they share fewer than MIN_ROUNDS rounds.

    Between the two runtimes it is that of the sequential test's fit. Elsewhere it is how often the median of
    resampled rounds says so: a paired bootstrap, in which a tie counts half. Rounds of equal plans all go one
    way with 2^-n, so no more certainty than that is given.
    """
    shared = _log_ratios(first, second)
    if len(shared) < MIN_ROUNDS:
        return None
    if first.is_other_model == second.is_other_model and first.departure != second.departure:
        return first.effects.chance(first.trial.number, second.trial.number)
    generator = random.Random(seed)  # noqa: S311
    medians = [statistics.median(generator.choices(shared, k=len(shared))) for _ in range(NUM_RESAMPLES)]
    chance = (sum(gain > 0 for gain in medians) + 0.5 * sum(gain == 0 for gain in medians)) / NUM_RESAMPLES
    least = 0.5 ** len(shared)
    return min(max(chance, least), 1.0 - least)


def _is_clear(first: FinalistResult, second: FinalistResult, *, seed: int) -> bool:
    """Whether the first's gain over the second, which departs less, is enough to be chosen before it."""
    if first.is_other_model == second.is_other_model:
        chance_of_fit = first.effects.chance(first.trial.number, second.trial.number)
        return not second.is_live or chance_of_fit >= CLEAR_CHANCE
    if log_gain(first, second) < math.log(CLEAR_GAIN):
        return False
    chance = chance_better(first, second, seed=seed)
    return chance is not None and chance >= CLEAR_CHANCE


def _fastest(pool: Sequence[FinalistResult]) -> FinalistResult:
    """The finalist that no other beats; of several, or where each is beaten, the best median speedup.

    Three finalists can beat each other in a circle: medians of ratios are no order.
    """
    unbeaten = [first for first in pool if all(log_gain(first, second) >= 0 for second in pool)]
    return min(unbeaten or pool, key=lambda result: (-result.comparison.speedup.median, result.trial.number))


def _log_ratios(first: FinalistResult, second: FinalistResult) -> list[float]:
    """The logarithms of the first's objective over the second's in every round that both were measured in."""
    ratios = dict(zip(second.rounds, second.comparison.round_ratios, strict=True))
    return [
        math.log(ratio) - math.log(ratios[round_number])
        for round_number, ratio in zip(first.rounds, first.comparison.round_ratios, strict=True)
        if round_number in ratios
    ]
