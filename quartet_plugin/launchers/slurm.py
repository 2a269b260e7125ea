"""Trials inside of a Slurm allocation: each is a job step on nodes of its own, several at a time.

The tuner runs on one of the allocation's nodes. A step starts one `node_task` a node, and has a name from the
attempt's id, by which a tuner that follows a killed one finds it again.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.launchers import slurm_commands as slurm
from quartet_plugin.launchers.local import LocalLauncher
from quartet_plugin.launchers.patience import Patience
from quartet_plugin.launchers.protocol import NodesHandle
from quartet_plugin.launchers.site import Site
from quartet_plugin.protocol.environment import ATTEMPT_ID

NODE_TASK = "quartet_plugin.launchers.node_task"
# A step's processes are killed at once; its nodes may take a while to say so.
END_S = 60.0
_POLL_S = 0.2
_UNKNOWN_EXIT = 1


def step_name(attempt_id: str) -> str:
    """The name of an attempt's step or job."""
    return f"quartet-{attempt_id}"


def node_task_words(argv: Sequence[str], *, site: Site) -> list[str]:
    """The words that start `argv` on one node."""
    return [site.python or sys.executable, "-m", NODE_TASK, "--", *argv]


class SlurmStep:
    """A running step. `process` is its srun; None where another process has started it."""

    def __init__(
        self,
        name: str,
        nodes: Sequence[str] = (),
        process: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        self._name, self._nodes, self._process = name, nodes, process
        self._has_ended = False
        self._next_look_s = 0.0
        self._patience = Patience()

    @property
    def pid(self) -> int:
        """The process id of srun; 0 where it is another process's child."""
        return 0 if self._process is None else self._process.pid

    @property
    def is_pending(self) -> bool:
        """A step of an allocation starts at once."""
        return False

    @property
    def fault(self) -> str | None:
        """The step's nodes that Slurm has lost, in words."""
        lost = slurm.lost_nodes(self._nodes) if self._nodes else []
        return f"Slurm lost {', '.join(lost)}" if lost else None

    def poll(self) -> int | None:
        """The exit code of srun; of a step that another process started only that it has ended."""
        if self._process is not None:
            return self._process.poll()
        if not self._has_ended and time.monotonic() >= self._next_look_s:
            steps = self._patience.answer(lambda: slurm.steps_named(self._name, patience_s=0.0))
            self._has_ended = steps == []
            self._next_look_s = time.monotonic() + 1.0
        return _UNKNOWN_EXIT if self._has_ended else None

    def terminate(self) -> None:
        """Send SIGTERM to srun, which ends the step's processes."""
        if self._process is not None:
            self._process.terminate()
            return
        for step in slurm.steps_named(self._name):
            slurm.cancel(step, is_step=False)

    def kill(self) -> None:
        """Send SIGKILL to srun; the step's processes live on until `end_on_nodes`."""
        if self._process is not None:
            self._process.kill()

    def end_on_nodes(self) -> tuple[str, ...]:
        """Kill the step's processes and wait until Slurm knows it for ended."""
        end = time.monotonic() + END_S
        while steps := slurm.steps_named(self._name):
            for step in steps:
                slurm.cancel(step, is_step=True)
            if time.monotonic() >= end:
                return tuple(f"step {step}" for step in steps)
            time.sleep(_POLL_S)
        return ()


@dataclass(frozen=True, slots=True)
class SlurmLauncher:
    """Starts commands as steps of `job` on `nodes`."""

    job: str
    nodes: tuple[str, ...]
    site: Site
    engine: str = "slurm"

    @property
    def num_nodes(self) -> int:
        """See `Launcher`."""
        return len(self.nodes)

    def words(self, argv: Sequence[str], *, attempt_id: str, cwd: Path, stdout: Path) -> list[str]:
        """See `NodesLauncher`: one task per node with the whole node, in parallel with other steps."""
        del stdout
        number = str(len(self.nodes))
        return [
            "srun",
            f"--jobid={self.job}",
            "--overlap",
            f"--nodes={number}",
            f"--ntasks={number}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(self.nodes)}",
            f"--job-name={step_name(attempt_id)}",
            f"--chdir={cwd}",
            "--kill-on-bad-exit=1",
            "--cpu-bind=none",
            "--mpi=none",
            "--export=ALL",
            "--quiet",
            *self.site.slurm.of_step(),
            *node_task_words(argv, site=self.site),
        ]

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdout: Path) -> NodesHandle:
        """See `NodesLauncher`."""
        attempt_id = env[ATTEMPT_ID]
        words = self.words(argv, attempt_id=attempt_id, cwd=cwd, stdout=stdout)
        below = slurm.environment_below({**env, **self.site.environment})
        process = LocalLauncher().start(words, env=below, cwd=cwd, stdout=stdout)
        return SlurmStep(step_name(attempt_id), self.nodes, process)


@dataclass(frozen=True, slots=True)
class SlurmEngine:
    """The nodes of the allocation that this process runs in."""

    site: Site

    def divide(self, *, num_nodes: int, at_once: int) -> tuple[tuple[str, ...], ...]:
        """See `Engine`: the nodes in Slurm's order, so that neighbours stay together."""
        nodes = slurm.allocation(os.environ).nodes
        if num_nodes * at_once > len(nodes):
            most = len(nodes) // num_nodes
            fix = f"at most {most} at once" if most else f"trial.nodes of at most {len(nodes)}"
            raise ConfigError(
                f"launcher: slurm; {at_once} trials at once of {num_nodes} nodes need "
                f"{at_once * num_nodes}, and the allocation has {len(nodes)}; ask for {fix}"
            )
        return tuple(nodes[index * num_nodes : (index + 1) * num_nodes] for index in range(at_once))

    def count_nodes(self) -> int:
        """See `CountedNodes`."""
        return len(slurm.allocation(os.environ).nodes)

    def launcher(self, nodes: Sequence[str], *, num_nodes: int) -> SlurmLauncher:
        """See `Engine`."""
        if len(nodes) != num_nodes:
            raise InfrastructureError(f"launcher: slurm; {len(nodes)} nodes for a trial of {num_nodes}")
        return SlurmLauncher(slurm.allocation(os.environ).job, tuple(nodes), self.site)

    def adopt(self, attempt_id: str, *, stdout: Path) -> NodesHandle:
        """See `Engine`."""
        del stdout
        return SlurmStep(step_name(attempt_id))


def engine(site: Site) -> SlurmEngine:
    """The engine of the entry point `slurm`."""
    return SlurmEngine(site)
