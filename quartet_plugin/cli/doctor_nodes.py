"""`quartet doctor --nodes`: each node of an allocation looks at itself, and one table compares them."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.protocol.environment import ATTEMPT_ID

if TYPE_CHECKING:
    from quartet_plugin.launchers.site import Site
    from quartet_plugin.report.node_checks import CheckRow

_MODULE = "quartet_plugin.probe.node_checks"
# A node has a minute to find the first one.
_LIMIT_S, _POLL_S = 180.0, 0.2


def node_rows(*, launcher: str | None, site: Path | None) -> "tuple[list[CheckRow], list[dict[str, Any]]]":
    """The table's rows and the facts of every node of the allocation, of `ssh: {hosts}`, or of this one.

    Raises ConfigError for a launcher whose nodes are not known before something runs, and
    InfrastructureError where nothing could be started.
    """
    from quartet_plugin.launchers.engines import LOCAL
    from quartet_plugin.launchers.site import read_site
    from quartet_plugin.report.node_checks import check_rows

    read = read_site(site)
    name = launcher or ("slurm" if "SLURM_JOB_ID" in os.environ else LOCAL)
    # Here, and not below /tmp: it must be there on every node.
    folder = Path(tempfile.mkdtemp(prefix=".quartet-doctor-", dir=Path.cwd()))
    try:
        if name == LOCAL:
            names = _look_here(folder)
        else:
            names = _nodes_of(name, read)
            _look_on(name, names, site=read, folder=folder)
        facts = {}
        for index, node in enumerate(names):
            file = folder / f"node-{index}.json"
            if file.exists():
                facts[node] = json.loads(file.read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return check_rows(facts, expected=names), list(facts.values())


def _nodes_of(launcher: str, site: "Site") -> tuple[str, ...]:
    """The names of the nodes that a launcher has at once."""
    from quartet_plugin.launchers.slurm_commands import allocation

    if launcher == "slurm":
        return allocation(os.environ).nodes
    if launcher == "ssh":
        if site.ssh is None:
            raise ConfigError("--launcher ssh: no hosts; write `ssh: {hosts: [...]}` into --site")
        return tuple(site.ssh.hosts)
    raise ConfigError(
        f"--launcher {launcher}: its nodes are not known before a job runs; run this inside of an allocation "
        "(--launcher slurm), or over --launcher ssh"
    )


def _look_here(folder: Path) -> tuple[str, ...]:
    environment = {**os.environ, "NNODES": "1", "NODE_RANK": "0"}
    subprocess.run(
        [sys.executable, "-m", _MODULE, str(folder)], env=environment, check=False, timeout=_LIMIT_S
    )
    return ("this machine",)


def _look_on(launcher: str, names: Sequence[str], *, site: "Site", folder: Path) -> None:
    """Start the checks once on each node and wait for their end."""
    from quartet_plugin.launchers.engines import engine_named

    engine = engine_named(launcher, site=site)
    argv = [site.python or sys.executable, "-m", _MODULE, str(folder)]
    environment = {**os.environ, ATTEMPT_ID: secrets.token_hex(16)}
    log = folder / "stdout.log"
    handle = engine.launcher(names, num_nodes=len(names)).start(
        argv, env=environment, cwd=Path.cwd(), stdout=log
    )
    end = time.monotonic() + _LIMIT_S
    try:
        while handle.poll() is None and time.monotonic() < end:
            time.sleep(_POLL_S)
    finally:
        handle.end_on_nodes()
    if not any(folder.glob("node-*.json")):
        printed = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        last = (printed or ["nothing was printed"])[-1][:300]
        raise InfrastructureError(f"--launcher {launcher}: no node could be checked: {last}")
