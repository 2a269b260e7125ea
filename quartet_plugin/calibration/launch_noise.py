"""How far two launches of one plan lie apart: about as far as the iterations inside of each.

So it was in 25 searches on two shared cores, 8.9 against 7.8 % (`python -m benchmarks.launch_noise`): what
moves iterations there lasts for longer than a launch. A launch of many iterations is not as sure as their
number would have it, and a study that takes it for that follows luck.
"""

import math
from collections.abc import Iterable

from quartet_plugin.model.trial_record import TrialRecord

# Relative deviation of launches where iterations say nothing of it, and as many of them as that weighs.
LEAST = 0.02
_ASSUMED = 4


def launch_noise(trials: Iterable[TrialRecord]) -> float:
    """The relative deviation of a launch's median, from all measured trials; never below LEAST.

    A trial's `spread` is the robust standard error of its iterations.
    """
    found, num = _ASSUMED * LEAST**2, float(_ASSUMED)
    for record in trials:
        if record.spread is not None and record.num_iterations:
            found += record.num_iterations * (record.spread**2 * record.num_iterations)
            num += record.num_iterations
    return max(LEAST, math.sqrt(found / num))
