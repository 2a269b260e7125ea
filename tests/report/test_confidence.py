"""What an interval over few rounds may claim."""

from itertools import product

import pytest

from quartet_plugin.report.tables import confidence


@pytest.mark.parametrize("num_rounds", range(2, 9))
def test_an_interval_claims_no_more_than_its_rounds_can_hold(num_rounds: int) -> None:
    """The chance that some of n values lie on each side of the true median, by counting."""
    sides = list(product((-1, 1), repeat=num_rounds))
    covered = sum(min(one) < 0 < max(one) for one in sides) / len(sides)
    assert confidence(num_rounds) == pytest.approx(min(0.95, covered))
