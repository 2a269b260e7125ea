"""Which finished job another one begins with: the one that it is `like`, else the nearest of its machine.

Two jobs are related if what is known before their start says one machine and one framework: the adapter, the
number of processes and nodes, the device, and the machine files of their q.yaml. Of several related jobs
that are done the nearest is taken, whose command has the most words in common. What of its measurements
holds for the new job is decided when that has measured its baseline (`tuner/earlier_run.py`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quartet_plugin.batch.config import Job
from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import Command, parse_command
from quartet_plugin.tuner.config import TuneConfig


@dataclass(frozen=True, slots=True)
class MachineKey:
    """The properties that two related jobs share; `entry` is the adapter's module."""

    entry: str
    num_processes: int | None
    num_nodes: int | None
    device: str
    cluster: str | None
    calibration: str | None

    @classmethod
    def of(cls, command: Command, config: TuneConfig) -> "MachineKey | None":
        """The key of a command; None where only its start says how many processes it has."""
        if command.starter == "other":
            return None
        return cls(
            entry=command.entry,
            num_processes=command.num_processes,
            num_nodes=command.num_nodes,
            device=config.device,
            cluster=config.machine.cluster,
            calibration=config.machine.calibration,
        )


def keys_of(
    jobs: Iterable[Job], configs: Mapping[str, TuneConfig], *, cwd: Path
) -> dict[str, MachineKey | None]:
    """The key of every job that has a command, by name; the commands start in the folder `cwd`.

    Raises ConfigError for a command that cannot be read.
    """
    keys: dict[str, MachineKey | None] = {}
    for job in jobs:
        if job.words:
            try:
                keys[job.name] = MachineKey.of(parse_command(job.words, cwd=cwd), configs[job.name])
            except ConfigError as error:
                raise ConfigError(f"jobs: {job.name}: {error}") from error
    return keys


def started_from(
    job: Job,
    done: Sequence[Job],
    *,
    keys: Mapping[str, MachineKey | None],
    shares: bool,
) -> Job | None:
    """The job whose measurements `job` begins with, of those that are `done`, the latest last."""
    if job.like is not None:
        return next((other for other in done if other.name == job.like), None)
    key = keys.get(job.name)
    if not shares or key is None:
        return None
    related = [other for other in done if keys.get(other.name) == key]
    # The latest of equally near ones: the machine is most like it was then.
    return max(
        enumerate(related),
        key=lambda pair: (num_common_words(job.words, pair[1].words), pair[0]),
        default=(0, None),
    )[1]


def num_common_words(words: Sequence[str], other: Sequence[str]) -> int:
    """The words that two commands have in common, each as often as both have it."""
    return (Counter(words) & Counter(other)).total()
