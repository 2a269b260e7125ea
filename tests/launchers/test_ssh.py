"""Trials on hosts that a real sshd answers for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers import ssh
from quartet_plugin.launchers.engines import engine_named
from quartet_plugin.launchers.protocol import Engine
from quartet_plugin.launchers.site import Site
from quartet_plugin.testing.launchers import LauncherConformance
from tests.launchers import namespaces
from tests.launchers.ssh_hosts import SshHosts, ssh_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Three hosts for all tests of this file."""
    namespaces.require()
    with ssh_hosts(tmp_path_factory.mktemp("ssh"), number=3) as running:
        yield running


class TestHosts(LauncherConformance):
    """Hosts that a site names."""

    @pytest.fixture(autouse=True)
    def _use(self, hosts: SshHosts) -> None:
        self._hosts = hosts

    def engine(self) -> Engine:
        """The hosts."""
        return ssh.engine(self.site())

    def site(self) -> Site:
        """With the tests' own keys and ports."""
        return self._hosts.site

    def test_a_host_that_does_not_answer_is_named(self, tmp_path: Path) -> None:
        """Then the plan is not to blame."""
        self._hosts.kill("h2")
        try:
            launcher = self.engine().launcher(("h1", "h2"), num_nodes=2)
            env = {"QUARTET_ATTEMPT_ID": "0" * 32, "PATH": "/usr/bin:/bin"}
            handle = launcher.start(["sleep", "100"], env=env, cwd=tmp_path, stdout=tmp_path / "out")
            while handle.poll() is None:
                pass
            assert handle.fault == "ssh has no connection to h2"
            assert handle.end_on_nodes() == ("host h2",)
        finally:
            self._hosts.start("h2")


def test_without_hosts_it_says_where_to_name_them() -> None:
    with pytest.raises(ConfigError, match=r"ssh: \{hosts: \[...\]\} into a site.yaml"):
        engine_named("ssh", site=Site()).divide(num_nodes=1, at_once=1)
