"""A space that was measured exhaustively: what ran, and how long each launch's iterations took."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.model.plan import NodeInfo
from quartet_plugin.model.schema import dump
from quartet_plugin.model.training_job import TrainingJob, parse_training_job

DEFAULT_FILE = Path(__file__).with_name("recorded.json")


@dataclass(slots=True, kw_only=True)
class Entry:
    """One plan: the seconds of every measured iteration of each launch, or why it cannot run."""

    launches: list[list[float]] = field(default_factory=list)
    refused: str | None = None

    @property
    def iteration_s(self) -> float | None:
        """The median of the launches' medians; None where it cannot run or was not measured yet."""
        return statistics.median(map(statistics.median, self.launches)) if self.launches else None


@dataclass(slots=True, kw_only=True)
class Recording:
    """`entries` by what is executed (`walk.key_of`); `search` is the section of q.yaml that opened the space.

    `environment` are notes for readers.
    """

    about: str
    job: TrainingJob
    nodes: tuple[NodeInfo, ...]
    search: dict[str, Any]
    environment: dict[str, Any]
    entries: dict[str, Entry]

    @property
    def best(self) -> tuple[str, float]:
        """The fastest plan and its seconds per iteration."""
        timed = {
            key: entry.iteration_s for key, entry in self.entries.items() if entry.iteration_s is not None
        }
        key = min(timed, key=lambda key: timed[key])
        return key, timed[key]

    def write(self, path: Path) -> None:
        """Write the recording."""
        content = {
            "schema_version": 1,
            "about": self.about,
            "environment": self.environment,
            "search": self.search,
            "job": _plain(dump(self.job)),
            "nodes": [dump(node) for node in self.nodes],
            "plans": {
                key: {
                    "refused": entry.refused,
                    "launches_s": [[round(s, 6) for s in row] for row in entry.launches],
                }
                for key, entry in self.entries.items()
            },
        }
        write_json_atomic(path, content)


def read_recording(path: Path) -> Recording:
    """The recording in `path`."""
    content = read_json(path)
    return Recording(
        about=content["about"],
        job=parse_training_job(content["job"], where=str(path)),
        nodes=tuple(NodeInfo(**node) for node in content["nodes"]),
        search=content["search"],
        environment=content["environment"],
        entries={
            key: Entry(launches=entry["launches_s"], refused=entry["refused"])
            for key, entry in content["plans"].items()
        },
    )


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 6) for value in values]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
