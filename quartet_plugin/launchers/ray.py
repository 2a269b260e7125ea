"""Trials on the nodes of a Ray that runs already: a placement group for each attempt, an actor on each node.

The nodes see the run's folder and the installation under the same paths. One process of this host is the
driver (`ray_driver`): it outlives the tuner, and its end ends what it has started. The tuner itself never
imports Ray. What goes through Ray is plain data, which Ray writes in its own form.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.launchers.held_run import CONNECTIONS_FILE, HeldRun, start_held
from quartet_plugin.launchers.protocol import NodesHandle
from quartet_plugin.launchers.ray_driver import FAULT_FILE, PLACED_FILE
from quartet_plugin.launchers.site import Site
from quartet_plugin.protocol.environment import ATTEMPT_ID

DRIVER = "quartet_plugin.launchers.ray_driver"
_END_S = 120.0


class RayRun(HeldRun):
    """An attempt on nodes of Ray."""

    @property
    def is_pending(self) -> bool:
        """Whether the placement group waits for nodes."""
        return self.poll() is None and not self.read(PLACED_FILE)

    @property
    def fault(self) -> str | None:
        """The nodes that Ray lost, or why it had none."""
        reason: str | None = self.read(FAULT_FILE).get("reason")
        return reason

    def end_on_nodes(self) -> tuple[str, ...]:
        """Kill on every node what carries the attempt's id, and then the driver.

        In this order the process that starts the command on a node sees its end, and kills what it has left.
        """
        placed = self.read(PLACED_FILE)
        left = self._end(placed["nodes"]) if placed else ()
        self.cut()
        return left

    def _end(self, nodes: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
        request = {
            "address": self.read(CONNECTIONS_FILE).get("address"),
            "attempt_id": self.attempt_id,
            "nodes": list(nodes),
        }
        try:
            left = json.loads(_driver_answer("--end", request))
        except (OSError, ValueError, IndexError, subprocess.SubprocessError):
            left = [node["address"] for node in nodes]
        return tuple(f"node {address}" for address in left)


@dataclass(frozen=True, slots=True)
class RayLauncher:
    """Starts commands on `num_nodes` nodes that Ray chooses."""

    num_nodes: int
    site: Site
    engine: str = "ray"

    def words(self, argv: Sequence[str], *, attempt_id: str, cwd: Path, stdout: Path) -> list[str]:
        """See `NodesLauncher`: the driver, which gets the command through its standard input."""
        del attempt_id, cwd, stdout
        return [sys.executable, "-m", DRIVER, "<", *argv]

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdout: Path) -> NodesHandle:
        """See `NodesLauncher`."""
        ray = self.site.ray
        request = {
            **_asked(self.site),
            "argv": list(argv),
            "env": {**env, **self.site.environment},
            "cwd": str(cwd),
            "stdout": str(stdout),
            "python": self.site.python,
            "num_nodes": self.num_nodes,
            "grows": ray.grows,
        }
        process = start_held(DRIVER, request, env=env, stdout=stdout, connections={"address": ray.address})
        return RayRun(stdout.parent, env[ATTEMPT_ID], process)


@dataclass(frozen=True, slots=True)
class RayEngine:
    """The nodes of a Ray, which chooses them."""

    site: Site

    def divide(self, *, num_nodes: int, at_once: int) -> tuple[tuple[str, ...], ...]:
        """See `Engine`: Ray chooses, so that two trials are apart by what they ask of a node."""
        del num_nodes
        return ((),) * at_once

    def count_nodes(self) -> int:
        """See `CountedNodes`: the nodes that have what a trial takes of each."""
        try:
            counted = json.loads(_driver_answer("--count", _asked(self.site)))
            if isinstance(counted, int):
                return counted
            reason = str(counted["reason"])
        except (OSError, ValueError, LookupError, TypeError, subprocess.SubprocessError) as error:
            reason = f"its nodes cannot be counted: {type(error).__name__}"
        raise InfrastructureError(f"launcher: ray; {reason}")

    def launcher(self, nodes: Sequence[str], *, num_nodes: int) -> RayLauncher:
        """See `Engine`."""
        del nodes
        return RayLauncher(num_nodes, self.site)

    def adopt(self, attempt_id: str, *, stdout: Path) -> NodesHandle:
        """See `Engine`."""
        return RayRun(stdout.parent, attempt_id)


def _asked(site: Site) -> dict[str, Any]:
    """Which Ray, and what a trial takes of each of its nodes."""
    ray = site.ray
    return {
        "address": ray.address,
        "cpus_per_node": ray.cpus_per_node,
        "gpus_per_node": ray.gpus_per_node or 0,
    }


def _driver_answer(option: str, request: Mapping[str, Any]) -> bytes:
    """The line that a driver with this option answers. Raises SubprocessError where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", DRIVER, option],
        input=json.dumps(request).encode(),
        capture_output=True,
        timeout=_END_S,
        check=True,
    )
    # Ray may print lines of its own before.
    return done.stdout.splitlines()[-1]


def engine(site: Site) -> RayEngine:
    """The engine of the name `ray`. Raises ConfigError where Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError("launcher: ray; Ray is not installed here: pip install 'quartet-plugin[ray]'")
    return RayEngine(site)
