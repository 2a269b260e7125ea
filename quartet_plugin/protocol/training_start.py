"""What is shared with the Python processes of a command that is started as it is, such as `bash train.sh`.

The tuner names a start.json in the environment. Every Python process below it whose installation has the
plugin leaves one record in the folder `starts` beside that file; a process that begins to train is found by
it, and takes the flags of the adapter's entry from it.
"""

import contextlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from quartet_plugin.model.schema import Bounds, Length, record
from quartet_plugin.protocol.attempt_files import FilePath, Name, Rank, Text, Version, read_shared

START_FILE, STARTS_FOLDER = "start.json", "starts"
# Records that are read at most: scripts may start any number of small helpers.
MAX_STARTS = 2_000
_MAX_BYTES = 2**20
_MAX_SHOWN = 4

Framework = Literal["Megatron", "Megatron-Bridge", "DeepSpeed"]


@record
class StartFile:
    """start.json: the flags that the adapter's entry gets in a training process."""

    flags: Annotated[tuple[Text, ...], Length(most=100)]
    schema_version: Version = 1


@record
class ProcessStart:
    """`starts/HOST-PID.json`: one Python process of the command; secrets in `argv` are masked.

    `framework` is set where the process trains. `ranks_from` is the variable that its rank was read from,
    None where it has none; `restart` counts the launcher's restarts.
    """

    pid: Annotated[int, Bounds(ge=1, le=2**31)]
    host: Name
    argv: Annotated[tuple[Text, ...], Length(most=100_000)]
    cwd: FilePath
    framework: Framework | None
    ranks_from: Name | None
    rank: Rank
    world_size: Annotated[int, Bounds(ge=1, le=65_536)]
    restart: Annotated[int, Bounds(ge=0, le=65_536)] = 0
    schema_version: Version = 1

    @property
    def program(self) -> str:
        """The script or module with the options before it, without its arguments."""
        words = self.argv[1:]
        end = next((i + 1 for i, word in enumerate(words) if not word.startswith("-")), len(words))
        return " ".join(words[:end]) or "python"


def read_starts(folder: Path) -> list[ProcessStart]:
    """Every record beside a start.json, by rank. Raises ConfigError for one that breaks its format."""
    starts = []
    for path in sorted((folder / STARTS_FOLDER).glob("*.json"))[:MAX_STARTS]:
        with contextlib.suppress(FileNotFoundError):
            starts.append(read_shared(ProcessStart, path, max_bytes=_MAX_BYTES))
    return sorted(starts, key=lambda start: (start.rank, start.host, start.pid))


def fault_of(starts: Sequence[ProcessStart]) -> str | None:
    """Why the processes are not one training, with what was seen; None where nothing speaks against it."""
    training = [start for start in starts if start.framework is not None]
    for before, after in pairwise(training):
        if after.rank == before.rank and after.restart == before.restart:
            return (
                f"the command starts two trainings: rank {before.rank} is process {before.pid} "
                f"({before.program}) and process {after.pid} ({after.program}); name a command that starts "
                "one"
            )
    sizes = sorted({start.world_size for start in training})
    if len(sizes) > 1:
        return (
            f"the command's world changes: processes of {sizes[0]} and of {sizes[-1]} ranks were started; "
            "name a command with a fixed number of processes"
        )
    return None


def absence_of(starts: Sequence[ProcessStart]) -> str:
    """Why no training was found, with the Python processes that were seen."""
    if not starts:
        return (
            "no Python process with quartet-plugin was started; install it in the training environment, keep "
            "the variable QUARTET_START, and start python without -I and -S"
        )
    programs = list(dict.fromkeys(start.program for start in starts))
    shown = ", ".join(programs[:_MAX_SHOWN]) + (", ..." if len(programs) > _MAX_SHOWN else "")
    return (
        f"the command starts no training: none of its {len(starts)} Python processes ({shown}) imports "
        "megatron.training, megatron.bridge.training or deepspeed with RANK set; give the command that "
        "starts the training"
    )


def words_of(starts: Sequence[ProcessStart]) -> str | None:
    """The training that was found, in one line; None before rank 0 has begun."""
    first = next((start for start in starts if start.framework is not None and start.rank == 0), None)
    if first is None:
        return None
    ranks = "a single process" if first.ranks_from is None else f"ranks from {first.ranks_from}"
    count = "1 process" if first.world_size == 1 else f"{first.world_size} processes"
    num_words = sum(word.startswith("--") for word in first.argv)
    return f"found {first.program}: {first.framework}, {count}, {ranks}, {num_words} flags"
