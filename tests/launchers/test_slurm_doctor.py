"""`quartet doctor --nodes` on the nodes of a real Slurm allocation."""

import json
from pathlib import Path

import pytest

from quartet_plugin.cli import doctor
from quartet_plugin.cli.main import main
from tests.cli.test_doctor import report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("allocation")]


def test_every_node_of_an_allocation_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "_report", lambda _against: report())
    code = main(["doctor", "--nodes", "-f", "json"])
    content = json.loads(capsys.readouterr().out)
    states = {row["check"]: row["state"] for row in content["checks"]}
    assert [node["host"] for node in content["nodes"]] == ["n1", "n2", "n3", "n4"]
    assert [node["index"] for node in content["nodes"]] == [0, 1, 2, 3]
    assert content["nodes"][0]["answered"] == 3
    assert states["nodes"] == states["packages"] == states["python"] == states["port"] == "ok", content
    assert code == (5 if "fail" in states.values() else 0)
    assert not list(tmp_path.iterdir())
