"""Trials as Slurm jobs of their own: sbatch queues one for each attempt, the tuner waits anywhere.

The job's script is the same text for every trial; the command is its arguments, as separate words. A job is
known by its name, from the attempt's id, so a tuner that follows a killed one finds it again.
"""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quartet_plugin.errors import QuartetError
from quartet_plugin.launchers import slurm_commands as slurm
from quartet_plugin.launchers.node_task import TERMINATED_EXIT
from quartet_plugin.launchers.patience import NoAnswerError, Patience
from quartet_plugin.launchers.protocol import NodesHandle
from quartet_plugin.launchers.site import Site
from quartet_plugin.launchers.slurm import END_S, node_task_words, step_name
from quartet_plugin.model.files import write_text_atomic
from quartet_plugin.protocol.environment import ATTEMPT_ID

SCRIPT, EXIT_FILE = "job.sh", "exit-code"
# Its first argument is the file for the exit code, the rest are srun's. A controller that has lost its latest
# state may start a job a second time, in the same folder: that does nothing. Neither does a job that was
# given up before it began: the folder is there.
SCRIPT_TEXT = """#!/bin/bash
exit_file=$1
shift
mkdir -- "$exit_file.begun" || exit 0
srun "$@"
code=$?
printf '%d\\n' "$code" > "$exit_file.part" && mv -- "$exit_file.part" "$exit_file"
exit "$code"
"""
# What Slurm sets inside of a job. Other variables of sbatch (SBATCH_ACCOUNT, ...) are the user's.
_OF_A_JOB = ("SLURM_", "SRUN_", "SBATCH_CPU_BIND", "SBATCH_MEM_BIND")
_OF_A_SITE = ("SLURM_CONF", "SLURM_CLUSTERS")
_LOOK_S = 2.0
_POLL_S = 0.5
_UNKNOWN_EXIT = 1
# A job that has just been queued may not be listed yet, and one that has ended is forgotten some time.
_GONE_S = 20.0
# States in which Slurm has ended a job by itself, and in which it lets the job's processes wait.
_ENDED = frozenset({"PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "TIMEOUT", "DEADLINE", "REVOKED", "CANCELLED"})
_STOPPED = frozenset({"SUSPENDED", "STOPPED"})


class SlurmJob:
    """A queued or running job, by its name."""

    def __init__(self, name: str, exit_file: Path) -> None:
        self._name, self._exit_file = name, exit_file
        self._state: str | None = None
        self._next_look_s = 0.0
        self._seen_s = time.monotonic()
        self._patience = Patience()
        self._is_ended_here = False

    @property
    def pid(self) -> int:
        """None of its processes runs on this machine."""
        return 0

    @property
    def is_pending(self) -> bool:
        """Whether the job waits in the queue."""
        return self._looked() in slurm.PENDING

    @property
    def fault(self) -> str | None:
        """What Slurm has done to the job by itself, in words.

        Before it preempts a job it may leave the processes a grace time after a SIGTERM (slurm.conf(5),
        GraceTime), of which the job's state says nothing.
        """
        state = self._looked()
        if state in _ENDED:
            return f"Slurm has ended the job: {state}"
        if state in _STOPPED:
            return f"Slurm has stopped the job: {state}"
        if self._written_exit == TERMINATED_EXIT and not self._is_ended_here:
            return "the job's processes got a SIGTERM: Slurm preempts it, or somebody has cancelled it"
        return None

    def poll(self) -> int | None:
        """The command's exit code as the job's script wrote it, else that the job has ended."""
        if (code := self._written_exit) is not None:
            return code
        state = self._looked()
        if state in slurm.PENDING or state in slurm.RUNNING:
            return None
        if state is None and time.monotonic() - self._seen_s < _GONE_S:
            return None
        return _UNKNOWN_EXIT

    def terminate(self) -> None:
        """End the job: SIGTERM to its processes, SIGKILL after the cluster's own time."""
        self._is_ended_here = True
        for job in self._jobs():
            slurm.cancel(job, is_step=False)

    def kill(self) -> None:
        """End the job as `terminate` does: it has no launcher here."""
        self.terminate()

    def end_on_nodes(self) -> tuple[str, ...]:
        """End the job and wait until Slurm knows it for ended."""
        # The script of a job that waits needs no answer of the controller.
        self.give_up()
        end = time.monotonic() + END_S
        while jobs := self._jobs():
            for job in jobs:
                slurm.cancel(job, is_step=False)
            if time.monotonic() >= end:
                return tuple(f"job {job}" for job in jobs)
            time.sleep(_POLL_S)
        return ()

    def give_up(self) -> bool:
        """End the attempt without Slurm, unless the job's script has begun; returns whether it has.

        A job that is still queued then starts nothing when it gets its nodes.
        """
        with contextlib.suppress(OSError, QuartetError):
            try:
                self._exit_file.with_name(f"{self._exit_file.name}.begun").mkdir()
            except FileExistsError:
                return True
            write_text_atomic(self._exit_file, f"{_UNKNOWN_EXIT}\n")
        return False

    @property
    def _written_exit(self) -> int | None:
        """The exit code that the job's script has written; None before, and while the file server fails."""
        with contextlib.suppress(OSError, ValueError):
            return int(self._exit_file.read_text())
        return None

    def _jobs(self) -> list[str]:
        states = slurm.jobs_named(self._name)
        return [job for job, state in states.items() if state in slurm.PENDING or state in slurm.RUNNING]

    def _looked(self) -> str | None:
        """The job's state, asked for at most every two seconds; None where Slurm does not know it."""
        now = time.monotonic()
        if now >= self._next_look_s:
            states = self._patience.answer(lambda: slurm.jobs_named(self._name, patience_s=0.0))
            if states is None or states:
                self._seen_s = time.monotonic()
            if states:
                self._state = states[max(states, key=_number)]
            elif states is not None and (self._state in slurm.PENDING or self._state in slurm.RUNNING):
                self._state = None
            self._next_look_s = now + _LOOK_S
        return self._state


@dataclass(frozen=True, slots=True)
class SlurmBatchLauncher:
    """Queues a job of `num_nodes` nodes for each command."""

    num_nodes: int
    site: Site
    engine: str = "slurm-batch"

    def words(self, argv: Sequence[str], *, attempt_id: str, cwd: Path, stdout: Path) -> list[str]:
        """See `NodesLauncher`."""
        folder, site = stdout.parent, self.site.slurm
        return [
            "sbatch",
            "--parsable",
            f"--job-name={step_name(attempt_id)}",
            f"--nodes={self.num_nodes}",
            "--ntasks-per-node=1",
            f"--chdir={cwd}",
            f"--output={_escaped(stdout)}",
            "--open-mode=append",
            "--no-requeue",
            "--export=ALL",
            *site.of_job(),
            str(folder / SCRIPT),
            str(folder / EXIT_FILE),
            f"--nodes={self.num_nodes}",
            "--ntasks-per-node=1",
            "--kill-on-bad-exit=1",
            "--cpu-bind=none",
            "--mpi=none",
            *site.of_step(),
            *node_task_words(argv, site=self.site),
        ]

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdout: Path) -> NodesHandle:
        """See `NodesLauncher`. The tuner's own job, if it runs in one, is not the trial's."""
        attempt_id = env[ATTEMPT_ID]
        write_text_atomic(stdout.parent / SCRIPT, SCRIPT_TEXT)
        words = self.words(argv, attempt_id=attempt_id, cwd=cwd, stdout=stdout)
        outside = {
            name: value for name, value in env.items() if not name.startswith(_OF_A_JOB) or name in _OF_A_SITE
        }
        outside |= self.site.environment
        job = SlurmJob(step_name(attempt_id), stdout.parent / EXIT_FILE)
        try:
            slurm.submit(words, name=step_name(attempt_id), env=outside, cwd=cwd)
        except BaseException as error:
            # A submission without an answer may have been taken; a job that has begun is followed.
            if not job.give_up():
                raise
            if not isinstance(error, NoAnswerError):
                with contextlib.suppress(QuartetError):
                    job.terminate()
                raise
        return job


@dataclass(frozen=True, slots=True)
class SlurmBatchEngine:
    """The nodes that Slurm's queue gives."""

    site: Site

    def divide(self, *, num_nodes: int, at_once: int) -> tuple[tuple[str, ...], ...]:
        """See `Engine`: the queue chooses."""
        slurm.jobs_named(step_name(f"check-{os.getpid()}"))  # is there a Slurm that answers?
        del num_nodes
        return ((),) * at_once

    def launcher(self, nodes: Sequence[str], *, num_nodes: int) -> SlurmBatchLauncher:
        """See `Engine`."""
        del nodes
        return SlurmBatchLauncher(num_nodes, self.site)

    def adopt(self, attempt_id: str, *, stdout: Path) -> NodesHandle:
        """See `Engine`."""
        return SlurmJob(step_name(attempt_id), stdout.parent / EXIT_FILE)


def engine(site: Site) -> SlurmBatchEngine:
    """The engine of the entry point `slurm-batch`."""
    return SlurmBatchEngine(site)


def _escaped(path: Path) -> str:
    """A path in which sbatch replaces nothing (sbatch(1), filename pattern)."""
    return str(path).replace("\\", "\\\\").replace("%", "%%")


def _number(job: str) -> tuple[int, str]:
    digits = job.partition("_")[0]
    return (int(digits) if digits.isdecimal() else 0), job
