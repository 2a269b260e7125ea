"""The parameters of a plan as an Optuna trial suggests them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quartet_plugin.space.param_sources import Params
from quartet_plugin.space.searched_orders import ORDER
from quartet_plugin.space.split_shifts import SPLIT_OF_TWO

# What is kept beside a trial's parameters: no sampler chooses it.
TEXTS = (ORDER, SPLIT_OF_TWO)


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

    def attribute(self, name: str) -> str | None:
        """The text that was put before the study with the trial's point."""
        text = self._attributes().get(name)
        if text is not None:
            self.params[name] = str(text)
        return text

    def _attributes(self) -> Mapping[str, Any]:
        """The attributes as the study has them now: a sampler may have set one since the trial was made.

        Those of a trial that has no study, as Optuna's FixedTrial, are its own.
        """
        study, trial = getattr(self._trial, "study", None), self._trial
        attributes: Mapping[str, Any] = (
            trial if study is None else study.get_trials(deepcopy=False)[trial.number]
        ).user_attrs
        return attributes


def recorded_params(frozen: Any) -> Params:
    """The parameters of a study's trial, with the texts that are kept as its attributes."""
    texts = {name: frozen.user_attrs[name] for name in TEXTS if name in frozen.user_attrs}
    return {**frozen.params, **texts}


def parted(params: Params) -> tuple[dict[str, str | int | float], dict[str, str]]:
    """The parameters that a sampler chooses, and the texts that are stored as a trial's attributes."""
    texts = {name: str(params[name]) for name in TEXTS if name in params}
    return {name: value for name, value in params.items() if name not in texts}, texts
