"""What a run's folder and events say of its trials, its proposals and its final rounds."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.model.history import TrialRow
from quartet_plugin.model.launch import DEPTH_PROXY
from quartet_plugin.model.trial_record import TrialRecord
from quartet_plugin.tuner.history import read_history
from quartet_plugin.tuner.history_rows import limits_of, read_events, with_events

GOLDEN = Path(__file__).parents[1] / "golden" / "run_0.1.0"


def test_a_finalist_that_failed_in_a_later_round_is_left_out(tmp_path: Path) -> None:
    run = Path(shutil.copytree(GOLDEN, tmp_path / "r"))
    assert 6 in [finalist.number for finalist in read_history(run).finalists]
    path = run / "final" / "000006-round-4" / "attempt-1" / "result.json"
    write_json_atomic(path, {**read_json(path), "outcome": "INFEASIBLE", "iteration_s": []})
    assert 6 not in [finalist.number for finalist in read_history(run).finalists]


def test_a_baseline_that_failed_in_a_round_is_still_compared_with(tmp_path: Path) -> None:
    run = Path(shutil.copytree(GOLDEN, tmp_path / "r"))
    path = next((run / "final" / "000000-round-4").glob("attempt-*/result.json"))
    write_json_atomic(path, {**read_json(path), "outcome": "INFEASIBLE", "iteration_s": []})
    assert 6 in [finalist.number for finalist in read_history(run).finalists]


@pytest.mark.parametrize(
    ("features", "precision"), [((), "fp32"), (("moe", "fp8"), "fp8"), (("fp4",), "fp4")]
)
def test_a_run_has_the_format_of_its_products(
    features: tuple[str, ...], precision: str, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(GOLDEN, tmp_path / "r"))
    path = run / "trials" / "000000" / "attempt-1" / "rank-0.json"
    report = read_json(path)
    write_json_atomic(path, {**report, "job": {**report["job"], "features": list(features)}})
    assert read_history(run).precision == precision


def test_a_trial_without_a_folder_has_the_row_of_its_event() -> None:
    common = TrialRecord(verdict="infeasible", outcome="WRONG", reason="losses differ", attempt_id="")
    records = (common, replace(common, repeats=1), replace(common, verdict="measured", outcome=DEPTH_PROXY))
    told = [
        {"time": 1.0, "kind": "told", "trial": number, "verdict": record.verdict, "record": asdict(record)}
        for number, record in enumerate(records, start=1)
    ]
    rows = with_events([TrialRow(number=0, verdict="measured")], told)
    assert [(row.number, row.verdict, row.outcome, row.reason, row.repeats) for row in rows[1:]] == [
        (number, record.verdict, record.outcome, record.reason, record.repeats)
        for number, record in enumerate(records, start=1)
    ]


def test_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    begin, end = ({"time": float(at), "kind": kind} for at, kind in enumerate(("begin", "end")))
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        file.write(json.dumps(begin).encode() + b"\n")
        file.truncate(65 * 2**20)
        file.seek(0, 2)
        file.write(b"\n" + json.dumps(end).encode() + b"\n" + b'{"time": 2.0, "ki')
    assert read_events(path) == [begin, end]


def test_the_limits_of_the_latest_proposal_that_has_some() -> None:
    earlier = {"kind": "proposed", "cut_off": ["mappings: 8 slots; for 2 layouts only the named rank orders"]}
    later = {"kind": "proposed", "cut_off": ["custom schedules: tried only in 3 layouts", 7]}
    assert limits_of([]) == ()
    assert limits_of([earlier, later, {"kind": "proposed"}, {"kind": "told"}]) == (
        "custom schedules: tried only in 3 layouts",
    )
