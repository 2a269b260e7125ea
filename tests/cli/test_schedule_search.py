"""`quartet schedule search` from outside: what is found, what it depends on, and what it refuses."""

import time
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.cli.schedule_steps import CommandClock, SearchProgress
from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.schedule.files import read_schedule
from quartet_plugin.schedule.search import SearchResult
from quartet_plugin.schedule.validate import validate
from tests.cli.quartet_schedule import Quartet, cost_table

EFFORT = ("--evaluations", 400, "--seed", 3)


@pytest.fixture
def quartet(capsys: pytest.CaptureFixture[str]) -> Quartet:
    return Quartet(capsys)


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    table = cost_table(num_layers=12, device_slowdown=[1.0, 1.0, 1.4, 1.0])
    head = {"name": "head", "forward_s": 0.8, "input_grad_s": 0.8, "weight_grad_s": 0.8}
    table["layers"].append(head | {"activation_bytes": 0.1})
    write_json_atomic(path, table)
    return path


def found(path: Path) -> dict[str, Any]:
    validate(read_schedule(path))
    value: dict[str, Any] = read_json(path)
    return value


@pytest.mark.slow
def test_never_worse_than_the_named_ones_at_the_same_split(
    quartet: Quartet, costs: Path, tmp_path: Path
) -> None:
    shown = quartet("search", costs, "-o", tmp_path / "s.json", *EFFORT)
    best = found(tmp_path / "s.json")
    assert f"wrote {tmp_path / 's.json'}" in shown
    assert "best named" in shown
    for name in ("1f1b", "zb-h1", "zb-v", "interleaved", "gpipe"):
        for split in ("even", "auto"):
            quartet("named", name, costs, "-o", tmp_path / "n.json", "--split", split)
            other = read_json(tmp_path / "n.json")["predicted"]["makespan_s"]
            assert best["predicted"]["makespan_s"] <= other * (1 + 1e-9), (name, split)
    line = quartet("bound", costs).splitlines()[0]
    assert float(line.split()[2]) <= best["predicted"]["makespan_s"]


def test_what_is_found_is_what_simulate_says(quartet: Quartet, costs: Path, tmp_path: Path) -> None:
    quartet("search", costs, "-o", tmp_path / "s.json", *EFFORT)
    again = ("export", tmp_path / "s.json", "--format", "json", "--costs", costs, "-o")
    quartet(*again, tmp_path / "t.json")
    assert (tmp_path / "t.json").read_bytes() == (tmp_path / "s.json").read_bytes()


def test_evaluations_make_it_depend_on_the_seed_alone(quartet: Quartet, costs: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        quartet("search", costs, "-o", tmp_path / name, *EFFORT)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("options", "placement"),
    [
        (["--placement", "linear"], [0, 1, 2, 3]),
        (["--placement", "v"], [0, 1, 2, 3, 3, 2, 1, 0]),
        (["--placement", "loop", "--chunks", "3"], [0, 1, 2, 3] * 3),
        (["--placement", "0,1,1,0,2,3,3,2"], [0, 1, 1, 0, 2, 3, 3, 2]),
    ],
)
def test_a_fixed_placement(
    options: list[str], placement: list[int], quartet: Quartet, costs: Path, tmp_path: Path
) -> None:
    quartet("search", costs, "-o", tmp_path / "s.json", *options, "--evaluations", 60)
    assert found(tmp_path / "s.json")["placement"] == placement


def test_a_fixed_split(quartet: Quartet, costs: Path, tmp_path: Path) -> None:
    quartet("search", costs, "-o", tmp_path / "s.json", "--split", "4,4,2,3", "--evaluations", 60)
    assert found(tmp_path / "s.json")["layers_per_stage"] == [4, 4, 2, 3]
    quartet("search", costs, "-o", tmp_path / "s.json", "--split", "even", "--chunks", 1, "--evaluations", 60)
    assert found(tmp_path / "s.json")["layers_per_stage"] == [3, 3, 3, 4]


def test_memory_limits_are_kept(quartet: Quartet, tmp_path: Path) -> None:
    limits = [3.0, 2.5, 3.0, 2.5]
    write_json_atomic(tmp_path / "c.json", cost_table(memory_limit_bytes=limits))
    quartet("search", tmp_path / "c.json", "-o", tmp_path / "s.json", *EFFORT)
    peaks = found(tmp_path / "s.json")["predicted"]["peak_activation_bytes"]
    assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks, limits, strict=True))


def test_a_limit_that_nothing_fits_is_infeasible(quartet: Quartet, tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "c.json", cost_table(memory_limit_bytes=[0.1] * 4))
    line = quartet.refused("search", tmp_path / "c.json", "-o", tmp_path / "s.json", *EFFORT, code=3)
    assert "memory_limit_bytes" in line
    assert not (tmp_path / "s.json").exists()


def test_the_period_is_an_objective(quartet: Quartet, costs: Path, tmp_path: Path) -> None:
    periods = {}
    for objective in ("makespan", "period"):
        path = tmp_path / objective
        quartet("search", costs, "-o", path, "--objective", objective, *EFFORT)
        periods[objective] = found(path)["predicted"]["period_s"]
    assert periods["period"] <= periods["makespan"] * (1 + 1e-9)


def test_empty_stages_only_when_allowed(quartet: Quartet, tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "c.json", cost_table(num_layers=3))
    options = ("-o", tmp_path / "s.json", "--evaluations", 60)
    line = quartet.refused("search", tmp_path / "c.json", *options)
    assert "--allow-empty" in line
    quartet("search", tmp_path / "c.json", *options, "--allow-empty")
    assert sum(found(tmp_path / "s.json")["layers_per_stage"]) == 3


def test_a_time_limit_is_taken(quartet: Quartet, costs: Path, tmp_path: Path) -> None:
    """Only that it ends and writes; how long it takes is not asserted on a busy machine."""
    quartet("search", costs, "-o", tmp_path / "s.json", "--time-limit", "0.5")
    assert found(tmp_path / "s.json")["predicted"]["makespan_s"] > 0


def test_the_bound_is_the_same_every_time_and_is_always_shown(
    quartet: Quartet, costs: Path, tmp_path: Path
) -> None:
    lines = set()
    for limit in (["--evaluations", 60], ["--evaluations", 400], ["--time-limit", "0.3"]):
        shown = quartet("search", costs, "-o", tmp_path / "s.json", *limit)
        (line,) = [line for line in shown.splitlines() if line.startswith("bound ")]
        lines.add(line.partition(",")[0])
    assert len(lines) == 1


@pytest.mark.parametrize("is_in_compiled_code", [False, True])
def test_ctrl_c_writes_the_best_so_far(
    is_in_compiled_code: bool,
    costs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reached = []

    def press(progress: SearchProgress, result: SearchResult) -> None:
        progress.result = result
        reached.append(result.simulation.makespan_s)
        if len(reached) == 4 and is_in_compiled_code:
            raise SystemError("a function returned a result with an exception set") from KeyboardInterrupt()
        if len(reached) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(SearchProgress, "__call__", press)
    path = tmp_path / "s.json"
    assert main(["schedule", "search", str(costs), "-o", str(path), "--time-limit", "60"]) == 130
    assert found(path)["predicted"]["makespan_s"] == reached[-1]
    out, err = capsys.readouterr()
    assert f"wrote {path}" in out
    assert err == "quartet: interrupted\n"


def test_the_limit_counts_from_the_start_of_the_process(
    costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    class StopError(Exception):
        pass

    def capture(*_: object, time_limit_s: float, **__: object) -> None:
        limits.append(time_limit_s)
        raise StopError

    monkeypatch.setattr("quartet_plugin.schedule.search.search", capture)
    arguments = ["schedule", "search", str(costs), "-o", str(tmp_path / "s.json"), "--time-limit", "100"]
    main(arguments, started_s=time.monotonic() - 60)
    main(arguments, started_s=time.monotonic() - 500)
    assert 0 < limits[0] < 40
    assert limits[1] == 0


def test_compiling_is_not_counted_and_a_reserve_is_kept() -> None:
    started = time.monotonic() - 60
    clock = CommandClock(started_s=started, limit_s=100.0)
    left = clock.left_s(compiled_s=0.0)
    spared = clock.left_s(compiled_s=50.0)
    assert left is not None
    assert spared is not None
    assert 30.0 < left < 40.0
    assert spared - left == pytest.approx(50.0, abs=1.0)
    assert CommandClock(started_s=started, limit_s=4.0).left_s(compiled_s=0.0) == 0.0
    assert CommandClock(started_s=started, limit_s=None).left_s(compiled_s=0.0) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--time-limit", "1", "--evaluations", "5"], "both are given"),
        (["--time-limit", "0"], "--time-limit: 0.0"),
        (["--time-limit", "nan"], "--time-limit: nan"),
        (["--time-limit", "inf"], "--time-limit: inf"),
        (["--time-limit", "soon"], "--time-limit"),
        (["--evaluations", "0"], "--evaluations: 0"),
        (["--evaluations", "1" + "0" * 400], "--evaluations: 1000"),
        (["--seed", "-1"], "--seed: -1"),
        (["--seed", "1" + "0" * 400], "--seed: 1000"),
        (["--objective", "memory"], "--objective"),
        (["--placement", "w"], "--placement: 'w'"),
        (["--placement", "0,1,1,0"], "device 2 holds 0 stages"),
        (["--placement", "0,1,2,3,0"], "equally often"),
        (["--placement", "1,0,2,3"], "must start with device 0"),
        (["--placement", "linear", "--chunks", "2"], "chunks: 2 with placement linear"),
        (["--placement", "v", "--chunks", "1"], "chunks: 1 with placement v"),
        (["--chunks", "many"], "--chunks: 'many'"),
        (["--split", "5,4,4"], "3 counts on 4 devices"),
        (["--split", "4,4,4,4"], "sums to 16"),
        (["--split", "4,5,4,0"], "stage 3 is empty; it must hold the head"),
        (["--split", "5,0,4,4"], "stage 1 is empty"),
        (["--placement", "v", "--split", "4,4,2,3"], "4 counts for 8 stages"),
    ],
)
def test_refusals(options: list[str], words: str, quartet: Quartet, costs: Path, tmp_path: Path) -> None:
    line = quartet.refused("search", costs, "-o", tmp_path / "s.json", *options)
    assert words in line
    assert "\n" not in line
    assert not (tmp_path / "s.json").exists()


def test_a_missing_folder_is_said_before_the_search(
    costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "best.json"
    assert main(["schedule", "search", str(costs), "-o", str(path), "--time-limit", "3600"]) == 2
    assert "the folder" in capsys.readouterr().err
