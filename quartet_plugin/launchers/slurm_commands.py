"""Requests to Slurm: its programs, with arguments as lists, and strict parsers of their output.

Formats are those of the manual pages of Slurm 22.05 and later. Where the controller does not answer (it is
being restarted), a question is repeated for `patience_s`; then it raises NoAnswerError.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.launchers.patience import PATIENCE_S, NoAnswerError

# Seconds that one of Slurm's programs may take.
PROGRAM_S = 60.0
_PAUSE_S = 2.0
_JOB_ID = re.compile(r"[0-9]{1,10}(_[0-9]{1,10})?")
_ABSENT_JOB = ("Invalid job id", "Invalid job array")
_AWAY = (
    "Unable to contact slurm controller",
    "Connection refused",
    "Socket timed out",
    "Slurm backup controller in standby",
    "Zero Bytes were transmitted or received",
    "Connection timed out",
    "Connection reset by peer",
)
# Variables by which sbatch and salloc hand the job's own numbers to every srun below them.
_OF_THE_JOB = re.compile(
    r"SLURM_(MEM_PER_\w+|NTASKS\w*|NPROCS|CPUS_PER_\w+|GPUS_PER_TASK|TRES_PER_TASK|DISTRIBUTION|CPU_BIND\w*|"
    r"THREADS_PER_CORE|EXCLUSIVE|OVERLAP|STEP\w*|TASK\w*|PROCID|LOCALID|NODEID|UMASK|SRUN\w*|LAUNCH\w*)"
)
# States of a node (sinfo(1)); a star marks one that does not answer.
_LOST = re.compile(r"down|fail|error|unknown|perfctrs|\*$", re.IGNORECASE)
# States of a job in which it waits, and in which it runs or is about to end (squeue(1), JOB STATE CODES).
PENDING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"})
RUNNING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The job that this process runs in, and the names of its nodes in Slurm's order."""

    job: str
    nodes: tuple[str, ...]


def environment_below(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without the numbers that the job's own steps would take from it."""
    return {name: value for name, value in env.items() if not _OF_THE_JOB.fullmatch(name)}


def allocation(environment: Mapping[str, str]) -> Allocation:
    """The allocation that this process runs in. Raises ConfigError outside of one, or in an unlike one."""
    job, listed = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_NODELIST", "")
    if not _JOB_ID.fullmatch(job) or not listed:
        raise ConfigError(
            "launcher: slurm; SLURM_JOB_ID is not set: run it inside an allocation (salloc, or a script "
            "for sbatch), or use launcher: slurm-batch, which queues a job for each trial"
        )
    if environment.get("SLURM_HET_SIZE", "1") not in ("", "0", "1"):
        raise ConfigError(
            f"launcher: slurm; job {job} is heterogeneous ({environment['SLURM_HET_SIZE']} components): its "
            "nodes differ; use an allocation of one component"
        )
    return Allocation(job=job, nodes=hostnames(listed))


def hostnames(listed: str) -> tuple[str, ...]:
    """The nodes of a list such as `n[1-4,7]`, as Slurm expands it."""
    return tuple(_asked(["scontrol", "show", "hostnames", listed]).split())


def steps_named(name: str, *, patience_s: float = PATIENCE_S) -> list[str]:
    """The ids of this user's running steps with this name."""
    words = ["squeue", "--steps", "--noheader", "--format=%i|%j", f"--user={os.getuid()}"]
    lines = _asked(words, patience_s=patience_s)
    pairs = (line.strip().partition("|") for line in lines.splitlines())
    return [step for step, _, step_name in pairs if step_name == name]


def jobs_named(name: str, *, patience_s: float = PATIENCE_S) -> dict[str, str]:
    """The state of each of this user's jobs with this name, by id, that Slurm still knows."""
    user = str(os.getuid())
    lines = _asked(
        ["squeue", "--noheader", "--states=all", "--format=%i|%T", f"--name={name}", f"--user={user}"],
        patience_s=patience_s,
    )
    pairs = (line.strip().partition("|") for line in lines.splitlines() if line.strip())
    return {job: state for job, _, state in pairs}


def submit(argv: Sequence[str], *, name: str, env: Mapping[str, str], cwd: Path) -> None:
    """Queue the job `name` by sbatch, with `env` as it is: the job inherits it.

    A submission without an answer may have been taken: the job is looked up before it is submitted again.
    """
    _asked(argv, env=env, cwd=cwd, is_done=lambda: bool(jobs_named(name)))


def lost_nodes(nodes: Sequence[str]) -> list[str]:
    """Those of the nodes that Slurm cannot reach or has taken out of service, each with its state."""
    lines = _asked(["sinfo", "--Node", "--noheader", "--format=%N|%T", f"--nodes={','.join(nodes)}"])
    states = dict(line.strip().partition("|")[::2] for line in lines.splitlines() if line.strip())
    return [f"{name} ({state})" for name, state in states.items() if _LOST.search(state)]


def cancel(identity: str, *, is_step: bool) -> None:
    """Kill a step or end a job; one that has ended is no error."""
    signal = ["--signal=KILL"] if is_step else []
    try:
        _asked(["scancel", "--quiet", *signal, identity])
    except (_NoSuchJobError, InfrastructureError) as error:
        if "already" not in str(error) and not isinstance(error, _NoSuchJobError):
            raise


class _NoSuchJobError(InfrastructureError):
    """Slurm has forgotten the job."""


def _asked(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    is_done: Callable[[], bool] = lambda: False,
    patience_s: float = PATIENCE_S,
) -> str:
    """The output of one of Slurm's programs. Raises InfrastructureError with its last line of error.

    `is_done` is asked before a request without an answer is repeated: where it holds, the output is empty.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            result = subprocess.run(
                list(argv),
                env={**os.environ, "LC_ALL": "C"} if env is None else env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PROGRAM_S,
                check=False,
            )
        except FileNotFoundError as error:
            raise ConfigError(
                f"{argv[0]}: not found; launcher: slurm needs Slurm's programs on PATH"
            ) from error
        except subprocess.TimeoutExpired:
            fault = f"no answer within {PROGRAM_S:g} s"
        else:
            if result.returncode == 0:
                return result.stdout
            lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
            if any(text in result.stderr for text in _ABSENT_JOB):
                raise _NoSuchJobError(f"{argv[0]}: {lines[0]}")
            fault = lines[-1]
            if not any(text in result.stderr for text in _AWAY):
                raise InfrastructureError(f"{argv[0]}: {fault}")
        if patience_s:
            time.sleep(_PAUSE_S)
        if is_done():
            return ""
        if time.monotonic() >= end:
            raise NoAnswerError(f"{argv[0]}: {fault}; is slurmctld up?")
