"""`quartet doctor --nodes`: each node that a launcher reaches looks at itself; one table compares them."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quartet_plugin.errors import ConfigError, InfrastructureError, UsageError
from quartet_plugin.protocol.environment import ATTEMPT_ID
from quartet_plugin.protocol.node_identity import distinct_names

if TYPE_CHECKING:
    from quartet_plugin.launchers.protocol import Engine, NodesHandle
    from quartet_plugin.launchers.site import Site
    from quartet_plugin.report.node_checks import CheckRow

_MODULE = "quartet_plugin.probe.node_checks"
# A node has a minute to find the first one.
_LIMIT_S, _POLL_S = 180.0, 0.2


def node_rows(
    *, launcher: str | None, site: Path | None, trial_nodes: int | None
) -> "tuple[list[CheckRow], list[dict[str, Any]]]":
    """The table's rows and the facts of every node that the launcher has, or of this machine.

    `trial_nodes` is the number of nodes, as for a trial of that size; None for all of them. Raises
    ConfigError for a launcher whose nodes are not known before something runs, and InfrastructureError where
    nothing could be started.
    """
    from quartet_plugin.launchers.engines import LOCAL
    from quartet_plugin.launchers.site import read_site
    from quartet_plugin.report.node_checks import check_rows

    read = read_site(site)
    name = launcher or ("slurm" if "SLURM_JOB_ID" in os.environ else LOCAL)
    if name == LOCAL and trial_nodes is not None:
        raise UsageError("quartet doctor: --trial-nodes needs --launcher, which reaches the nodes; add it")
    # Here, and not below /tmp: it must be there on every node.
    folder = Path(tempfile.mkdtemp(prefix=".quartet-doctor-", dir=Path.cwd()))
    try:
        names = (
            _look_here(folder)
            if name == LOCAL
            else _look_on(name, site=read, folder=folder, trial_nodes=trial_nodes)
        )
        facts = {}
        for index, node in enumerate(names):
            file = folder / f"node-{index}.json"
            if file.exists():
                facts[node] = json.loads(file.read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return check_rows(facts, expected=names), list(facts.values())


def _look_here(folder: Path) -> tuple[str, ...]:
    environment = {**os.environ, "NNODES": "1", "NODE_RANK": "0"}
    words = [sys.executable, "-m", _MODULE, str(folder)]
    try:
        subprocess.run(words, env=environment, check=False, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"this machine: its checks did not end within {_LIMIT_S:g} s") from error
    return ("this machine",)


def _look_on(launcher: str, *, site: "Site", folder: Path, trial_nodes: int | None) -> tuple[str, ...]:
    """Start the checks once on each node, wait for their end, and return the nodes' names."""
    from quartet_plugin.launchers.engines import engine_named

    engine = engine_named(launcher, site=site)
    number = _count_nodes(engine, launcher) if trial_nodes is None else trial_nodes
    (names,) = engine.divide(num_nodes=number, at_once=1)
    argv = [site.python or sys.executable, "-m", _MODULE, str(folder)]
    environment = {**os.environ, ATTEMPT_ID: secrets.token_hex(16)}
    log = folder / "stdout.log"
    handle = engine.launcher(names, num_nodes=number).start(argv, env=environment, cwd=Path.cwd(), stdout=log)
    fault = _await_end(handle)
    if not any(folder.glob("node-*.json")):
        printed = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        last = (printed or ["nothing was printed"])[-1][:300]
        raise InfrastructureError(f"--launcher {launcher}: no node could be checked: {fault or last}")
    return names or _names_of_hosts(folder, number)


def _count_nodes(engine: "Engine", launcher: str) -> int:
    """The number of nodes that a launcher has at once."""
    from quartet_plugin.launchers.protocol import CountedNodes

    if not isinstance(engine, CountedNodes):
        raise ConfigError(
            f"--launcher {launcher}: its nodes are not known before a job runs; give their "
            "number with --trial-nodes"
        )
    number = engine.count_nodes()
    if not number:
        raise InfrastructureError(f"--launcher {launcher}: no node has what site.yaml asks of each")
    return number


def _await_end(handle: "NodesHandle") -> str | None:
    """Wait for the end of the checks, and end what is left of them; what the engine says has gone wrong.

    The time in which they wait for nodes does not count.
    """
    from quartet_plugin.cli.output import tell

    end_s: float | None = None
    is_told = False
    try:
        while handle.poll() is None and (end_s is None or time.monotonic() < end_s):
            if end_s is None and not handle.is_pending:
                end_s = time.monotonic() + _LIMIT_S
            elif end_s is None and not is_told:
                is_told = True
                tell("waiting for nodes; Ctrl-C ends the checks")
            time.sleep(_POLL_S)
        return handle.fault
    finally:
        if left := handle.end_on_nodes():
            tell(f"{', '.join(left)}: may still be running the checks; end them there")


def _names_of_hosts(folder: Path, number: int) -> tuple[str, ...]:
    """The host names of nodes that a queue has chosen; `node N` for one without an answer.

    Nodes that share a host name have their index behind it.
    """
    hosts = []
    for index in range(number):
        file = folder / f"node-{index}.json"
        hosts.append(json.loads(file.read_text())["host"] if file.exists() else "node")
    return tuple(
        f"node {index}" if host == "node" else name
        for index, (host, name) in enumerate(zip(hosts, distinct_names(hosts), strict=True))
    )
