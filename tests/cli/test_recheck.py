"""`quartet recheck`: a plan after an upgrade."""

from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.cli import recheck as command
from quartet_plugin.cli.main import main
from quartet_plugin.model import receipt as receipts
from quartet_plugin.model.plan import Plan, write_plan
from quartet_plugin.model.receipt import receipt_path, write_receipt
from tests.model.plans import PLAN
from tests.model.test_receipt import receipt_of


def saved(folder: Path, plan: Plan = PLAN) -> str:
    write_plan(plan, path=folder / "plan.json")
    return str(folder / "plan.json")


def test_the_installed_megatron_is_as_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recheck", saved(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "5 seams: as known" in shown
    assert "megatron-core 0.19.2" in shown


def test_a_schedule_of_ours_needs_its_seams_and_its_receipt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, "needs_receipt", lambda plan: True)
    path = saved(tmp_path)
    assert main(["recheck", path]) == 2
    assert "no parity receipt" in capsys.readouterr().err
    write_receipt(receipt_of(), path=receipt_path(Path(path)))
    assert main(["recheck", path]) == 0
    assert "parity receipt: passed" in capsys.readouterr().out


def test_another_version_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = replace(PLAN, made_for=replace(PLAN.made_for, framework_version="0.19.9"))
    assert main(["recheck", saved(tmp_path, other)]) == 2
    assert "made for megatron-core 0.19.9, here is 0.19.2" in capsys.readouterr().err


def test_a_changed_seam_ends_with_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seam = {"path": "a.b", "fault": "a.b: not in megatron-core 0.19.3"}
    found = {"framework_version": "0.19.3", "fault": None, "seams": [seam]}
    monkeypatch.setattr(command, "_report", lambda **_: found)
    assert main(["recheck", saved(tmp_path)]) == 4
    assert "a.b: not in megatron-core 0.19.3" in capsys.readouterr().err
    found["fault"] = "megatron-core 0.20.0: not supported"
    assert main(["recheck", saved(tmp_path)]) == 4
    assert (
        "megatron-core 0.20.0: not supported; 1 of 1 seams differ, the first: a.b" in capsys.readouterr().err
    )


def test_another_framework_has_no_seams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = replace(PLAN, made_for=replace(PLAN.made_for, framework="deepspeed"))
    assert main(["recheck", saved(tmp_path, other)]) == 2
    assert "deepspeed" in capsys.readouterr().err
