"""The session of one process, which lasts from its command line to its end: trial files, meter, failure."""

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from quartet_plugin.errors import ConfigError, QuartetError
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import dump
from quartet_plugin.protocol.environment import ERRORS_FOLDER
from quartet_plugin.protocol.rank_files import CommandFailure, rank_file
from quartet_plugin.protocol.terminal import terminal_line
from quartet_plugin.rank.device import peak_memory_bytes
from quartet_plugin.rank.entry_options import EntryCommand, EntryOptions
from quartet_plugin.rank.failure import describe_failure
from quartet_plugin.rank.rendezvous import AgreedRefusalError, RankEnv

_GRACE_S = 1.0


@dataclass(slots=True, kw_only=True)
class Session:
    """A process from its command line to its end; only a trial's has `files` and a `meter`."""

    command: EntryCommand
    rank_env: RankEnv
    files: Any = None
    meter: Any = None
    stage_divisor: int = 1

    @property
    def options(self) -> EntryOptions:
        """The values of the plugin's flags."""
        return self.command.options

    @property
    def num_steps(self) -> int:
        """Training steps done so far."""
        return 0 if self.meter is None else int(self.meter.num_steps)

    def open_trial(self) -> None:
        """Read the trial's specification, if there is one, and start the heartbeat. Raises ConfigError."""
        if self.options.trial is None:
            return
        from quartet_plugin.rank.files import RankFileWriter, read_trial_spec

        self.files = RankFileWriter(read_trial_spec(self.options.trial), self.rank_env)
        self.files.start()

    def refuse_smaller_batch(self, framework: str) -> None:
        """Raise ConfigError for a trial that is to have fewer replicas than the command's training."""
        if self.files is not None and self.files.spec.batch_divisor is not None:
            raise ConfigError(
                f"nodes: trials with fewer nodes than the training are supported for Megatron-LM, not for "
                f"{framework}; omit it, or set trial.nodes to it"
            )

    def run(
        self, work: Callable[[], None], *, on_end: Callable[[], None], on_refusal: Callable[[int], NoReturn]
    ) -> None:
        """Do `work`, the preparation and the script, and record the failure that ends it.

        `on_end` follows a script that ended by itself without an error; `on_refusal` ends the process with
        the exit code of a QuartetError, after its line was printed.
        """
        try:
            work()
            on_end()
        except QuartetError as error:
            self.record(error)
            self.print_refusal(error)
            on_refusal(int(error.exit_code))
        except SystemExit as error:
            if error.code in (None, 0):
                on_end()
            else:
                self.record(error)
            raise
        except BaseException as error:
            self.record(error)
            raise

    def print_refusal(self, error: QuartetError) -> None:
        """Print one line: from launch rank 0 at once, from others if that has not ended the launch."""
        rank = self.rank_env.launch_rank
        if rank != 0:
            # torchrun ends the others once the first one has gone: most refusals are the same.
            time.sleep(_GRACE_S)
            if isinstance(error, AgreedRefusalError):
                return
        where = f"rank {rank}: " if rank else ""
        message, *table = error.lines
        for line in (f"quartet: {where}{message}", *table):
            print(terminal_line(line), file=sys.stderr, flush=True)

    def end_trial(self) -> None:
        """Write what a trial measured whose script ended by itself before all iterations were done."""
        if self.files is None:
            return
        if self.num_steps:
            self.meter.write()
            self.files.move("done", self.num_steps)
            self.files.close()
        else:
            self.record(RuntimeError("the script ended before its first training step"))

    def record(self, error: BaseException) -> None:
        """Write rank-K.err.json, or print why it cannot be written; the error itself matters more."""
        if self.files is None:
            write_command_failure(error, rank_env=self.rank_env, num_steps=self.num_steps)
            return
        try:
            self.files.write_failure(
                describe_failure(error, num_steps=self.num_steps, peak_bytes=peak_memory_bytes())
            )
            self.files.close()
        except (QuartetError, OSError) as unwritten:
            reason = terminal_line(str(unwritten))
            print(f"quartet: the failure could not be recorded: {reason}", file=sys.stderr, flush=True)


def exit_now(code: int) -> NoReturn:
    """End this process at once, its own children first.

    Everything that counts is on the disk. The interpreter's own way out joins data loaders and communicator
    threads, which may hang or abort when the peers are already gone, and takes seconds.
    """
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError, ValueError):
            child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def print_notes(notes: Iterable[str], *, rank_env: RankEnv) -> None:
    """Print lines for the user, only on launch rank 0."""
    if rank_env.launch_rank == 0:
        for note in notes:
            print(f"quartet: {terminal_line(note)}", file=sys.stderr, flush=True)


def write_command_failure(error: BaseException, *, rank_env: RankEnv, num_steps: int = 0) -> None:
    """Write rank-K.err.json outside of a trial, into the folder that the environment names, if any."""
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
