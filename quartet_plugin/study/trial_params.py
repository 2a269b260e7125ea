"""The parameters of a plan as an Optuna trial suggests them."""

from collections.abc import Callable, Sequence
from typing import Any


class TrialParams:
    """Lets an Optuna trial choose; `reseed` is called with a parameter's name before it is suggested.

    `params` has what was chosen.
    """

    def __init__(self, trial: Any, *, reseed: Callable[[str], None] = lambda _: None) -> None:
        self._trial = trial
        self._reseed = reseed
        self.params: dict[str, str | int | float] = {}

    def category(self, name: str, choices: Sequence[str]) -> str:
        """The trial's choice."""
        self._reseed(name)
        choice: str = self._trial.suggest_categorical(name, list(choices))
        self.params[name] = choice
        return choice

    def integer(self, name: str, low: int, high: int) -> int:
        """The trial's number."""
        self._reseed(name)
        number: int = self._trial.suggest_int(name, low, high)
        self.params[name] = number
        return number

    def unit_float(self, name: str) -> float:
        """The trial's number."""
        self._reseed(name)
        weight: float = self._trial.suggest_float(name, -1.0, 1.0)
        self.params[name] = weight
        return weight
