"""`profile.json`: what `quartet profile` leaves; docs/formats.md describes it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter

from quartet_plugin.calibration.profile import PartTimes, RankProfile, merged_parts
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.costs import Costs
from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.model.schema import dump, parse
from quartet_plugin.schedule.files import costs_to_json

_STRICT: dict[str, object] = {"extra": "forbid", "strict": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRankRecord:
    """The one rank of a larger world that was run alone, communication left out."""

    __pydantic_config__: ClassVar[dict[str, object]] = _STRICT

    stage: Annotated[int, Field(ge=0, lt=65_536)]
    rank: Annotated[int, Field(ge=0, lt=65_536)]
    world_size: Annotated[int, Field(ge=1, le=65_536)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was measured: every rank's file, and the table of costs made of them.

    `job` is what the framework resolved from the command; `iteration_s` the measured iterations, of the
    slowest rank, empty where a rank was played.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = _STRICT

    schema_version: Literal[1]
    job: Mapping[str, Any]
    played: SimulatedRankRecord | None
    iteration_s: tuple[Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)], ...]
    parts: tuple[PartTimes, ...]
    ranks: Annotated[tuple[RankProfile, ...], Field(min_length=1, max_length=65_536)]
    costs: Mapping[str, Any]


_ADAPTER: TypeAdapter[Profile] = TypeAdapter(Profile)


def make_profile(
    ranks: Sequence[RankProfile],
    *,
    costs: Costs,
    played: SimulatedRankRecord | None,
    iteration_s: Sequence[float],
) -> Profile:
    """The profile of these ranks' files."""
    return Profile(
        schema_version=1,
        job=ranks[0].job,
        played=played,
        iteration_s=() if played is not None else tuple(iteration_s),
        parts=tuple(merged_parts(ranks).values()),
        ranks=tuple(ranks),
        costs=costs_to_json(costs),
    )


def write_profile(profile: Profile, *, path: Path) -> None:
    """Write the file, whole or not at all; the job, which all ranks share, is written once."""
    content = dump(profile)
    content["ranks"] = [{**asdict(rank), "job": {}} for rank in profile.ranks]
    write_json_atomic(path, content)


def read_profile(path: Path) -> Profile:
    """The profile in `path`. Raises ConfigError in one line: the field, the value and the rule."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a profile is a JSON object; this is a {type(data).__name__}")
    return parse(_ADAPTER, data, where=str(path))
