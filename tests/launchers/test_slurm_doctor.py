"""`quartet doctor --nodes` on the nodes of a real Slurm: of an allocation, and of a queued job."""

from pathlib import Path

import pytest

from tests.launchers.checked_nodes import check_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.usefixtures("allocation")
def test_every_node_of_an_allocation_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = check_nodes(folder=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert [node["host"] for node in nodes] == ["n1", "n2", "n3", "n4"]


@pytest.mark.usefixtures("outside_of_jobs")
def test_nodes_that_the_queue_chooses_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--launcher", "slurm-batch", "--trial-nodes", "2")
    nodes = check_nodes(*words, folder=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    hosts = {node["host"] for node in nodes}
    assert len(hosts) == 2
    assert hosts < {"n1", "n2", "n3", "n4"}
