"""`quartet report`: from a run's folder to the page."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.cli.report import report_line
from tests.cli.runs import copy_of, kept_run
from tests.cli.tuning import CONFIG, prepare
from tests.short_searches import short_searches as short_searches

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def run() -> Iterator[Path]:
    with kept_run() as path:
        yield path


def test_a_runs_report(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy_of(run, to=tmp_path / "r")
    assert main(["report", str(path)]) == 0
    assert f"wrote {path / 'report.html'}" in capsys.readouterr().out
    page = (path / "report.html").read_text()
    assert "as fast as your command" in page
    assert page.count("<svg") >= 5
    assert "Refused and failed" in page
    assert "rank 0: torch.OutOfMemoryError" in page
    assert f"sh {path}/best/command.sh" in page
    assert "quartet train" not in page
    assert main(["report", str(path), "-o", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_text().count("<svg") == page.count("<svg")


def test_a_winner_at_full_size_is_what_to_train_with(run: Path, tmp_path: Path) -> None:
    path = copy_of(run, to=tmp_path / "r")
    (path / "best" / "native.sh").touch()
    assert main(["report", str(path)]) == 0
    assert "native.sh" in (path / "report.html").read_text()
    shutil.copytree(path / "best", path / "best" / "full-size")
    assert main(["report", str(path)]) == 0
    page = (path / "report.html").read_text()
    assert f"sh {path}/best/full-size/command.sh" in page
    assert "best/command.sh" not in page
    assert "native.sh" not in page


def test_a_damaged_study_costs_the_importance_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy_of(run, to=tmp_path / "r")
    (path / "study.sqlite3").write_bytes(b"this is no database " * 400)
    assert main(["report", str(path)]) == 6
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    page = (path / "report.html").read_text()
    assert "study.sqlite3: cannot be read" in page
    assert "as fast as your command" in page


def test_a_report_that_cannot_be_written_spoils_nothing(run: Path, tmp_path: Path) -> None:
    path = copy_of(run, to=tmp_path / "r")
    (path / "report.html").mkdir()
    line = report_line(path)
    assert line.startswith("report    not written: ")
    assert "\n" not in line
    (path / "report.html").rmdir()
    assert report_line(path) == f"report    {path / 'report.html'}"


def test_what_the_parity_gate_found_is_shown(run: Path, tmp_path: Path) -> None:
    path = copy_of(run, to=tmp_path / "r")
    shutil.copy(GOLDEN / "plan.parity.json", path / "best" / "plan.parity.json")
    assert main(["report", str(path)]) == 0
    assert "The parity gate passed: over " in (path / "report.html").read_text()
    (path / "best" / "plan.parity.json").write_text("{}")
    assert main(["report", str(path)]) == 0
    assert "parity receipt cannot be read" in (path / "report.html").read_text()


def test_secrets_of_the_command_are_not_shown(run: Path, tmp_path: Path) -> None:
    path = copy_of(run, to=tmp_path / "r")
    config = (path / "config.json").read_text()
    word = '"pretrain_gpt.py"'
    assert word in config
    (path / "config.json").write_text(config.replace(word, f'{word}, "--api-key", "hunter22"'))
    assert main(["report", str(path)]) == 0
    page = (path / "report.html").read_text()
    assert "hunter22" not in page
    assert "--api-key ***" in page


def test_tune_leaves_its_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With a journal and TensorBoard's scalars, on real processes."""
    config = CONFIG.replace("trials: 3", "trials: 2, storage: journal, tensorboard: true")
    options, command = prepare(tmp_path, config=config)
    assert main([*options, "--", *command]) == 0
    run = tmp_path / "runs" / "fake"
    printed = capfd.readouterr().out
    assert f"report    {run / 'report.html'}" in printed
    assert f"optuna-dashboard {run / 'study.journal'}" in printed
    page = (run / "report.html").read_text()
    assert "2 of 2 trials" in page
    assert "Best against baseline" in page
    points = (run / "tensorboard" / "events.out.tfevents.0000000000.quartet").read_bytes()
    assert points.count(b"trial/tokens_per_s") >= 3
    assert main(["status", str(run)]) == 0
    assert "state     finished" in capfd.readouterr().out
