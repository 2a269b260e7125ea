"""`quartet check` and the receipt that `quartet train` asks for."""

import json
import sys
from pathlib import Path

import pytest

from quartet_plugin.cli import plan_checks
from quartet_plugin.cli import train as train_command
from quartet_plugin.cli.check import lines
from quartet_plugin.cli.main import main
from quartet_plugin.launchers.warm import WarmLauncher
from quartet_plugin.model import receipt as receipts
from quartet_plugin.model.plan import write_plan
from quartet_plugin.model.receipt import receipt_path, write_receipt
from quartet_plugin.trial.parity import ParityGate
from tests.model.plans import PLAN
from tests.model.test_receipt import FAILED, receipt_of

COMMAND = ["torchrun", "--nproc-per-node", "2", "train.py"]


def saved(folder: Path) -> Path:
    path = folder / "plan.json"
    write_plan(PLAN, path=path)
    return path


@pytest.mark.parametrize(
    ("words", "what"), [(["--steps", "0"], "--steps 0"), (["--device", "x"], "--device x")]
)
def test_wrong_options_are_refused(
    words: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(saved(tmp_path)), *words, "--", *COMMAND]) == 2
    assert what in capsys.readouterr().err


def test_a_plan_for_other_processes_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(saved(tmp_path)), "--", "python", "train.py"]) == 2
    assert "made for 2 processes" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_pass_leaves_a_receipt_and_no_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pass_(gate: ParityGate, _: object) -> receipts.Receipt:
        (gate.weights / "stock").mkdir()
        return receipt_of()

    monkeypatch.setattr(ParityGate, "check", pass_)
    path = saved(tmp_path)
    assert main(["check", str(path), "--", *COMMAND]) == 0
    assert "passed: losses and gradient norms equal those of" in capsys.readouterr().out
    assert receipts.read_receipt(receipt_path(path)) == receipt_of()
    assert list((tmp_path / "plan.parity").iterdir()) == []


def test_the_runs_of_a_check_share_their_imports_and_no_server_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def pass_(gate: ParityGate, _: object) -> receipts.Receipt:
        assert isinstance(gate.launcher, WarmLauncher)
        monkeypatch.setattr(gate.launcher, "close", lambda: events.append("closed"))
        return receipt_of()

    monkeypatch.setattr(ParityGate, "check", pass_)
    assert main(["check", str(saved(tmp_path)), "--", *COMMAND]) == 0
    assert events == ["closed"]


def test_a_failure_leaves_a_receipt_too_and_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ParityGate, "check", lambda *_: receipt_of(verdict="failed", failure=FAILED, reference="stock")
    )
    path = saved(tmp_path)
    assert main(["check", str(path), "--", *COMMAND]) == 2
    assert "step 2: loss 8, stock has 9" in capsys.readouterr().err
    assert receipts.read_receipt(receipt_path(path)).verdict == "failed"


def test_the_table_has_a_line_a_step() -> None:
    table = lines(receipt_of())
    assert len(table) == 2 + 4
    assert "fp32" in table[0]


def test_train_asks_for_the_receipt_of_a_schedule_of_ours(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, "needs_receipt", lambda plan: True)
    monkeypatch.setattr(plan_checks, "framework_version", lambda name: None)
    path = saved(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("print('began', flush=True)")
    words = ["--plan", str(path), "--device", "cpu"]
    command = ["--", *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"), str(script)]

    assert main(["train", *words, *command]) == 2
    shown = capfd.readouterr()
    assert "has no parity receipt" in shown.err
    assert "began" not in shown.out

    monkeypatch.setattr(train_command, "run_wrapped", lambda *_, **__: 0)
    assert main(["train", *words, "--skip-parity-check", *command]) == 0
    assert "parity check skipped" in capfd.readouterr().err
    write_receipt(receipt_of(), path=receipt_path(path))
    assert main(["train", *words, *command]) == 0
    assert "skipped" not in capfd.readouterr().err


def test_programs_get_the_receipt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ParityGate, "check", lambda gate, plan: receipt_of())
    path = saved(tmp_path)
    assert main(["check", str(path), "--json", "--", *COMMAND]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content.pop("path") == str(receipt_path(path))
    assert content == json.loads(receipt_path(path).read_text())
