"""Medians with their spread, from few noisy runs."""

import random
import statistics
from collections.abc import Sequence

from quartet_plugin.model.measurement import Interval

NUM_RESAMPLES = 10_000


def bootstrap_median(
    values: Sequence[float], *, seed: int, num_resamples: int = NUM_RESAMPLES, level: float = 0.95
) -> Interval:
    """The median of `values`, at least one, with its percentile bootstrap interval (Efron 1979).

    With five values the interval of 95 % reaches from the smallest to the largest (94 %, with three 75 %);
    it is never wider.
    """
    generator = random.Random(seed)  # noqa: S311
    count = len(values)
    outside = int(0.5 * (1.0 - level) * (num_resamples - 1))
    medians = sorted(statistics.median(generator.choices(values, k=count)) for _ in range(num_resamples))
    return Interval(
        median=statistics.median(values),
        low=medians[outside],
        high=medians[-1 - outside],
    )
