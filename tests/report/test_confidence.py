"""What an interval over few rounds may claim."""

from dataclasses import replace
from itertools import product

import pytest

from quartet_plugin.report.tables import confidence
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
