"""`quartet doctor --nodes` over a launcher, in a folder that its nodes see."""

import json
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli import doctor
from quartet_plugin.cli.main import main
from tests.cli.test_doctor import report

# What nodes that start, meet and have one installation pass, whatever else is wrong with this machine.
_MUST_PASS = ("nodes", "packages", "python", "port")


def check_nodes(
    *words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[dict[str, Any]]:
    """The facts of each node, which must have answered and met the others; nothing is left in `folder`."""
    before = set(folder.iterdir())
    monkeypatch.chdir(folder)
    monkeypatch.setattr(doctor, "_report", lambda _against: report())
    code = main(["doctor", "--nodes", *words, "-f", "json"])
    captured = capsys.readouterr()
    content = json.loads(captured.out or "null")
    assert content is not None, captured.err
    states = {row["check"]: row["state"] for row in content["checks"]}
    assert {states[check] for check in _MUST_PASS} == {"ok"}, content
    assert code == (5 if "fail" in states.values() else 0)
    assert set(folder.iterdir()) == before
    nodes: list[dict[str, Any]] = content["nodes"]
    assert [node["index"] for node in nodes] == list(range(len(nodes)))
    assert {node["num_nodes"] for node in nodes} == {len(nodes)}
    if len(nodes) > 1:
        assert nodes[0]["answered"] == len(nodes) - 1
    return nodes
