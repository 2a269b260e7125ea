"""What a plan's parameters are taken from, and the helpers of those who take them."""

from collections.abc import Sequence
from typing import Protocol


class ParamSource(Protocol):
    """The source of one plan's parameters: a sampler, a recorded point, or chance."""

    def category(self, name: str, choices: Sequence[str]) -> str:
        """One of `choices`, of which there are at least two."""

    def integer(self, name: str, low: int, high: int) -> int:
        """A number from `low` to `high`, both included, which differ."""

    def unit_float(self, name: str) -> float:
        """A number from -1 to 1, which may be a fraction."""

    def attribute(self, name: str) -> str | None:
        """The text that is kept with the parameters under `name`, which no sampler chooses; None without."""


def choose(source: ParamSource, name: str, choices: Sequence[str]) -> str:
    """The source's choice; the only one is no parameter."""
    return choices[0] if len(choices) == 1 else source.category(name, choices)


def doubling(most: int) -> tuple[str, ...]:
    """The powers of two from 1 to the first that is at least `most`."""
    return tuple(str(1 << exponent) for exponent in range(max(0, most - 1).bit_length() + 1))
