"""Hosts that a real sshd answers for: each a process, mount and UTS namespace of its own.

They share the loopback, or have a network namespace each. It needs root, and Debian's openssh-server.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quartet_plugin.launchers.site import Site, SshSite
from tests.launchers import namespaces
from tests.ports import free_ports

_ANSWER_S = 60.0
_SSHD = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host-key
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/{name}.pid
StrictModes no
UsePAM no
MaxStartups 100
"""
_HOST = """\
Host {name}
    HostName {address}
    Port {port}
    User root
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known-hosts
    HostKeyAlias host
"""


@dataclass
class SshHosts:
    """Running hosts h1, h2, ...; `site` names them."""

    folder: Path
    names: tuple[str, ...]
    networks: tuple[str, ...] = ()
    _daemons: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def site(self) -> Site:
        """What a site.yaml would say."""
        return Site(ssh=SshSite(hosts=self.names, config=str(self.folder / "config")))

    def start(self, name: str) -> None:
        """Start a host's sshd."""
        sshd = ["/usr/sbin/sshd", "-D", "-e", "-f", str(self.folder / f"{name}.conf")]
        network = dict(zip(self.names, self.networks, strict=False)).get(name)
        enter = [] if network is None else ["ip", "netns", "exec", network]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [*enter, *namespaces.words_on(name, str(self.folder / "hosts"), sshd)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def await_answer(self, name: str) -> None:
        """Wait until a host that was started answers."""
        end = time.monotonic() + _ANSWER_S
        words = ["ssh", "-F", str(self.folder / "config"), "-o", "BatchMode=yes", name, "true"]
        while subprocess.run(words, capture_output=True, check=False).returncode:
            assert time.monotonic() < end, (self.folder / f"{name}.log").read_text()
            time.sleep(0.1)

    def kill(self, name: str) -> None:
        """Kill a host with everything that runs on it."""
        daemon = self._daemons.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()

    def stop(self) -> None:
        """Kill every host."""
        for name in list(self._daemons):
            self.kill(name)


@contextlib.contextmanager
def ssh_hosts(folder: Path, *, number: int, networks: Sequence[tuple[str, str]] = ()) -> Iterator[SshHosts]:
    """Hosts h1 to h`number` that answer; ended with the block.

    `networks` has the network namespace and the address of each; without it they share the loopback.
    """
    names = tuple(f"h{index}" for index in range(1, number + 1))
    addresses = [address for _, address in networks] or ["127.0.0.1"] * number
    for name in ("key", "host-key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "known-hosts").write_text(f"host {(folder / 'host-key.pub').read_text()}")
    listed = zip(("127.0.0.1", *addresses), ("localhost", *names), strict=True)
    (folder / "hosts").write_text("".join(f"{address} {name}\n" for address, name in listed))
    Path("/run/sshd").mkdir(exist_ok=True)
    sections = []
    for name, port, address in zip(names, free_ports(number), addresses, strict=True):
        words = {"port": port, "folder": folder, "name": name, "address": address}
        (folder / f"{name}.conf").write_text(_SSHD.format(**words))
        sections.append(_HOST.format(**words))
    (folder / "config").write_text("".join(sections))
    hosts = SshHosts(folder=folder, names=names, networks=tuple(name for name, _ in networks))
    try:
        for name in names:
            hosts.start(name)
        for name in names:
            hosts.await_answer(name)
        yield hosts
    finally:
        hosts.stop()
