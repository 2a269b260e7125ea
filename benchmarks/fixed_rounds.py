"""The final rounds of earlier releases, which the sequential test is compared with: rounds of a fixed number.

All finalists were launched in five rounds. A plan won where the bootstrap interval of its median ratio lay
above 1: 95 %, 99 % after more rounds. A win by less than 1.10 was measured once more over as many rounds, and
so was the leader where none won but its median ratio was above 1.02, up to four times the rounds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_EXTENDED = 4
CONFIRM_BELOW = 1.10
CONFIRM_ROUNDS = 5
LEAST_LEAD = 1.02
NUM_RESAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRoundsResult:
    """The index of the finalist that won, None without a winner, and the launches that it took."""

    winner: int | None
    num_launches: int


def fixed_rounds(seconds: NDArray[np.float64], *, rounds: int, seed: int) -> FixedRoundsResult:
    """The result for launches of these seconds: a row a plan, the baseline's first, a column a round.

    There are MAX_EXTENDED times `rounds` columns.
    """
    generator = np.random.default_rng(seed)
    ratios = seconds[0] / seconds[1:]
    counts = [rounds] * len(ratios)
    num_launches, num_done = rounds * len(seconds), rounds
    is_confirmed: set[int] = set()
    while True:
        results = [
            _judged(row[:count], rounds=rounds, generator=generator)
            for row, count in zip(ratios, counts, strict=True)
        ]
        wins = [index for index, (is_win, _) in enumerate(results) if is_win]
        if wins:
            leader = max(wins, key=lambda index: results[index][1])
            is_certain = counts[leader] >= CONFIRM_ROUNDS and results[leader][1] >= CONFIRM_BELOW
            if is_certain or leader in is_confirmed:
                return FixedRoundsResult(winner=leader, num_launches=num_launches)
            is_confirmed.add(leader)
        else:
            contenders = [index for index, (_, median) in enumerate(results) if median >= LEAST_LEAD]
            if not contenders or num_done >= MAX_EXTENDED * rounds:
                return FixedRoundsResult(winner=None, num_launches=num_launches)
            leader = max(contenders, key=lambda index: results[index][1])
        # Rounds that the leader did not take part in are not among its ratios.
        later = ratios[leader][num_done : num_done + rounds]
        ratios[leader][counts[leader] : counts[leader] + len(later)] = later
        counts[leader] += len(later)
        num_done += rounds
        num_launches += 2 * rounds
        if num_done > MAX_EXTENDED * rounds:
            return FixedRoundsResult(winner=leader if wins else None, num_launches=num_launches)


def _judged(
    ratios: Sequence[float] | NDArray[np.float64], *, rounds: int, generator: np.random.Generator
) -> tuple[bool, float]:
    """Whether a finalist won with these ratios, and their median."""
    values = np.asarray(ratios)
    drawn = values[generator.integers(len(values), size=(NUM_RESAMPLES, len(values)))]
    medians = np.sort(np.median(drawn, axis=1))
    level = 0.95 if len(values) <= rounds else 0.99
    low = medians[math.floor(0.5 * (1.0 - level) * (NUM_RESAMPLES - 1))]
    return bool(low > 1.0), float(np.median(values))
