"""A run folder of release 0.1.0, with its study and its plan, still opens, resumes and reads as it was."""

import json
import shutil
from pathlib import Path

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.model.plan import read_plan, write_plan
from quartet_plugin.trial.request import TrialResult
from quartet_plugin.tuner.trial_backend import LocalBackend
from tests.short_searches import short_searches as short_searches
from tests.tuner.fakes import FakeMachine, resume, tune

GOLDEN = Path(__file__).parents[1] / "golden" / "run_0.1.0"
TRIALS = json.loads(GOLDEN.with_name("run_0.1.0.trials.json").read_text())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "run"))


class RecordedMachine(FakeMachine):
    """Knows every launch from the files of its folder, as a real one does."""

    def recorded(self, folder: Path, *, plan_key: str | None) -> TrialResult | None:
        return LocalBackend().recorded(folder, plan_key=plan_key)


def test_its_trials_are_shown_as_they_were(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trials", str(run), "-f", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown.pop("storage").endswith("run/study.sqlite3")
    gains = [trial.pop("expected_gain") for trial in shown["trials"]]  # added since
    assert any(gain is not None for gain in gains)
    assert shown == {key: value for key, value in TRIALS.items() if key != "storage"}


@pytest.mark.parametrize("command", ["status", "report"])
def test_it_is_shown(run: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(run)]) == 0
    assert capsys.readouterr().out


def test_it_resumes_to_the_same_winner_without_a_launch(run: Path) -> None:
    machine = RecordedMachine()
    result = tune(resume(run), machine)
    assert machine.launched == []
    assert result.winner is not None
    assert result.winner.trial.plan.key == read_plan(run / "best" / "plan.json").key
    assert [trial.number for trial in result.trials] == [trial["trial"] for trial in TRIALS["trials"]]


def test_its_plan_is_written_again_to_the_byte(run: Path, tmp_path: Path) -> None:
    write_plan(read_plan(run / "best" / "plan.json"), path=tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_bytes() == (GOLDEN / "best" / "plan.json").read_bytes()
