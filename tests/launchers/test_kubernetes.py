"""Trials as jobs of Kubernetes, on a fake of it at the boundary of HTTP, through the real client."""

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.launchers import kubernetes, kubernetes_api, kubernetes_job
from quartet_plugin.launchers.engines import engine_named
from quartet_plugin.launchers.kubernetes_site import KubernetesSite, KubernetesVolume
from quartet_plugin.launchers.protocol import Engine, NodesHandle
from quartet_plugin.launchers.site import Site
from quartet_plugin.testing.launchers import LauncherConformance
from tests.cli.tuning import wait_until
from tests.launchers import namespaces
from tests.launchers.checked_nodes import check_nodes
from tests.launchers.fake_kubernetes_api import FakeCluster, fake_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def cluster(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeCluster]:
    """Two nodes."""
    namespaces.require()
    kubernetes_job.api_of.cache_clear()
    with fake_cluster(tmp_path_factory.mktemp("kubernetes"), num_nodes=2) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.folder / "kubeconfig"))
        yield running


def site_of(folder: Path, **asked: object) -> Site:
    """A site whose one volume is the folder of the tests."""
    volumes = (KubernetesVolume(claim="shared", path=str(folder)),)
    return Site(kubernetes=KubernetesSite.model_validate({"volumes": volumes, **asked}))


class OnPods(LauncherConformance):
    """The suite on one kind of job."""

    kind = "trainjob"

    @pytest.fixture(autouse=True)
    def _use(self, cluster: FakeCluster, tmp_path: Path) -> None:
        self._folder = tmp_path

    def engine(self) -> Engine:
        """The fake's nodes."""
        return kubernetes.engine(self.site())

    def site(self) -> Site:
        """The tests' folder on a volume."""
        return site_of(self._folder, kind=self.kind, image="tests/none:1")


class TestTrainJobs(OnPods):
    """Kubeflow's trainer v2."""

    def test_the_doctor_looks_at_nodes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Kubernetes chooses them: their number is given."""
        site = tmp_path / "site.yaml"
        site.write_text(self.site().model_dump_json(exclude_defaults=True))
        words = ("--launcher", "kubernetes", "--site", str(site), "--trial-nodes", "2")
        nodes = check_nodes(*words, folder=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
        assert len({node["host"] for node in nodes}) == 2


class TestPyTorchJobs(OnPods):
    """Kubeflow's training operator v1."""

    kind = "pytorchjob"


def started(folder: Path, *, num_nodes: int = 2, site: Site | None = None) -> NodesHandle:
    """A command that sleeps."""
    folder.mkdir()
    env = {"QUARTET_ATTEMPT_ID": f"{abs(hash(str(folder))):032x}"[-32:], "PATH": "/usr/bin:/bin"}
    launcher = kubernetes.engine(site or site_of(folder)).launcher((), num_nodes=num_nodes)
    return launcher.start(["sleep", "100"], env=env, cwd=folder, stdout=folder / "out")


def await_running(handle: NodesHandle) -> None:
    """Wait until every node has begun."""
    wait_until(lambda: not handle.is_pending, what="nodes")
    assert handle.poll() is None


def test_a_job_waits_for_its_queue_and_for_nodes(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.admits = False
    suspended = started(tmp_path / "queued", site=site_of(tmp_path, queue="team"))
    time.sleep(0.5)
    assert suspended.is_pending
    assert suspended.fault is None
    first = started(tmp_path / "first")
    await_running(first)
    second = started(tmp_path / "second", num_nodes=1)
    time.sleep(0.5)
    assert second.is_pending
    assert first.end_on_nodes() == ()
    await_running(second)
    assert second.end_on_nodes() == ()
    assert suspended.end_on_nodes() == ()
    assert not cluster.objects


def test_what_the_cluster_does_to_a_job_is_said(cluster: FakeCluster, tmp_path: Path) -> None:
    handle = started(tmp_path / "lost")
    await_running(handle)
    cluster.lose_node("node-1")
    wait_until(lambda: handle.poll() is not None, what="the end")
    assert handle.fault is not None
    assert handle.fault.endswith("-node-0-1 from node-1: DeletionByTaintManager")
    assert handle.end_on_nodes() == ()
    preempted = started(tmp_path / "preempted")
    await_running(preempted)
    cluster.preempt()
    wait_until(lambda: preempted.fault is not None, what="the fault")
    assert preempted.poll() is not None
    assert preempted.fault == "Kueue has suspended the job, to give its nodes to another"
    assert preempted.end_on_nodes() == ()


def test_pods_that_never_start_are_named(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.has_images = False
    handle = started(tmp_path / "r", num_nodes=1)
    wait_until(lambda: handle.poll() is not None, what="the end")
    assert handle.fault is not None
    assert handle.fault.endswith("cannot start on no node: ImagePullBackOff")
    assert handle.end_on_nodes() == ()


def test_what_a_pod_printed_before_the_command_is_kept(cluster: FakeCluster, tmp_path: Path) -> None:
    """Here a Python without the package."""
    bad = site_of(tmp_path).model_copy(update={"python": "/bin/ls"})
    handle = started(tmp_path / "r", num_nodes=1, site=bad)
    wait_until(lambda: handle.poll() is not None, what="the end")
    assert "quartet_plugin.launchers.shared_node" in (tmp_path / "r" / "out").read_text()
    handle.end_on_nodes()


def test_only_its_own_object_is_deleted(cluster: FakeCluster, tmp_path: Path) -> None:
    handle = started(tmp_path / "r", num_nodes=1)
    await_running(handle)
    ((key, content),) = cluster.objects.items()
    with cluster.lock:
        uid, content["metadata"]["uid"] = content["metadata"]["uid"], "another"
    wait_until(lambda: handle.poll() is not None, what="the end")
    handle.terminate()
    assert "deletionTimestamp" not in cluster.objects[key]["metadata"]
    with cluster.lock:
        content["metadata"]["uid"] = uid
    assert handle.end_on_nodes() == ()


def test_an_object_of_another_with_its_name_is_refused(cluster: FakeCluster, tmp_path: Path) -> None:
    first = started(tmp_path / "r", num_nodes=1)
    ((_, content),) = cluster.objects.items()
    content["metadata"]["labels"]["quartet-plugin/attempt"] = "another"
    (tmp_path / "r").rename(tmp_path / "before")
    with pytest.raises(InfrastructureError, match="is there already and no attempt of this run"):
        started(tmp_path / "r", num_nodes=1)
    first.end_on_nodes()


def test_a_server_that_starts_again_is_asked_again(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "_PAUSE_S", 0.05)
    cluster.num_failures = 3
    handle = started(tmp_path / "r", num_nodes=1)
    assert cluster.num_failures == 0
    assert handle.end_on_nodes() == ()


def test_without_its_client_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'quartet-plugin\[kubernetes\]'"):
        engine_named("kubernetes", site=Site())
    assert importlib.util.find_spec("kubernetes") is not None
