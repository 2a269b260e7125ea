"""Trials on hosts that ssh reaches, for clusters without a queue; `site.yaml` names the hosts.

The hosts see the run's folder and the installation under the same paths, and take a key without asking. What
ssh's command line holds is the same for every trial: the command itself goes through its standard input.
"""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.launchers.connected_node import MODULE
from quartet_plugin.launchers.held_run import CONNECTIONS_FILE, HeldRun, start_held
from quartet_plugin.launchers.protocol import NodesHandle
from quartet_plugin.launchers.site import Site, SshSite
from quartet_plugin.launchers.ssh_fan_out import UNREACHED_FILE
from quartet_plugin.protocol.environment import ATTEMPT_ID

FAN_OUT = "quartet_plugin.launchers.ssh_fan_out"
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=15", "ServerAliveCountMax=8")
_END_S = 60.0
_MAX_AT_ONCE = 64


def ssh_words(host: str, *words: str, config: str | None, python: str) -> list[str]:
    """The words that start a module of the plugin on a host, without a value of the user's command."""
    options = [word for option in _OPTIONS for word in ("-o", option)]
    file = [] if config is None else ["-F", config]
    return ["ssh", "-T", *file, *options, "--", host, "exec", shlex.quote(python), "-m", MODULE, *words]


class SshRun(HeldRun):
    """An attempt on hosts."""

    @property
    def is_pending(self) -> bool:
        """Hosts are there at once."""
        return False

    @property
    def fault(self) -> str | None:
        """The hosts that ssh could not reach."""
        hosts = self.read(UNREACHED_FILE)
        return f"ssh has no connection to {', '.join(map(str, hosts))}" if hosts else None

    def end_on_nodes(self) -> tuple[str, ...]:
        """Cut the connections, and kill on every host what carries the attempt's id."""
        self.cut()
        content = self.read(CONNECTIONS_FILE)
        hosts = content.get("hosts", [])

        def end(host: str) -> str | None:
            words = ssh_words(
                host, "--end", self.attempt_id, config=content["config"], python=content["python"]
            )
            try:
                done = subprocess.run(
                    words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_END_S, check=False
                )
            except (OSError, subprocess.TimeoutExpired):
                return host
            return host if done.returncode else None

        with ThreadPoolExecutor(max_workers=_MAX_AT_ONCE) as pool:
            left = [host for host in pool.map(end, hosts) if host is not None]
        return tuple(f"host {host}" for host in left)


@dataclass(frozen=True, slots=True)
class SshLauncher:
    """Starts commands on `hosts`."""

    hosts: tuple[str, ...]
    site: Site
    engine: str = "ssh"

    @property
    def num_nodes(self) -> int:
        """See `Launcher`."""
        return len(self.hosts)

    def words(self, argv: Sequence[str], *, attempt_id: str, cwd: Path, stdout: Path) -> list[str]:
        """See `NodesLauncher`: for the first host; the command goes through the standard input."""
        del attempt_id, cwd, stdout
        return [*self._ssh(self.hosts[0]), "<", *argv]

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdout: Path) -> NodesHandle:
        """See `NodesLauncher`."""
        request = {
            "argv": list(argv),
            "env": {**env, **self.site.environment},
            "cwd": str(cwd),
            "nodes": list(self.hosts),
            "ssh": [self._ssh(host) for host in self.hosts],
            "folder": str(stdout.parent),
        }
        connections = {
            "hosts": list(self.hosts),
            "config": self._config,
            "python": self.site.python or sys.executable,
        }
        process = start_held(FAN_OUT, request, env=env, stdout=stdout, connections=connections)
        return SshRun(stdout.parent, env[ATTEMPT_ID], process)

    @property
    def _config(self) -> str | None:
        return None if self.site.ssh is None else self.site.ssh.config

    def _ssh(self, host: str) -> list[str]:
        return ssh_words(host, config=self._config, python=self.site.python or sys.executable)


@dataclass(frozen=True, slots=True)
class SshEngine:
    """The hosts of the site."""

    site: Site

    def divide(self, *, num_nodes: int, at_once: int) -> tuple[tuple[str, ...], ...]:
        """See `Engine`: the hosts in the site's order."""
        hosts = self._ssh.hosts
        if num_nodes * at_once > len(hosts):
            raise ConfigError(
                f"launcher: ssh; {at_once} trials at once of {num_nodes} nodes need {at_once * num_nodes}, "
                f"and the site names {len(hosts)} hosts; ask for fewer, or name more under ssh.hosts"
            )
        return tuple(hosts[index * num_nodes : (index + 1) * num_nodes] for index in range(at_once))

    def count_nodes(self) -> int:
        """See `CountedNodes`."""
        return len(self._ssh.hosts)

    def launcher(self, nodes: Sequence[str], *, num_nodes: int) -> SshLauncher:
        """See `Engine`."""
        if len(nodes) != num_nodes:
            raise InfrastructureError(f"launcher: ssh; {len(nodes)} hosts for a trial of {num_nodes}")
        return SshLauncher(tuple(nodes), self.site)

    def adopt(self, attempt_id: str, *, stdout: Path) -> NodesHandle:
        """See `Engine`."""
        return SshRun(stdout.parent, attempt_id)

    @property
    def _ssh(self) -> SshSite:
        if self.site.ssh is None:
            raise ConfigError(
                "launcher: ssh; the site names no hosts: write ssh: {hosts: [...]} into a site.yaml and give "
                "it with --site"
            )
        return self.site.ssh


def engine(site: Site) -> SshEngine:
    """The engine of the name `ssh`."""
    return SshEngine(site)
