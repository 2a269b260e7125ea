"""`quartet rehearse`: refusals before anything starts, and what it prints."""

import json
from pathlib import Path

import pytest

from quartet_plugin.cli import rehearse as command
from quartet_plugin.cli.main import main
from quartet_plugin.schedule.files import read_costs, write_schedule
from quartet_plugin.schedule.simulate import simulate_costs

LAYER = {"forward_s": 0.002, "input_grad_s": 0.002, "weight_grad_s": 0.002, "activation_bytes": 1}
TABLE = {
    "schema_version": 1,
    "num_devices": 2,
    "num_microbatches": 3,
    "layers": [{"name": f"layer.{number}", **LAYER} for number in range(2)],
}
COSTS = json.dumps(TABLE)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A schedule and its costs."""
    costs, schedule = tmp_path / "costs.json", tmp_path / "schedule.json"
    costs.write_text(COSTS)
    assert main(["schedule", "named", "zb-h1", str(costs), "-o", str(schedule)]) == 0
    return str(schedule), str(costs)


def test_it_runs_and_prints_every_step(files: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", files[0], "--costs", files[1], "--steps", "2"]) == 0
    printed = capfd.readouterr().out
    assert "simulated makespan" in printed
    assert printed.count("step ") == 2
    assert "median" in printed


@pytest.mark.parametrize("words", [["--steps", "0"], ["--time-scale", "0"], ["--hang", "-1"]])
def test_wrong_options_are_refused(
    words: list[str], files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rehearse", files[0], "--costs", files[1], *words]) == 2
    assert " ".join(words) in capsys.readouterr().err


def test_a_broken_schedule_starts_nothing(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_run", lambda *_: pytest.fail("started"))
    text = Path(files[0]).read_text().replace('"0F1"', '"0F0"', 1)
    Path(files[0]).write_text(text)
    assert main(["rehearse", files[0], "--costs", files[1]]) == 2
    assert "0F0" in capsys.readouterr().err


def test_what_the_processes_say_keeps_its_exit_code(
    files: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Two copies of the model simulate and cannot run.
    costs = tmp_path / "two.json"
    costs.write_text(COSTS.replace('"num_microbatches": 3', '"num_microbatches": 4'))
    schedule = tmp_path / "two_copies.json"
    assert main(["schedule", "named", "chimera", str(costs), "-o", str(schedule)]) == 0
    capfd.readouterr()
    assert main(["rehearse", str(schedule), "--costs", str(costs)]) == 2
    assert "two copies" in capfd.readouterr().err


def test_costs_of_nothing_have_no_percentages(files: tuple[str, str]) -> None:
    from quartet_plugin.schedule.files import read_schedule

    schedule = read_schedule(Path(files[0]))
    simulation = simulate_costs(schedule, read_costs(files[1]))
    ends = [list(row) for row in simulation.end_s]
    shown = command.lines([{"wall_s": 1.0, "end_s": ends}], simulation, time_scale=0.0)
    assert shown[:3] == ["simulated makespan 0.0000 s", "step   1: 1.0000 s", "median   : 1.0000 s"]


def test_lines_name_the_latest_device(files: tuple[str, str]) -> None:
    from quartet_plugin.schedule.files import read_schedule

    schedule = read_schedule(Path(files[0]))
    write_schedule(files[0], schedule)
    simulation = simulate_costs(schedule, read_costs(files[1]))
    ends = [list(row) for row in simulation.end_s]
    ends[1][-1] += 0.5
    shown = command.lines([{"wall_s": 1.0, "end_s": ends}], simulation, time_scale=1.0)
    assert shown[-1] == "largest delay against the simulation: 500.0 ms, on device 1"
