"""One process of one start: what it was asked to run, its trial's files, and how its end is told."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from quartet_plugin.errors import QuartetError
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import dump
from quartet_plugin.protocol.environment import ERRORS_FOLDER
from quartet_plugin.protocol.rank_files import CommandFailure, rank_file
from quartet_plugin.rank.device import peak_memory_bytes
from quartet_plugin.rank.entry_options import EntryCommand, EntryOptions
from quartet_plugin.rank.failure import describe_failure
from quartet_plugin.rank.rendezvous import AgreedRefusalError, RankEnv

_GRACE_S = 1.0


@dataclass(slots=True, kw_only=True)
class Session:
    """A process from its command line to its end; `files` and `meter` are there in a trial only."""

    command: EntryCommand
    rank_env: RankEnv
    files: Any = None
    meter: Any = None

    @property
    def options(self) -> EntryOptions:
        """Our own flags."""
        return self.command.options

    @property
    def num_steps(self) -> int:
        """Training steps done so far."""
        return 0 if self.meter is None else int(self.meter.num_steps)

    def open_trial(self) -> None:
        """Where a trial is asked for, read its order and begin its heartbeat. Raises ConfigError."""
        if self.options.trial is None:
            return
        from quartet_plugin.rank.files import RankFileWriter, read_trial_spec

        self.files = RankFileWriter(read_trial_spec(self.options.trial), self.rank_env)
        self.files.start()

    def run(
        self, work: Callable[[], None], *, end_well: Callable[[], None], refuse: Callable[[int], NoReturn]
    ) -> None:
        """Do `work`, the preparing and the script, and leave a record of how it ended.

        `end_well` follows a script that ended by itself without an error; `refuse` ends the process with the
        exit code of a refusal of ours, which was told.
        """
        try:
            work()
            end_well()
        except QuartetError as error:
            self.record(error)
            self.tell(error)
            refuse(int(error.exit_code))
        except SystemExit as error:
            if error.code in (None, 0):
                end_well()
            else:
                self.record(error)
            raise
        except BaseException as error:
            self.record(error)
            raise

    def tell(self, error: QuartetError) -> None:
        """One line for the user: from launch rank 0 at once, from others if that has not ended the start."""
        rank = self.rank_env.launch_rank
        if rank != 0:
            # torchrun ends the others once the first one has gone: most refusals are the same.
            time.sleep(_GRACE_S)
            if isinstance(error, AgreedRefusalError):
                return
        where = f"rank {rank}: " if rank else ""
        print(f"quartet: {where}{error}", file=sys.stderr, flush=True)

    def end_of_script(self) -> None:
        """The script ended by itself; in a trial, before all its iterations were seen."""
        if self.files is None:
            return
        if self.num_steps:
            self.meter.write()
            self.files.move("done", self.num_steps)
            self.files.close()
        else:
            self.record(RuntimeError("the script ended before its first training step"))

    def record(self, error: BaseException) -> None:
        """Write rank-K.err.json; the error itself matters more than a record that cannot be written."""
        if self.files is None:
            leave_error(error, rank_env=self.rank_env, num_steps=self.num_steps)
            return
        try:
            self.files.write_failure(
                describe_failure(error, num_steps=self.num_steps, peak_bytes=peak_memory_bytes())
            )
            self.files.close()
        except (QuartetError, OSError) as unwritten:
            print(f"quartet: the failure could not be recorded: {unwritten}", file=sys.stderr, flush=True)


def leave_error(error: BaseException, *, rank_env: RankEnv, num_steps: int = 0) -> None:
    """Outside of a trial: write rank-K.err.json into the folder that the environment names, if any."""
    folder = os.environ.get(ERRORS_FOLDER)
    if not folder:
        return
    failure = describe_failure(error, num_steps=num_steps, peak_bytes=0)
    rank = rank_env.launch_rank
    content = CommandFailure(launch_rank=rank, time=time.time(), **dump(failure))
    try:
        write_json_atomic(rank_file(CommandFailure, folder=folder, launch_rank=rank), dump(content))
    except (QuartetError, OSError):
        return
