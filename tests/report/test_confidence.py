"""What an interval over few rounds may claim, and what the seconds of a plan are said to be."""

from dataclasses import replace
from itertools import product

import pytest

from quartet_plugin.report.formatting import iteration_spread
from quartet_plugin.report.tables import comparison_lines, confidence, plan_lines
from quartet_plugin.tuner.finalists import bootstrap_median
from tests.report.histories import WINNER, comparison
from tests.tuner.test_finalists import ranked


@pytest.mark.parametrize("num_rounds", range(2, 9))
def test_an_interval_claims_no_more_than_its_rounds_can_hold(num_rounds: int) -> None:
    """The chance that some of n values lie on each side of the true median, by counting."""
    sides = list(product((-1, 1), repeat=num_rounds))
    covered = sum(min(one) < 0 < max(one) for one in sides) / len(sides)
    new = ranked([1.0] * num_rounds, [0.5] * num_rounds)[0].comparison
    assert confidence(new) == 0.95
    of_earlier_release = replace(new, confidence=None)
    assert confidence(of_earlier_release) == pytest.approx(min(0.95, covered))


@pytest.mark.parametrize("num_launches", range(1, 9))
def test_seconds_of_few_launches_are_their_range(num_launches: int) -> None:
    """The bootstrap of a median reaches from the least to the most launch exactly where that is said."""
    seconds = [0.4 + 0.01 * index for index in range(num_launches)]
    drawn = bootstrap_median(seconds, seed=1)
    words = iteration_spread(replace(comparison(1.25).plan, iteration_s=drawn, num_launches=num_launches))
    is_range = (drawn.low, drawn.high) == (seconds[0], seconds[-1])
    assert is_range == ("launch" in words)
    assert is_range != ("95 %" in words)


def test_seconds_and_speedup_name_their_intervals() -> None:
    lines = comparison_lines(comparison(1.25))
    assert lines[0].startswith("baseline  0.500 (0.450 to 0.550, in 5 launches) s/iteration, ")
    assert lines[1].startswith("plan      0.400 (0.360 to 0.440, in 5 launches) s/iteration, ")
    assert lines[2].endswith("measured in turns over 5 rounds (94 % interval)")
    assert lines[3].strip() == "the median of the rounds' ratios, not the ratio of the two lines above"


@pytest.mark.parametrize(
    ("predicted_s", "words"),
    [(0.6, "50 % more than measured"), (0.3, "25 % less than measured"), (0.4, "as measured")],
)
def test_a_prediction_of_a_measured_plan_is_compared_with_it(predicted_s: float, words: str) -> None:
    assert WINNER.prediction is not None
    lines = plan_lines(replace(WINNER, prediction=replace(WINNER.prediction, iteration_s=predicted_s)))
    line = f"predicted {predicted_s:.3f} s per iteration before its launch ({words})"
    assert f"{line}: a speedup of {0.5 / predicted_s:.2f}x" in lines
    assert not any(line.startswith(("rates", "MFU")) for line in lines)
