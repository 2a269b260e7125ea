"""`quartet trace`: measured actions over simulated ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.model.plan import read_plan, write_plan
from quartet_plugin.schedule.choice import relative_costs
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.simulate import simulate
from tests.megatron.runtime.test_plan import custom_plan
from tests.trial.factory import ID


def attempt(folder: Path, *, stretch: float = 2.0, late_s: float = 0.001) -> Path:
    """An attempt whose every action took `stretch` times as long as simulated; device 1 began late."""
    plan = custom_plan()
    assert plan.schedule.custom is not None
    schedule = named("zb-v", num_devices=2, num_microbatches=plan.num_microbatches)
    simulation = simulate(schedule, relative_costs(plan.schedule.custom).ratios)
    write_plan(plan, path=folder / "plan.json")
    for device in range(2):
        write_sheet(
            folder,
            device=device,
            begin_at=100.0 + late_s * device,
            actions=[str(action) for action in schedule.actions(device)],
            start_s=(stretch * simulation.start_s[device]).tolist(),
            end_s=(stretch * simulation.end_s[device]).tolist(),
        )
    return folder


def write_sheet(folder: Path, *, device: int, **changes: Any) -> None:
    content = {"schema_version": 1, "attempt_id": ID, "launch_rank": device, "device": device, "replica": 0}
    content |= {"waiting_s": [0.0] * len(changes["actions"]), **changes}
    (folder / f"rank-{device}.actions.json").write_text(json.dumps(content))


def test_both_are_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "trace.json"
    assert main(["trace", str(attempt(tmp_path)), "-o", str(target)]) == 0
    events = json.loads(target.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    measured = {event["name"]: event["dur"] for event in slices if event["pid"] == 1}
    simulated = {event["name"]: event["dur"] for event in slices if event["pid"] == 2}
    assert measured.keys() == simulated.keys()
    assert all(measured[name] == pytest.approx(simulated[name]) for name in measured)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["measured", "simulated"]
    arrows = [(event["pid"], event["id"]) for event in events if event["ph"] == "s"]
    assert len({number for _, number in arrows}) == len(arrows)
    printed = capsys.readouterr().out
    assert "makespan: measured" in printed
    assert "mean I" in printed


def test_the_peak_of_activations_is_beside_the_simulated_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["trace", str(attempt(tmp_path)), "-o", str(tmp_path / "x.json")]
    assert main(words) == 0
    assert "at their peak" not in capsys.readouterr().out
    for device in range(2):
        path = tmp_path / f"rank-{device}.actions.json"
        content = json.loads(path.read_text()) | {"peak_activation_bytes": (device + 1) * 2**21}
        path.write_text(json.dumps(content))
    assert main(words) == 0
    assert "activations of device 1 at their peak: measured 4.0 MiB, simulated" in capsys.readouterr().out
    path.write_text(json.dumps(content | {"peak_activation_bytes": -1}))
    assert main(words) == 2


def run_of(folder: Path, *, trial: int) -> Path:
    """A run whose trial had two attempts, the second one measured."""
    for number in (1, 2):
        (folder / "trials" / f"{trial:06d}" / f"attempt-{number}").mkdir(parents=True)
    attempt(folder / "trials" / f"{trial:06d}" / "attempt-2")
    return folder


def test_a_run_means_its_best_plan_or_the_trial_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "x.json")
    best = custom_plan().provenance.trial
    run = run_of(tmp_path / "run", trial=best)
    run_of(run, trial=best + 1)
    words = ["trace", str(run), "-o", target]
    assert main(words) == 2
    assert "no best plan; name one of its trials" in capsys.readouterr().err
    assert main([*words, "--trial", str(best + 1)]) == 0
    (run / "best").mkdir()
    write_plan(custom_plan(), path=run / "best" / "plan.json")
    assert main(words) == 0
    assert "error" in capsys.readouterr().out
    place = run / "trials" / f"{best:06d}"
    assert read_plan(place / "attempt-2" / "plan.json").provenance.trial == best
    assert main(["trace", str(place), "-o", target]) == 0
    assert main([*words, "--trial", "77"]) == 2
    assert "--trial 77" in capsys.readouterr().err
    assert main(["trace", str(place), "-o", target, "--trial", "0"]) == 2
    assert "is no run's folder" in capsys.readouterr().err


def test_the_error_counts_a_late_beginning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(attempt(tmp_path, stretch=1.0)), "-o", str(tmp_path / "x.json")]) == 0
    assert "error +0.0%" not in capsys.readouterr().out


def test_a_plans_stage_times_have_no_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured actions that took as long as the plan's numbers in microseconds show no error."""
    folder = attempt(tmp_path, stretch=1e-6, late_s=0.0)
    assert main(["trace", str(folder), "-o", str(tmp_path / "x.json")]) == 0
    assert ": error +0.0%" in capsys.readouterr().out


def test_a_folder_without_actions_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = attempt(tmp_path)
    for path in folder.glob("rank-*"):
        path.unlink()
    assert main(["trace", str(folder), "-o", str(tmp_path / "x.json")]) == 2
    assert "no rank-K.actions.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start_s": [0.0]}, "start"),
        ({"actions": ["0F0", "0F0"], "start_s": [0.0, 1.0], "end_s": [1.0, 2.0]}, "0F0"),
        ({"attempt_id": "b" * 32}, "one attempt"),
        ({"actions": ["os.system"], "start_s": [0.0], "end_s": [0.0]}, "os.system"),
    ],
)
def test_actions_that_are_no_schedule_are_refused(
    change: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = attempt(tmp_path)
    content = json.loads((folder / "rank-0.actions.json").read_text()) | change
    if "actions" in change:
        content["waiting_s"] = [0.0] * len(change["actions"])
    (folder / "rank-0.actions.json").write_text(json.dumps(content))
    assert main(["trace", str(folder), "-o", str(tmp_path / "x.json")]) == 2
    assert words in capsys.readouterr().err
