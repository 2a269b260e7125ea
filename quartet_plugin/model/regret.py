"""How much better than a search's winner the best plan of its space may still be: the estimate's file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, TypeAdapter

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.model.measurement import Interval
from quartet_plugin.model.schema import dump, parse

MAX_BYTES = 1 << 20
# A gain that another search would be made for.
NOTABLE = 0.02

_Share = Annotated[float, Field(ge=0.0, le=1.0)]
_Words = Annotated[str, Field(max_length=2_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """What the search may have missed, relative to the winner's objective (0.02: 2 % more of it).

    `gain` is the median of the estimate and its 95 % interval; where the search ended without a winner, over
    the user's own configuration. `notable` is the probability of more than NOTABLE. `likely` is the untried
    plan that is most often the best, `likely_chance` how often; None where every plan was tried.
    `num_untried` plans were looked at, predicted from `num_measured`; `source` says by what.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    gain: Interval
    notable: _Share
    likely: _Words | None
    likely_chance: _Share
    num_untried: Annotated[int, Field(ge=0, le=10**9)]
    num_measured: Annotated[int, Field(ge=0, le=10**9)]
    source: Literal["calibrated cost model", "measured trials", "every plan was tried"]
    schema_version: Literal[1] = 1

    def __post_init__(self) -> None:
        if not 0.0 <= self.gain.low <= self.gain.median <= self.gain.high < float("inf"):
            raise ConfigError(
                f"gain: {self.gain.median} ({self.gain.low} to {self.gain.high}); "
                "0 <= low <= median <= high is needed"
            )


_ADAPTER: TypeAdapter[Regret] = TypeAdapter(Regret)


def write_regret(regret: Regret, *, path: Path) -> None:
    """Write the estimate, whole or not at all."""
    write_json_atomic(path, dump(regret))


def read_regret(path: Path) -> Regret:
    """Read an estimate. Raises ConfigError in one line: the field, the value and the rule."""
    data = read_json(path, max_bytes=MAX_BYTES)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: an estimate is a JSON object; this is a {type(data).__name__}")
    try:
        return parse(_ADAPTER, data, where=str(path))
    except ConfigError as error:
        words = str(error)
        raise ConfigError(words if words.startswith(str(path)) else f"{path}: {words}") from error
