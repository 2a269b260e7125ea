"""Which iterations of a trial are measured, and when it has measured enough: one rule for ranks and tuner.

The first iterations of a job are slow: kernels compile, graphs are captured, caches fill. Where the start of
the measured iterations is not fixed, it is the one with the least standard error of the mean of what follows
(MSER, White 1997), taken only where what it leaves out was clearly slower than what follows.

A trial that may end early does so when the median of its measured iterations is known as well as is useful,
or is slower than a limit for certain. The first rule looks at the scatter alone and the second one leaves a
plan out of the final rounds, so neither favours a plan that was lucky.
"""

import statistics
from collections.abc import Sequence
from typing import Annotated, Literal

from quartet_plugin.model.schema import Bounds, record

EarlyEndReason = Literal["precise", "slower"]

# What a later start leaves out is slower than the rest by this share at least, and by as many deviations.
_LEAST_CHANGE, _DEVIATIONS = 0.05, 3.0
# Fewer iterations show no scatter.
_LEAST_JUDGED = 3
# Standard errors between a median and a limit that it is above for certain, and the least standard error:
# a few iterations may agree by chance.
_CERTAIN, _LEAST_ERROR = 2.5, 0.01
# From the median absolute deviation to the standard deviation of normal values, and what a few values need
# beside it (Croux and Rousseeuw 1992). Of fewer values than these two may agree while the others do not.
_NORMAL_MAD = 1.4826
_FEW = {6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
# From the standard error of the mean of normal values to that of their median.
_MEDIAN_OVER_MEAN = 1.2533


@record
class EarlyEnd:
    """When a trial ends before its last iteration: after `least` measured ones or more.

    `precision` is the relative standard error of the median that is small enough. A median that is above
    `slower_than_s` seconds for certain ends the trial as well (None: no limit).
    """

    least: Annotated[int, Bounds(ge=1, le=100_000)]
    precision: Annotated[float, Bounds(gt=0, lt=1)]
    slower_than_s: Annotated[float, Bounds(gt=0, le=1e10)] | None = None


def first_measured(times: Sequence[float], *, least: int, most: int, num_measured: int) -> int:
    """The number of iterations before the measured ones: from `least` to `most`.

    `times` are the seconds of all iterations so far; `num_measured` of them or more are left to be measured
    where there are as many after the first `least`.
    """
    last = min(most, len(times) - num_measured)
    if last <= least:
        return least
    start = min(range(least, last + 1), key=lambda index: (_mean_error(times[index:]), index))
    left_out, rest = times[least:start], times[start:]
    if not left_out:
        return least
    middle = statistics.median(rest)
    change = max(_LEAST_CHANGE * middle, _DEVIATIONS * _deviation(rest))
    return start if statistics.median(left_out) > middle + change else least


def relative_error(times: Sequence[float]) -> float:
    """The standard error of the median, relative to it; infinite for fewer than two values."""
    middle = statistics.median(times) if len(times) > 1 else 0.0
    if not middle > 0:
        return float("inf")
    return float(_MEDIAN_OVER_MEAN * _deviation(times) / middle / len(times) ** 0.5)


def why_enough(times: Sequence[float], rule: EarlyEnd, *, num_later: int = 0) -> EarlyEndReason | None:
    """Why the measured iterations are enough, None where they are not.

    `num_later` more will be measured whatever is decided: they count for the number and for the precision.
    A median is above the limit only where the latest iterations are: it may be one of a start that is slow.
    """
    count = len(times)
    if count < _LEAST_JUDGED or count + num_later < rule.least:
        return None
    error = relative_error(times)
    if rule.slower_than_s is not None and count >= rule.least:
        surely_above = statistics.median(times) * (1.0 - _CERTAIN * max(error, _LEAST_ERROR))
        if min(surely_above, *times[-_LEAST_JUDGED:]) > rule.slower_than_s:
            return "slower"
    return "precise" if error * float(count / (count + num_later)) ** 0.5 <= rule.precision else None


def _mean_error(times: Sequence[float]) -> float:
    """The squared standard error of the mean, as MSER has it."""
    mean = sum(times) / len(times)
    return sum((seconds - mean) ** 2 for seconds in times) / float(len(times)) ** 2


def _deviation(times: Sequence[float]) -> float:
    """The standard deviation, a robust one where there are values enough."""
    count, middle = len(times), statistics.median(times)
    if count < min(_FEW):
        return statistics.stdev(times) if count > 1 else 0.0
    deviation = statistics.median(abs(seconds - middle) for seconds in times)
    return float(_NORMAL_MAD * _FEW.get(count, count / (count - 0.8)) * deviation)
