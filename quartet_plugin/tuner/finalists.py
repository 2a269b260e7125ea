"""The final rounds: the best plans and the baseline measured again, in turns, and who wins.

A study's best value is partly luck. Each round launches every candidate and the baseline once, in an order of
its own, so that slow drift of the machine meets all alike; what counts is the ratio inside a round.
"""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quartet_plugin.model.canonical import derived_seed
from quartet_plugin.model.measurement import Comparison, Interval, Measurement, Objective
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.score import Score, score, score_of_median
from quartet_plugin.model.trial_record import FinishedTrial
from quartet_plugin.trial.request import TrialResult
from quartet_plugin.tuner.intervals import bootstrap_median

# A candidate this much below the baseline when it was searched is not measured again: between two runs
# of one plan lie a few percent.
CANDIDATE_MARGIN = 0.93
MIN_ROUNDS = 3

# A speedup below this is inside what two runs of one plan may differ by, so it is measured as often again.
CONFIRM_BELOW = 1.10
# A plan that leads by less, or that after so many times the rounds is still not certain, is given up.
LEAST_LEAD = 1.02
MAX_EXTENDED = 4
# Who is looked at again and again wins by luck more easily, so the later looks ask for more
# (`python -m benchmarks.final_rounds`).
LATER_LEVEL = 0.99
# With fewer rounds chance alone wins too often: of 3 rounds all go one way in every fourth case.
CONFIRM_ROUNDS = 5

BASELINE = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalistResult:
    """A candidate after the final rounds. `ratios` are its objective over the baseline's, a round each.

    `surely` is what its speedup is above: the lower end of the interval, a wider one after more rounds than
    were asked for.
    """

    trial: FinishedTrial
    comparison: Comparison
    ratios: tuple[float, ...]
    surely: float

    @property
    def is_win(self) -> bool:
        """Whether it is faster for certain."""
        return self.surely > 1.0

    @property
    def is_contender(self) -> bool:
        """Whether more rounds may show a win that these do not."""
        return not self.is_win and self.comparison.speedup.median >= LEAST_LEAD

    @property
    def is_certain(self) -> bool:
        """Whether a win needs no more rounds."""
        return len(self.ratios) >= CONFIRM_ROUNDS and self.comparison.speedup.median >= CONFIRM_BELOW


def candidates(
    trials: Sequence[FinishedTrial],
    *,
    baseline_value: float,
    top_k: int,
    believed: Mapping[int, float] | None = None,
) -> list[FinishedTrial]:
    """The best measured plans, each once and without the baseline; none that was clearly slower than it.

    `believed` are values by trial number that know more than the trial's own launch, which may have been
    lucky: they order the plans.
    """
    values = believed or {}

    def worth(trial: FinishedTrial) -> float:
        return values.get(trial.number, trial.record.value or 0.0)

    baseline = next((r.plan.execution for r in trials if r.number == BASELINE), None)
    best: dict[str, FinishedTrial] = {}
    for trial in trials:
        record = trial.record
        if (
            record.verdict != "measured"
            or record.value is None
            or record.repeats is not None
            or record.is_depth_proxy
        ):
            continue
        if trial.plan.execution == baseline or record.value < CANDIDATE_MARGIN * baseline_value:
            continue
        best.setdefault(trial.plan.execution, trial)
    ranked = sorted(best.values(), key=lambda one: (-worth(one), one.number))
    return ranked[:top_k]


def order_of_round(numbers: Sequence[int], *, seed: int, round_number: int) -> list[int]:
    """The launches of one round, trial numbers in random order; the same for the same seed."""
    shuffled = sorted(numbers)
    random.Random(derived_seed(seed, round_number, "final")).shuffle(shuffled)  # noqa: S311
    return shuffled


def rank(
    trials: Sequence[FinishedTrial],
    *,
    baseline: Plan,
    launches: Mapping[int, Mapping[int, TrialResult]],
    objective: Objective,
    seed: int,
    num_asked: int,
) -> list[FinalistResult]:
    """Every candidate that was measured in a round with the baseline, the best lower end first.

    `launches[number][round]` are the final launches' measured results, the baseline's under number 0;
    `num_asked` is how many rounds there are for all.
    """
    ranked = []
    own = launches.get(BASELINE, {})
    for trial in trials:
        theirs = launches.get(trial.number, {})
        rounds = sorted(own.keys() & theirs.keys())
        if len(rounds) < MIN_ROUNDS:
            continue
        ratios = tuple(
            _value(trial.plan, theirs[at], objective) / _value(baseline, own[at], objective) for at in rounds
        )
        comparison = Comparison(
            objective=objective,
            plan=_measurement(trial.plan, [theirs[at] for at in rounds], seed=seed),
            baseline=_measurement(baseline, [own[at] for at in rounds], seed=seed),
            speedup=bootstrap_median(ratios, seed=seed),
        )
        surely = comparison.speedup.low
        if rounds[-1] >= num_asked:
            surely = bootstrap_median(ratios, seed=seed, level=LATER_LEVEL).low
        ranked.append(FinalistResult(trial=trial, comparison=comparison, ratios=ratios, surely=surely))
    return sorted(ranked, key=lambda r: (-r.comparison.speedup.low, r.trial.number))


def _value(plan: Plan, result: TrialResult, objective: Objective) -> float:
    return score(plan, iteration_s=result.iteration_s).value(objective)


def _measurement(plan: Plan, results: Sequence[TrialResult], *, seed: int) -> Measurement:
    medians = [statistics.median(result.iteration_s) for result in results]
    interval: Interval = bootstrap_median(medians, seed=seed)
    typical: Score = score_of_median(plan, iteration_s=interval.median)
    return Measurement(
        iteration_s=interval,
        tokens_per_s=typical.tokens_per_s,
        model_flops_per_s_per_device=typical.model_flops_per_s_per_device,
        peak_memory_bytes=max(result.peak_memory_bytes for result in results),
        num_launches=len(results),
        num_iterations=sum(len(result.iteration_s) for result in results),
    )
