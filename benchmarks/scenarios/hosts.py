"""The hosts of a scenario: what starts jobs on them, and the cluster file that `quartet probe` writes there.

They are network namespaces behind shaped links, which a real sshd answers for, as in the launchers' tests.
"""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.scenarios.network import address
from benchmarks.scenarios.result_files import ROOT
from quartet_plugin.launchers.site import read_site
from quartet_plugin.launchers.ssh import SshLauncher
from quartet_plugin.model.files import read_json, write_json_atomic
from tests.launchers.linked_hosts import LinkedHosts

_PORT = 29_400


def sections(hosts: LinkedHosts) -> dict[str, Any]:
    """The launcher and the site of a search on the hosts, as q.yaml has them."""
    return {"launcher": "ssh", "site": str(hosts.site)}


def launcher_of(hosts: LinkedHosts) -> SshLauncher:
    """What starts a job on all hosts."""
    return SshLauncher(hosts.names, read_site(hosts.site))


def probe(hosts: LinkedHosts, output: Path, *, processes_per_host: int) -> None:
    """Run `quartet probe` on all hosts at once; the first one writes the cluster file `output`.

    The file's slowdowns are left out: the hosts share this machine's cores, so that they say which processes
    shared one when it measured. Raises CalledProcessError where it fails on a host.
    """
    settings = read_site(hosts.site).ssh
    assert settings is not None
    assert settings.config is not None
    programs = Path(sys.executable).parent
    running = []
    for index, name in enumerate(hosts.names):
        words = [
            *("env", "OMP_NUM_THREADS=1", str(programs / "quartet"), "probe", "--device", "cpu"),
            *("--output", str(output), "--", str(programs / "torchrun"), "--nnodes", str(len(hosts.names))),
            *("--node-rank", str(index), "--nproc-per-node", str(processes_per_host)),
            *("--master-addr", address(0), "--master-port", str(_PORT)),
        ]
        there = f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(words)}"
        ssh = ["ssh", "-F", settings.config, "-o", "BatchMode=yes", name, there]
        running.append(subprocess.Popen(ssh, stdin=subprocess.DEVNULL))
    codes = [process.wait() for process in running]
    for process, code in zip(running, codes, strict=True):
        if code:
            raise subprocess.CalledProcessError(code, process.args)
    content = read_json(output)
    nodes = [{**node, "slowdown": None} for node in content["nodes"]]
    write_json_atomic(output, {**content, "nodes": nodes})
