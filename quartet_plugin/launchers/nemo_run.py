"""Trials through NeMo-Run: an experiment of one script for each attempt, on any executor that it has.

One process of this host holds the experiment (`nemo_run_driver`) and outlives the tuner, which never imports
NeMo-Run. Its executors put words together for shells: the script's only words are the node's Python and
hexadecimal digits. The nodes see the run's folder and the installation under the same paths.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.held_run import CONNECTIONS_FILE, HeldRun, start_held
from quartet_plugin.launchers.nemo_run_driver import FAULT_FILE
from quartet_plugin.launchers.protocol import NodesHandle
from quartet_plugin.launchers.shared_run import SharedFolder, plain_node_words
from quartet_plugin.launchers.site import Site
from quartet_plugin.protocol.environment import ATTEMPT_ID

DRIVER = "quartet_plugin.launchers.nemo_run_driver"
# By what the executors that NeMo-Run has tell a node its index.
INDEX_VARIABLES = ("SLURM_PROCID", "JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK", "PET_NODE_RANK", "NODE_RANK")
_END_S, _LOOK_S = 60.0, 30.0


class NemoRun(HeldRun):
    """An attempt whose experiment a driver holds."""

    def __init__(
        self, stdout: Path, attempt_id: str, process: "subprocess.Popen[bytes] | None" = None
    ) -> None:
        super().__init__(stdout.parent, attempt_id, process)
        self._shared = SharedFolder(stdout)
        self._num_nodes = int(self.read(CONNECTIONS_FILE).get("num_nodes", 1))

    @property
    def is_pending(self) -> bool:
        """Whether the executor has not started every node yet."""
        return self.poll() is None and not self._shared.has_begun(self._num_nodes)

    @property
    def fault(self) -> str | None:
        """Why NeMo-Run did not run the command."""
        reason: str | None = self.read(FAULT_FILE).get("reason")
        return reason

    def poll(self) -> int | None:
        """The driver's exit code, which is the command's."""
        code = super().poll()
        if code is not None:
            self._shared.collect()
        return code

    def end_on_nodes(self) -> tuple[str, ...]:
        """Have the nodes kill the command, let the driver cancel the experiment, and end the driver."""
        self._shared.kill()
        self.terminate()
        left = self._shared.await_end(self._num_nodes, limit_s=_END_S)
        self.await_holder(_LOOK_S)
        self.cut()
        self._shared.collect()
        return tuple(f"node {index}" for index in left)


@dataclass(frozen=True, slots=True)
class NemoRunLauncher:
    """Starts commands on `num_nodes` nodes of the site's executor."""

    num_nodes: int
    site: Site
    engine: str = "nemo-run"

    def words(self, argv: Sequence[str], *, attempt_id: str, cwd: Path, stdout: Path) -> list[str]:
        """See `NodesLauncher`: the script's words; the command goes through a file."""
        del attempt_id, cwd
        return [*self._node_words(stdout), "<", *argv]

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdout: Path) -> NodesHandle:
        """See `NodesLauncher`."""
        shared, asked = SharedFolder(stdout), self.site.nemo_run
        shared.write_request(
            argv,
            env=env,
            of_the_site=self.site.environment,
            cwd=cwd,
            num_nodes=self.num_nodes,
            index_variables=INDEX_VARIABLES if self.num_nodes > 1 else (),
            names="host",
        )
        slurm = self.site.slurm
        request = {
            "attempt_id": env[ATTEMPT_ID],
            "stdout": str(stdout),
            "num_nodes": self.num_nodes,
            "executor": asked.executor,
            "words": self._node_words(stdout),
            "slurm": slurm.model_dump(mode="json", exclude_none=True),
        }
        process = start_held(
            DRIVER,
            request,
            env=env,
            stdout=stdout.parent / "nemo-run.log",
            connections={"num_nodes": self.num_nodes},
            folder=stdout.parent,
            python=asked.python,
        )
        return NemoRun(stdout, env[ATTEMPT_ID], process)

    def _node_words(self, stdout: Path) -> list[str]:
        return plain_node_words(stdout, python=self.site.python or sys.executable)


@dataclass(frozen=True, slots=True)
class NemoRunEngine:
    """The nodes of an executor, which chooses them."""

    site: Site

    def divide(self, *, num_nodes: int, at_once: int) -> tuple[tuple[str, ...], ...]:
        """See `Engine`."""
        if self.site.nemo_run.executor == "local" and num_nodes > 1:
            raise ConfigError(
                f"launcher: nemo-run; trial.nodes: {num_nodes}; its local executor has one node: write "
                "nemo_run: {executor: slurm} or a FILE.py:FUNCTION into site.yaml"
            )
        _check_installed(self.site.nemo_run.python)
        return ((),) * at_once

    def launcher(self, nodes: Sequence[str], *, num_nodes: int) -> NemoRunLauncher:
        """See `Engine`."""
        del nodes
        return NemoRunLauncher(num_nodes, self.site)

    def adopt(self, attempt_id: str, *, stdout: Path) -> NodesHandle:
        """See `Engine`."""
        return NemoRun(stdout, attempt_id)


@cache
def _has_nemo_run(python: str) -> bool:
    """Whether another Python finds NeMo-Run and this package."""
    code = (
        "from importlib.util import find_spec as f; import json; "
        f"print(json.dumps(bool(f('nemo_run') and f('{__package__}'))))"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, timeout=_LOOK_S, check=True)
        return bool(json.loads(done.stdout))
    except (OSError, ValueError, subprocess.SubprocessError):
        return False


def _check_installed(python: str | None) -> None:
    """Raise ConfigError if NeMo-Run is not installed in `python`; None means this process's Python."""
    if python is None and find_spec("nemo_run") is None:
        raise ConfigError(
            "launcher: nemo-run; NeMo-Run is not installed here: pip install 'quartet-plugin[nemo-run]', or "
            "name a python that has it and this package by nemo_run.python"
        )
    if python is not None and not _has_nemo_run(python):
        raise ConfigError(
            f"launcher: nemo-run; nemo_run.python: {python}: does not find nemo_run and quartet_plugin; "
            "install both there"
        )


def engine(site: Site) -> NemoRunEngine:
    """The engine of the name `nemo-run`. Starting a command needs NeMo-Run; ending one does not."""
    return NemoRunEngine(site)
