"""`profile.json`: what `quartet profile` leaves; docs/formats.md describes it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from quartet_plugin.calibration.profile import merged_parts
from quartet_plugin.model.costs import Costs
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import Bounds, Length, dump, read_record, record
from quartet_plugin.protocol.rank_files import PartTimes, RankProfile
from quartet_plugin.schedule.files import costs_to_json


@record
class SimulatedRankRecord:
    """The one rank of a larger world that was run alone, communication left out."""

    stage: Annotated[int, Bounds(ge=0, lt=65_536)]
    rank: Annotated[int, Bounds(ge=0, lt=65_536)]
    world_size: Annotated[int, Bounds(ge=1, le=65_536)]


@record
class Profile:
    """What was measured: every rank's file, and the table of costs made of them.

    `job` is what the framework resolved from the command; `iteration_s` the measured iterations, of the
    slowest rank, empty where a rank was played.
    """

    schema_version: Literal[1]
    job: Mapping[str, Any]
    played: SimulatedRankRecord | None
    iteration_s: tuple[Annotated[float, Bounds(ge=0, le=1e6)], ...]
    parts: tuple[PartTimes, ...]
    ranks: Annotated[tuple[RankProfile, ...], Length(least=1, most=65_536)]
    costs: Mapping[str, Any]


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
    return read_record(Profile, path)
