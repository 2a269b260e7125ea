"""Trials on the nodes of a real Ray."""

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.launchers import ray, ray_driver
from quartet_plugin.launchers.engines import engine_named
from quartet_plugin.launchers.protocol import Engine, NodesHandle
from quartet_plugin.launchers.site import RaySite, Site
from quartet_plugin.testing.launchers import LauncherConformance
from tests.cli.tuning import environment, living, prepare, wait_until
from tests.launchers import namespaces
from tests.launchers.checked_nodes import check_nodes
from tests.launchers.ray_cluster import RayNodes, ray_nodes

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Two nodes for all tests of this file."""
    namespaces.require()
    with ray_nodes(2) as running:
        yield running


@pytest.mark.slow
class TestNodes(LauncherConformance):
    """Nodes that Ray chooses."""

    @pytest.fixture(autouse=True)
    def _use(self, nodes: RayNodes) -> None:
        self._nodes = nodes

    def engine(self) -> Engine:
        """The nodes."""
        return ray.engine(self.site())

    def site(self) -> Site:
        """The tests' own Ray."""
        return Site(ray=RaySite(address=self._nodes.address))

    def test_a_trial_waits_for_nodes_that_are_taken(self, tmp_path: Path) -> None:
        """That time counts for no deadline."""
        first = started(self.engine(), tmp_path / "first", num_nodes=2)
        await_placed(first)
        second = started(self.engine(), tmp_path / "second", num_nodes=1)
        time.sleep(1.0)
        assert second.is_pending
        assert first.end_on_nodes() == ()
        await_placed(second)
        assert second.end_on_nodes() == ()

    def test_more_nodes_than_ray_has_are_said(self, tmp_path: Path) -> None:
        """Then the plan is not to blame."""
        handle = started(self.engine(), tmp_path / "r", num_nodes=3)
        wait_until(lambda: handle.poll() is not None, what="the end")
        assert handle.fault == (
            "Ray has 2 nodes of 1 CPU or more, and the trial needs 3; request fewer, or write "
            "ray: {grows: true} if Ray adds nodes on demand"
        )

    def test_the_doctor_looks_at_every_node(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Ray says how many there are."""
        site = tmp_path / "site.yaml"
        site.write_text(self.site().model_dump_json(exclude_defaults=True))
        words = ("--launcher", "ray", "--site", str(site))
        nodes = check_nodes(*words, folder=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
        assert {node["host"] for node in nodes} == {"ray-0", "ray-1"}

    def test_nodes_without_what_a_trial_takes_are_not_counted(self) -> None:
        """The nodes have one CPU each."""
        for cpus_per_node, number in ((1, 2), (2, 0)):
            asked = RaySite(address=self._nodes.address, cpus_per_node=cpus_per_node)
            assert ray.engine(Site(ray=asked)).count_nodes() == number


CONFIG = """\
run: fake
search: {pipeline_parallel: 2, virtual_stages: 1, schedule: 1f1b}
trial: {nodes: 2, warmup: 1, measure: 3, deadline_s: 60}
study: {trials: 2, top_k: 1, rounds: 3, control: 0}
launcher: ray
site: site.yaml
device: cpu
"""


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_study_of_two_nodes(nodes: RayNodes, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two ranks of the stand-in for a training, one on each node."""
    (tmp_path / "site.yaml").write_text(f"ray: {{address: '{nodes.address}'}}\n")
    words, command = prepare(tmp_path, config=CONFIG.replace("site.yaml", str(tmp_path / "site.yaml")))
    per_node = [*command[:2], "1", *command[3:]]
    code = "from quartet_plugin.cli.main import entry; entry()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--", *per_node],
        cwd=tmp_path,
        env=environment(),
        check=False,
        timeout=220,
    )
    printed = capfd.readouterr()
    assert done.returncode == 0, printed.err
    assert "trial 1: " in printed.out
    run = tmp_path / "runs" / "fake"
    results = [json.loads(path.read_text()) for path in sorted(run.glob("trials/*/attempt-1/result.json"))]
    assert [result["outcome"] for result in results][:2] == ["OK", "OK"]
    wait_until(lambda: not living(tmp_path), what="the end of every process", timeout_s=60.0)


def started(engine: Engine, folder: Path, *, num_nodes: int) -> NodesHandle:
    """A command that sleeps."""
    folder.mkdir()
    env = {"QUARTET_ATTEMPT_ID": f"{abs(hash(str(folder))):032x}"[-32:], "PATH": "/usr/bin:/bin"}
    launcher = engine.launcher((), num_nodes=num_nodes)
    return launcher.start(["sleep", "100"], env=env, cwd=folder, stdout=folder / "out")


def await_placed(handle: NodesHandle) -> None:
    """Wait until the command has nodes."""
    end = time.monotonic() + 60.0
    while handle.is_pending:
        assert time.monotonic() < end, "no nodes within 60 s"
        time.sleep(0.05)
    assert handle.poll() is None


@pytest.mark.slow
def test_a_node_that_is_lost_is_named(tmp_path: Path) -> None:
    with ray_nodes(2) as nodes:
        site = Site(ray=RaySite(address=nodes.address))
        handle = started(ray.engine(site), tmp_path / "r", num_nodes=2)
        await_placed(handle)
        nodes.kill_a_node()
        wait_until(lambda: handle.poll() is not None, what="the end")
        assert handle.fault is not None
        assert handle.fault.startswith("Ray has lost ")
        assert handle.end_on_nodes() == ()


@pytest.mark.slow
def test_where_no_ray_answers_it_says_so(tmp_path: Path) -> None:
    engine = ray.engine(Site(ray=RaySite(address="127.0.0.1:1")))
    handle = started(engine, tmp_path / "r", num_nodes=1)
    wait_until(lambda: handle.poll() is not None, what="the end")
    reason = "no Ray answers at 127.0.0.1:1: start one, or name it as HOST:PORT under ray.address"
    assert handle.fault == reason
    with pytest.raises(InfrastructureError, match=f"launcher: ray; {reason}"):
        engine.count_nodes()


def test_without_ray_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'quartet-plugin\[ray\]'"):
        engine_named("ray", site=Site())
    assert importlib.util.find_spec("ray") is not None


def test_a_command_that_is_asked_to_end_takes_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver without a Ray, which sees the end at its third look."""
    calls = []

    def method(name: str) -> SimpleNamespace:
        def remote(*ignored: object) -> str:
            calls.append(name)
            return name

        return SimpleNamespace(remote=remote)

    looks = iter([[], [], ["run"]])
    fake = SimpleNamespace(
        wait=lambda running, timeout: (next(looks), []),
        get=lambda call: 0,
        exceptions=SimpleNamespace(RayError=RuntimeError),
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(ray_driver, "_GRACE_S", -1.0)
    actor = SimpleNamespace(**{name: method(name) for name in ("run", "terminate", "close")})
    attempt = ray_driver.RayAttempt({"stdout": str(tmp_path / "stdout.log")})
    attempt._end(15, None)
    assert attempt._watch([actor], ["a"]) == 0
    assert calls == ["run", "terminate"]
