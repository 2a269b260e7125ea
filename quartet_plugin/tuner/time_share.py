"""How the search and the final rounds share a time that is too short for all that was asked.

The search gives half of the time after the baseline to the final rounds, at most. Trials measure fewer
iterations, so that several of them fit into the other half, and fewer plans go to the final rounds, one if
need be.
"""

import math

from quartet_plugin.tuner.context import TimeBudget

# Launches that half of the time should hold: a handful of trials, and what the parity gate needs for them.
_LAUNCHES = 12
# The fewest measured iterations: a median of three has a neighbour on either side, one more for a slow one.
_LEAST_MEASURED = 4


def iterations_in_time(asked: int, *, iteration_s: float, budget: TimeBudget) -> int:
    """The measured iterations of a trial, at most those `asked`, where the baseline's took `iteration_s`."""
    if budget.limit_s is None:
        return asked
    excess_s = budget.launch_s - 0.5 * budget.left_s / _LAUNCHES
    if excess_s <= 0:
        return asked
    return min(asked, max(_LEAST_MEASURED, asked - math.ceil(excess_s / iteration_s)))


def finalists_in_time(asked: int, *, num_rounds: int, num_proofs: int, budget: TimeBudget) -> int:
    """The plans that the final rounds can measure beside the baseline: at most those `asked`, at least one.

    `num_proofs` launches of the parity gate come first. Several plans need all of the `num_rounds`, one
    as few as decide.
    """
    for count in range(asked, 1, -1):
        if budget.launch_s * (num_rounds * (count + 1) + num_proofs) <= budget.left_s:
            return count
    return 1
