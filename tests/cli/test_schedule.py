"""`quartet schedule` from outside: what it writes, prints and refuses."""

import csv
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.schedule.files import read_schedule, write_schedule
from quartet_plugin.schedule.named import NAMED, named
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import Simulation
from quartet_plugin.schedule.validate import validate
from tests.cli.quartet_schedule import Quartet, cost_table
from tests.schedule.orders import edited, one_f_one_b, schedule_of

GOLDEN = Path(__file__).parents[1] / "golden"
QUARTET = Path(sys.executable).with_name("quartet")


@pytest.fixture
def quartet(capsys: pytest.CaptureFixture[str]) -> Quartet:
    return Quartet(capsys)


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    write_json_atomic(path, cost_table())
    return path


def test_named_writes_what_simulate_reads(quartet: Quartet, costs: Path, tmp_path: Path) -> None:
    output = tmp_path / "schedule.json"
    shown = quartet("named", "zb-v", costs, "-o", output)
    value = read_json(output)
    assert value["origin"] == {"name": "zb-v"}
    assert value["placement"] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert value["layers_per_stage"] == [1] * 8
    validate(read_schedule(output))
    figures = json.loads(quartet("simulate", costs, output, "--json"))
    assert {k: figures[k] for k in value["predicted"]} == value["predicted"]
    assert figures["makespan_s"] == 8 * 3 + 3 / 2
    assert figures["peak_activation_bytes"] == [4.0] * 4
    assert figures["busy_s"] == [24.0] * 4
    assert "makespan   25.5 s" in shown
    assert quartet("simulate", costs, output) == shown


def test_named_options(quartet: Quartet, costs: Path, tmp_path: Path) -> None:
    output = tmp_path / "s.json"
    quartet("named", "interleaved", costs, "-o", output, "--chunks", 2, "--group", 4)
    assert read_json(output)["placement"] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert read_json(output)["origin"] == {"name": "interleaved"}
    quartet("named", "1f1b", costs, "-o", output, "--split", "1,2,3,2")
    assert read_json(output)["layers_per_stage"] == [1, 2, 3, 2]
    quartet("named", "gpipe", costs, "-o", output, "--split", "0,2,3,3", "--allow-empty")
    assert read_json(output)["layers_per_stage"] == [0, 2, 3, 3]


def test_named_balances_the_split_when_asked(quartet: Quartet, tmp_path: Path) -> None:
    table = cost_table(device_slowdown=[1.0, 1.0, 3.0, 1.0])
    write_json_atomic(tmp_path / "c.json", table)
    quartet("named", "1f1b", tmp_path / "c.json", "-o", tmp_path / "even.json")
    quartet("named", "1f1b", tmp_path / "c.json", "-o", tmp_path / "auto.json", "--split", "auto")
    even, auto = (read_json(tmp_path / f"{name}.json") for name in ("even", "auto"))
    assert even["layers_per_stage"] == [2, 2, 2, 2]
    assert auto["layers_per_stage"][2] == 1
    assert auto["predicted"]["makespan_s"] < even["predicted"]["makespan_s"]


def test_even_counts_embedding_and_head_apart(quartet: Quartet, tmp_path: Path) -> None:
    table = cost_table(num_layers=6)
    special = {"forward_s": 0.5, "input_grad_s": 0.5, "weight_grad_s": 0.5, "activation_bytes": 0}
    table["layers"] = [{"name": "embedding", **special}, *table["layers"], {"name": "head", **special}]
    write_json_atomic(tmp_path / "c.json", table)
    quartet("named", "1f1b", tmp_path / "c.json", "-o", tmp_path / "s.json")
    assert read_json(tmp_path / "s.json")["layers_per_stage"] == [2, 2, 1, 3]


def test_unknown_names_list_the_known(quartet: Quartet, costs: Path, tmp_path: Path) -> None:
    line = quartet.refused("named", "zb-x", costs, "-o", tmp_path / "s.json")
    assert "'zb-x'" in line
    assert "zb-v" in line
    assert "1f1b" in line
    assert not (tmp_path / "s.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["1f1b", "--split", "4,4"], "2 counts on 4 devices"),
        (["1f1b", "--split", "2,2,2,1"], "sums to 7"),
        (["1f1b", "--split", "0,2,3,3"], "stage 0 is empty"),
        (["1f1b", "--split", "2,2,2,x"], "--split: '2,2,2,x'"),
        (["1f1b", "--split", "9999999,2"], "--split"),
        (["1f1b", "--split", "-1,9,0,0"], "--split"),
        (["1f1b", "--chunks", "2"], "chunks: 2"),
        (["1f1b", "--group", "2"], "group: 2"),
        (["interleaved", "--chunks", "1"], "chunks: 1"),
        (["interleaved", "--chunks", "two"], "--chunks"),
        (["interleaved", "--group", "1"], "deadlock"),
    ],
)
def test_named_refusals(
    arguments: list[str], words: str, quartet: Quartet, costs: Path, tmp_path: Path
) -> None:
    name, *options = arguments
    refusal = quartet.refused("named", name, costs, "-o", tmp_path / "s.json", *options)
    assert words in refusal.splitlines()[0]
    assert not (tmp_path / "s.json").exists()


def circle(rows: list[list[str]]) -> None:
    """Device 3 wants 3F3 before it gives 3B0, which device 0 needs before its 0F3."""
    for row, action, before in ((rows[3], "3F3", "3B0"), (rows[0], "0F3", "0B3")):
        row.remove(action)
        row.insert(row.index(before), action)


BROKEN = [
    ("missing", lambda r: r[1].remove("1B3"), "1B3 of device 1: missing"),
    ("double", lambda r: r[1].append("1B3"), "twice"),
    ("wrong device", lambda r: r[1].append("0F3"), "wrong device"),
    ("order", lambda r: r[1].insert(0, r[1].pop()), "out of order"),
    ("deadlock", circle, "deadlock"),
]


@pytest.mark.parametrize(("edit", "words"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
@pytest.mark.parametrize("command", ["simulate", "export"])
def test_a_broken_schedule_is_refused_with_its_table(
    command: str, edit: Any, words: str, quartet: Quartet, costs: Path, tmp_path: Path
) -> None:
    broken = schedule_of(edited(one_f_one_b(4, 8), edit), 8)
    write_schedule(tmp_path / "s.json", replace(broken, layers_per_stage=(2, 2, 2, 2)))
    if command == "simulate":
        refusal = quartet.refused("simulate", costs, tmp_path / "s.json", "--trace", tmp_path / "t")
    else:
        refusal = quartet.refused("export", tmp_path / "s.json", "--format", "png", "-o", tmp_path / "t")
    line, *table = refusal.splitlines()
    assert words in line
    assert sum("[" in row for row in table) == 1
    assert not (tmp_path / "t").exists()


def test_over_memory_is_refused_with_its_table(quartet: Quartet, tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "c.json", cost_table())
    quartet("named", "1f1b", tmp_path / "c.json", "-o", tmp_path / "s.json")
    write_json_atomic(tmp_path / "c.json", cost_table(memory_limit_bytes=[4, 2, 4, 4]))
    line, *table = quartet.refused("simulate", tmp_path / "c.json", tmp_path / "s.json").splitlines()
    assert "1F2" in line
    assert "device 1" in line
    assert any("[1F2]" in row for row in table)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_microbatches": 9}, "num_microbatches: 8 in the schedule, 9 in the costs"),
        ({"num_devices": 2}, "num_devices: 4 in the schedule, 2 in the costs"),
        ({"num_layers": 9}, "layers_per_stage: sums to 8; must be the 9 layers"),
    ],
)
def test_simulate_refuses_other_costs(
    change: dict[str, int], words: str, quartet: Quartet, costs: Path, tmp_path: Path
) -> None:
    quartet("named", "1f1b", costs, "-o", tmp_path / "s.json")
    write_json_atomic(costs, cost_table(**change))
    assert words in quartet.refused("simulate", costs, tmp_path / "s.json")


def test_broken_files_are_named(quartet: Quartet, costs: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    for content, words in (
        ("{", "bad.json:1:2: not JSON"),
        ('{"schema_version": NaN}', "NaN: numbers must be finite"),
        ("{}", "schema_version: missing"),
        ("[]", "must be a JSON object"),
    ):
        bad.write_text(content, encoding="utf-8")
        for arguments in (
            ("named", "1f1b", bad, "-o", tmp_path / "s.json"),
            ("bound", bad),
            ("simulate", bad, bad),
            ("simulate", costs, bad),
            ("export", bad, "--format", "csv", "-o", tmp_path / "x"),
        ):
            line = quartet.refused(*arguments)
            assert words in line
            assert "\n" not in line
    assert "cannot be read" in quartet.refused("bound", tmp_path / "missing.json")


def test_simulate_writes_a_trace(quartet: Quartet, costs: Path, tmp_path: Path) -> None:
    quartet("named", "zb-v", costs, "-o", tmp_path / "s.json")
    quartet("simulate", costs, tmp_path / "s.json", "--trace", tmp_path / "t.json")
    simulated = (tmp_path / "t.json").read_bytes()
    events = json.loads(simulated)["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 8 * 8 * 3
    quartet("export", tmp_path / "s.json", "--format", "trace", "--costs", costs, "-o", tmp_path / "u.json")
    assert (tmp_path / "u.json").read_bytes() == simulated


def test_bound(quartet: Quartet, costs: Path, tmp_path: Path) -> None:
    free = json.loads(quartet("bound", costs, "--json"))["makespan_s"]
    linear = json.loads(quartet("bound", costs, "--placement", "linear", "--json"))["makespan_s"]
    even = json.loads(quartet("bound", costs, "--placement", "linear", "--split", "even", "--json"))[
        "makespan_s"
    ]
    assert 24 <= free <= linear + 1e-6
    assert linear <= even + 1e-6
    quartet("named", "zb-h1", costs, "-o", tmp_path / "s.json")
    assert even <= read_json(tmp_path / "s.json")["predicted"]["makespan_s"] + 1e-6
    line = quartet("bound", costs).splitlines()[0]
    assert line == f"makespan >= {free!r} s"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--split", "even"], "the number of stages is not known"),
        (["--placement", "1,0,2,3"], "must start with device 0"),
        (["--placement", "0,1,2,3,0"], "equally often"),
        (["--placement", "0,1,2,9"], "device 9 does not exist"),
        (["--placement", "w"], "--placement: 'w'"),
        (["--placement", "v", "--chunks", "3"], "chunks: 3 with placement v"),
        (["--placement", "loop", "--chunks", "1"], "chunks: 1 with placement loop"),
        (["--placement", "linear", "--split", "1,1,1,1,1,1,1,1"], "8 counts for 4 stages"),
        (["--chunks", "0"], "--chunks: '0'"),
        (["--chunks", "4"], "stages"),
    ],
)
def test_bound_refusals(options: list[str], words: str, quartet: Quartet, costs: Path) -> None:
    assert words in quartet.refused("bound", costs, *options)


def test_export_text_and_json(quartet: Quartet, costs: Path, tmp_path: Path) -> None:
    source = GOLDEN / "schedule_1f1b.json"
    quartet("export", source, "--format", "text", "-o", tmp_path / "t.txt")
    assert (tmp_path / "t.txt").read_text() == "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2\n"
    quartet("export", source, "--format", "json", "-o", tmp_path / "s.json")
    plain = read_json(source)
    del plain["predicted"]
    assert read_json(tmp_path / "s.json") == plain
    quartet("named", "1f1b", costs, "-o", tmp_path / "n.json")
    quartet("export", tmp_path / "n.json", "--format", "json", "--costs", costs, "-o", tmp_path / "m.json")
    assert (tmp_path / "m.json").read_bytes() == (tmp_path / "n.json").read_bytes()


def test_export_csv(quartet: Quartet, tmp_path: Path) -> None:
    quartet("export", GOLDEN / "schedule_v.json", "--format", "csv", "-o", tmp_path / "s.csv")
    rows = list(csv.reader(io.StringIO((tmp_path / "s.csv").read_text())))
    assert [[cell for cell in row if cell] for row in rows] == read_json(GOLDEN / "schedule_v.json")["orders"]


@pytest.mark.parametrize("name", ["schedule_1f1b.json", "schedule_v.json", "schedule_two_copies.json"])
def test_export_png_without_costs(name: str, quartet: Quartet, tmp_path: Path) -> None:
    from matplotlib.image import imread

    quartet("export", GOLDEN / name, "--format", "png", "-o", tmp_path / "s.png")
    pixels = np.asarray(imread(tmp_path / "s.png"))
    assert pixels.shape[0] > 200
    assert pixels.shape[1] > 1000


def test_export_png_with_costs(quartet: Quartet, costs: Path, tmp_path: Path) -> None:
    quartet("named", "zb-v", costs, "-o", tmp_path / "s.json")
    picture = ("export", tmp_path / "s.json", "--format", "png", "-o")
    quartet(*picture, tmp_path / "real.png", "--costs", costs)
    quartet(*picture, tmp_path / "unit.png")
    assert (tmp_path / "real.png").read_bytes() != (tmp_path / "unit.png").read_bytes()


def test_a_picture_without_costs_has_the_unit_of_the_list(
    quartet: Quartet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Simulation] = []

    def draw(schedule: Schedule, simulation: Simulation, **options: Any) -> bytes:
        drawn.append(simulation)
        return b""

    monkeypatch.setattr("quartet_plugin.report.timeline.timeline_png", draw)
    order = named("zb-v", num_devices=2, num_microbatches=4)
    write_schedule(tmp_path / "s.json", replace(order, layers_per_stage=(1, 1, 1, 1)))
    quartet("export", tmp_path / "s.json", "--format", "png", "-o", tmp_path / "s.png")
    lines = quartet("list", "--devices", 2, "--microbatches", 4).splitlines()
    row = next(line.split() for line in lines if line.startswith("zb-v"))
    assert f"{drawn[0].makespan_s:g}" in row


def test_export_refusals(quartet: Quartet, costs: Path, tmp_path: Path) -> None:
    source = GOLDEN / "schedule_1f1b.json"
    refused = quartet.refused
    assert "--costs" in refused("export", source, "--format", "trace", "-o", tmp_path / "t")
    assert "--format" in refused("export", source, "--format", "svg", "-o", tmp_path / "t")
    assert "format" in refused("export", source, "-o", tmp_path / "t")
    assert "output" in refused("export", source, "--format", "csv")
    assert "cannot be written" in refused("export", source, "--format", "text", "-o", tmp_path / "no" / "t")
    assert "num_devices" in refused(
        "export", source, "--format", "png", "--costs", costs, "-o", tmp_path / "t"
    )


def test_list_names_every_schedule(quartet: Quartet) -> None:
    from quartet_plugin.schedule.named import NAMED

    rows = [line.split() for line in quartet("list").splitlines()]
    by_name = {row[0]: row for row in rows if row and row[0] in NAMED}
    assert set(by_name) == set(NAMED)
    assert {"linear", "full", "117", "8", "yes"} <= set(by_name["1f1b"])
    assert {"v", "split", "99.5", "8", "yes"} <= set(by_name["zb-v"])
    for name, row in by_name.items():
        assert (row[-1] == "yes") == NAMED[name].executable


def test_list_leaves_out_sizes_that_do_not_exist(quartet: Quartet) -> None:
    rows = {
        line.split()[0]: line
        for line in quartet("list", "--devices", 3, "--microbatches", 5).splitlines()
        if line
    }
    assert " - " in rows["chimera"]
    assert "21" in rows["1f1b"]


def test_list_has_the_same_for_programs(quartet: Quartet) -> None:
    content = json.loads(quartet("list", "--devices", 3, "--microbatches", 5, "--json"))
    assert (content["schema_version"], content["num_devices"], content["num_microbatches"]) == (1, 3, 5)
    by_name = {record["name"]: record for record in content["schedules"]}
    assert set(by_name) == set(NAMED)
    assert (by_name["chimera"]["makespan"], by_name["chimera"]["num_copies"]) == (None, 2)
    plain = by_name["1f1b"]
    assert (plain["makespan"], plain["memory"], plain["chunks"], plain["can_be_run"]) == (21.0, 3.0, 1, True)
    assert by_name["zb-h1"]["has_split_backward"]


def test_a_training_command_is_refused(quartet: Quartet, costs: Path) -> None:
    assert "takes no training command" in quartet.refused("bound", costs, "--", "torchrun")


def test_the_console_script_end_to_end(costs: Path, tmp_path: Path) -> None:
    output = tmp_path / "s.json"
    made = subprocess.run(
        [QUARTET, "schedule", "named", "1f1b", costs, "-o", output],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (made.returncode, made.stderr) == (0, "")
    told = subprocess.run(
        [QUARTET, "schedule", "simulate", costs, output, "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(told.stdout)["makespan_s"] == (8 + 3) * 3
    refused = subprocess.run(
        [QUARTET, "schedule", "simulate", output, costs], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert refused.stderr.startswith("quartet: ")
    assert refused.stderr.count("\n") == 1
