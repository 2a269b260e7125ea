"""Divisors of a number of processes or sequences, and the legal numbers beside one that is not."""

import math
from collections.abc import Sequence


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def nearest_words(value: int, legal: Sequence[int]) -> str:
    """`; nearest: A or B`, the legal values below and above `value`; "" where there is none."""
    below = [choice for choice in legal if choice < value]
    above = [choice for choice in legal if choice > value]
    nearest = [str(choice) for choice in (*below[-1:], *above[:1])]
    return f"; nearest: {' or '.join(nearest)}" if nearest else ""
