"""Trials through NeMo-Run: its local executor, and its Slurm executor on a real Slurm of four nodes."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers import nemo_run, nemo_run_driver
from quartet_plugin.launchers.engines import engine_named
from quartet_plugin.launchers.protocol import Engine, NodesHandle
from quartet_plugin.launchers.shared_node import BEGUN_FILE, EXIT_FILE
from quartet_plugin.launchers.site import NemoRunSite, Site, SlurmSite
from quartet_plugin.testing.launchers import LauncherConformance
from tests.cli.tuning import wait_until

ROOT = Path(__file__).parents[2]
RELEASE = Path(sys.prefix) / "releases" / "nemo-run"


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Python that has NeMo-Run: this one with the release's folder, and a home of its own."""
    # A short path without anything that NeMo-Run's shells would read.
    with tempfile.TemporaryDirectory(prefix="nemo-", ignore_cleanup_errors=True) as folder:
        script = Path(folder) / "python"
        script.write_text(
            f'#!/bin/sh\nPYTHONPATH={RELEASE}:{ROOT} NEMORUN_HOME={folder} exec {sys.executable} "$@"\n'
        )
        script.chmod(0o755)
        yield str(script)


class OnNemoRun(LauncherConformance):
    """The suite on an executor."""

    executor = "local"

    @pytest.fixture(autouse=True)
    def _use(self, python: str) -> None:
        self._python = python

    def engine(self) -> Engine:
        """The executor."""
        return nemo_run.engine(self.site())

    def site(self) -> Site:
        """With the tests' own NeMo-Run."""
        asked = NemoRunSite(executor=self.executor, python=self._python)
        return Site(nemo_run=asked, slurm=SlurmSite(account="tests"))


@pytest.mark.nightly
@pytest.mark.timeout(300)
class TestLocal(OnNemoRun):
    """One node: this one."""

    num_nodes = 1


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("outside_of_jobs")
class TestSlurm(OnNemoRun):
    """Jobs that NeMo-Run queues."""

    executor = "slurm"


def started(site: Site, folder: Path) -> NodesHandle:
    """A command that sleeps."""
    env = {"QUARTET_ATTEMPT_ID": "0" * 32, "PATH": os.environ["PATH"]}
    launcher = nemo_run.engine(site).launcher((), num_nodes=1)
    return launcher.start(["sleep", "100"], env=env, cwd=folder, stdout=folder / "out")


@pytest.mark.slow
def test_an_executor_of_the_users_own(python: str, tmp_path: Path) -> None:
    file = tmp_path / "executors.py"
    file.write_text("import nemo_run\n\n\ndef mine():\n    return nemo_run.LocalExecutor()\n")
    site = Site(nemo_run=NemoRunSite(executor=f"{file}:mine", python=python))
    handle = started(site, tmp_path)
    wait_until(lambda: not handle.is_pending, what="the node")
    assert handle.poll() is None
    assert handle.end_on_nodes() == ()


@pytest.mark.slow
def test_an_executor_that_fails_is_no_fault_of_a_plan(python: str, tmp_path: Path) -> None:
    site = Site(nemo_run=NemoRunSite(executor=f"{tmp_path}/none.py:mine", python=python))
    handle = started(site, tmp_path)
    wait_until(lambda: handle.poll() is not None, what="the end")
    assert handle.fault == f"nemo_run.executor: {tmp_path}/none.py: not found"


def test_its_local_executor_has_one_node() -> None:
    engine = nemo_run.NemoRunEngine(Site())
    with pytest.raises(ConfigError, match="its local executor has one node"):
        engine.divide(num_nodes=2, at_once=1)


def test_without_nemo_run_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemo_run, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'quartet-plugin\[nemo-run\]'"):
        engine_named("nemo-run", site=Site()).divide(num_nodes=1, at_once=1)
    other = Site(nemo_run=NemoRunSite(python="/bin/false"))
    with pytest.raises(ConfigError, match="/bin/false: does not find nemo_run"):
        engine_named("nemo-run", site=other).divide(num_nodes=1, at_once=1)


def test_what_a_killed_tuner_started_is_adopted_without_nemo_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files say what runs; the settings of the run's site are not at hand."""
    monkeypatch.setattr(nemo_run, "find_spec", lambda name: None)
    handle = engine_named("nemo-run", site=Site()).adopt("a" * 32, stdout=tmp_path / "stdout.log")
    assert isinstance(handle, nemo_run.NemoRun)


def test_a_node_that_is_asked_to_end_takes_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = nemo_run_driver.HeldExperiment({"stdout": str(tmp_path / "stdout.log"), "num_nodes": 1})
    folder = tmp_path / "nodes"
    folder.mkdir()
    (folder / BEGUN_FILE.format(0)).touch()
    looks = []

    def end_at_the_third_look(pause_s: float) -> None:
        looks.append(pause_s)
        if len(looks) == 3:
            (folder / EXIT_FILE.format(0)).write_text('{"code": 0}')

    monkeypatch.setattr(nemo_run_driver, "_FILES_S", 0.0)
    monkeypatch.setattr("time.sleep", end_at_the_third_look)
    driver._end(15, None)
    assert driver._watch(None, "trial") == 0
    # A node that does not even end when it is to kill the command is given up.
    (folder / EXIT_FILE.format(0)).unlink()
    driver._shared.kill()
    assert driver._watch(None, "trial") == nemo_run_driver._STOPPED_EXIT


def test_no_shell_splits_the_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = []

    def script(inline: str) -> None:
        scripts.append(inline)
        raise RuntimeError

    monkeypatch.setitem(sys.modules, "nemo_run", SimpleNamespace(Script=script))
    monkeypatch.setattr("signal.signal", lambda *ignored: None)
    request = {"executor": "local", "words": ["/home/me/my envs/python", "-m", "x"]}
    driver = nemo_run_driver.HeldExperiment(
        {"stdout": str(tmp_path / "stdout.log"), "num_nodes": 1, **request}
    )
    with pytest.raises(RuntimeError):
        driver.run()
    assert scripts == ["exec '/home/me/my envs/python' -m x\n"]


def test_a_path_is_hexadecimal_digits_alone(tmp_path: Path) -> None:
    launcher = nemo_run.NemoRunLauncher(1, Site())
    words = launcher.words(["x"], attempt_id="0", cwd=tmp_path, stdout=tmp_path / "$(touch x)'\n" / "out")
    script = words[: words.index("<")]
    done = subprocess.run(
        ["bash", "-c", "printf '%s\\n' " + " ".join(script)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == script
    assert bytes.fromhex(script[-1]).decode() == f"{tmp_path}/$(touch x)'\n/nodes/request.json"
