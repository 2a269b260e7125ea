"""Trials, and trainings, on hosts that a real sshd answers for."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from quartet_plugin.errors import ConfigError, ExitCode
from quartet_plugin.launchers import ssh
from quartet_plugin.launchers.engines import engine_named
from quartet_plugin.launchers.protocol import Engine
from quartet_plugin.launchers.site import Site
from quartet_plugin.testing.launchers import LauncherConformance
from tests.launchers import namespaces
from tests.launchers.checked_nodes import check_nodes
from tests.launchers.ssh_hosts import SshHosts, ssh_hosts
from tests.megatron.entry_launch import MEGATRON_FLAGS, SCRIPT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]


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
            self._hosts.await_answer("h2")

    def test_the_doctor_looks_at_hosts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """At all of them, or at as many as a trial has."""
        site = tmp_path / "site.yaml"
        site.write_text(self.site().model_dump_json(exclude_defaults=True))
        words = ("--launcher", "ssh", "--site", str(site))
        for more, hosts in (((), ["h1", "h2", "h3"]), (("--trial-nodes", "2"), ["h1", "h2"])):
            nodes = check_nodes(*words, *more, folder=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
            assert [node["host"] for node in nodes] == hosts


def test_without_hosts_it_says_where_to_name_them() -> None:
    with pytest.raises(ConfigError, match=r"ssh: \{hosts: \[...\]\} into a site.yaml"):
        engine_named("ssh", site=Site()).divide(num_nodes=1, at_once=1)


class Training:
    """`quartet train --launcher ssh` on two hosts, as a process in `folder`."""

    def __init__(self, hosts: SshHosts, folder: Path, command: Sequence[str]) -> None:
        site = folder / "site.yaml"
        ssh_site = {"hosts": list(hosts.names), "config": str(hosts.folder / "config")}
        site.write_text(json.dumps({"ssh": ssh_site}))
        entry = "from quartet_plugin.cli.main import entry; entry()"
        options = ["--launcher", "ssh", "--site", str(site), "--nodes", "2", "--device", "cpu"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", entry, "train", *options, "--", *command],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )

    def ends(self) -> tuple[int, str, str]:
        """The exit code, the output and the errors."""
        output, errors = self.process.communicate(timeout=150)
        return self.process.returncode, output, errors


def test_a_training_runs_on_every_host_and_its_output_is_followed(hosts: SshHosts, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text('echo "node $NODE_RANK of $NNODES"\nexit "${1:-0}"\n')
    code, output, errors = Training(hosts, tmp_path, ["bash", str(script)]).ends()
    assert code == 0, errors
    assert sorted(output.splitlines()) == ["node 0 of 2", "node 1 of 2"]
    (kept,) = tmp_path.glob("quartet-train-*/output.log")
    assert kept.read_text() == output
    code, output, errors = Training(hosts, tmp_path, ["bash", str(script), "3"]).ends()
    assert code == ExitCode.INFRASTRUCTURE, errors
    assert "exit code 3" in output


def test_a_training_ends_at_ctrl_c_on_every_host(hosts: SshHosts, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("echo begun; exec sleep 98765")
    training = Training(hosts, tmp_path, ["bash", str(script)])
    assert training.process.stdout is not None
    assert [training.process.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
    training.process.send_signal(signal.SIGINT)
    code, _, errors = training.ends()
    assert code == ExitCode.INTERRUPTED, errors
    listed = subprocess.run(["pgrep", "-f", "sleep 98765"], capture_output=True, text=True, check=False)
    assert not listed.stdout


@pytest.mark.timeout(300)
def test_megatron_trains_on_two_hosts(hosts: SshHosts, tmp_path: Path) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    more = shlex.split("--train-iters 3 --pipeline-model-parallel-size 2")
    command = [torchrun, "--nproc-per-node", "1", str(SCRIPT), *MEGATRON_FLAGS, *more]
    code, output, errors = Training(hosts, tmp_path, command).ends()
    assert code == 0, (output[-2000:], errors)
    assert "iteration        3/       3" in output
