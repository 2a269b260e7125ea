"""The job of an attempt where the API server answers late or never; no cluster is there."""

from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import StorageError
from quartet_plugin.launchers import kubernetes, kubernetes_job
from quartet_plugin.launchers.kubernetes import KubernetesEngine, KubernetesLauncher
from quartet_plugin.launchers.kubernetes_api import JobReference
from quartet_plugin.launchers.kubernetes_site import KubernetesSite, KubernetesVolume
from quartet_plugin.launchers.patience import NoAnswerError
from quartet_plugin.launchers.protocol import NodesHandle
from quartet_plugin.launchers.shared_run import SharedFolder
from quartet_plugin.launchers.site import Site
from quartet_plugin.protocol.environment import ATTEMPT_ID

ATTEMPT, UID = "a" * 32, "7f3c"


class Server:
    """An API server with one job, whose pods wait for nodes."""

    def __init__(self) -> None:
        self.is_away = False
        self.deleted: list[str | None] = []

    def create(self, job: JobReference, body: dict[str, Any]) -> str:
        self._answer()
        return UID

    def read(self, job: JobReference, **options: Any) -> dict[str, Any] | None:
        self._answer()
        return None if self.deleted else {"metadata": {"uid": UID}}

    def pods(self, job: JobReference, attempt_id: str, **options: Any) -> list[dict[str, Any]]:
        self._answer()
        return []

    def delete(self, job: JobReference) -> None:
        self._answer()
        self.deleted.append(job.uid)

    def _answer(self) -> None:
        if self.is_away:
            raise NoAnswerError("Kubernetes: no answer: ReadTimeoutError; is the API server up?")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    running = Server()
    for module in (kubernetes, kubernetes_job):
        monkeypatch.setattr(module, "api_of", lambda context: running)
    return running


def started(folder: Path) -> NodesHandle:
    """A command on one node."""
    volumes = (KubernetesVolume(claim="shared", path=str(folder)),)
    site = Site(kubernetes=KubernetesSite.model_validate({"volumes": volumes}))
    return KubernetesLauncher(1, site).start(
        ["true"], env={ATTEMPT_ID: ATTEMPT}, cwd=folder, stdout=folder / "out"
    )


def adopted(folder: Path) -> NodesHandle:
    """The same as a later tuner finds it."""
    return KubernetesEngine(Site()).adopt(ATTEMPT, stdout=folder / "out")


def is_to_kill(folder: Path) -> bool:
    return SharedFolder(folder / "out").is_to_kill


def test_a_job_that_was_perhaps_created_ends_by_its_pods_and_is_deleted_later(
    tmp_path: Path, server: Server
) -> None:
    server.is_away = True
    with pytest.raises(NoAnswerError):
        started(tmp_path)
    assert is_to_kill(tmp_path)
    server.is_away = False
    later = adopted(tmp_path)
    assert server.deleted == [UID]
    assert later.poll() not in (None, 0)


def test_a_job_that_a_killed_tuner_left_is_followed(tmp_path: Path, server: Server) -> None:
    started(tmp_path)
    later = adopted(tmp_path)
    assert later.poll() is None
    assert server.deleted == []
    assert not is_to_kill(tmp_path)


def test_a_job_whose_uid_cannot_be_kept_ends_by_its_pods(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, content: dict[str, Any]) -> None:
        if content["uid"] is not None:
            raise StorageError(f"{path}: cannot be written: No space left on device")

    monkeypatch.setattr(kubernetes, "write_json_atomic", write)
    with pytest.raises(StorageError):
        started(tmp_path)
    assert is_to_kill(tmp_path)


def test_nodes_end_the_command_though_the_api_server_does_not_answer(tmp_path: Path, server: Server) -> None:
    handle = started(tmp_path)
    server.is_away = True
    with pytest.raises(NoAnswerError):
        handle.end_on_nodes()
    assert is_to_kill(tmp_path)
