"""The expense of a search: one figure in the closing lines, the status, its JSON and the report."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.model.history import LaunchSeconds
from quartet_plugin.report.page import Extras, page
from quartet_plugin.report.search_expense import expense_lines, expense_of
from quartet_plugin.report.status import status_lines, status_record
from quartet_plugin.tuner.history import read_history
from quartet_plugin.tuner.history_rows import seconds_of_sessions
from tests.report.histories import WINNER, comparison, history
from tests.short_searches import short_searches as short_searches
from tests.tuner.run_folders import WritingMachine, write_run


def test_device_hours_are_the_devices_times_every_launch() -> None:
    run = history(launch_s=1800.0, search_s=3600.0, winner=WINNER)
    expense = expense_of(run)
    assert expense.num_devices == 2
    assert expense.device_hours == pytest.approx(1.0)
    # 0.5 s per iteration became 0.4 s.
    assert expense.payback_iterations == pytest.approx(36_000, abs=1)


@pytest.mark.parametrize(
    "winner",
    [
        None,
        replace(WINNER, measurement=comparison(1.0)),
        replace(WINNER, measurement=comparison(0.9)),
        replace(WINNER, measurement=None),
    ],
)
def test_only_a_faster_winner_pays_back(winner: object) -> None:
    assert expense_of(history(launch_s=10.0, search_s=20.0, winner=winner)).payback_iterations is None


def test_every_place_shows_the_same_figure() -> None:
    run = history(launch_s=1800.0, search_s=3600.0, winner=WINNER)
    line, parts, unstable, noise = expense_lines(run)
    assert {line, parts, unstable, noise} <= set(status_lines(run))
    hours, payback = "1.000 device-hours", f"{expense_of(run).payback_iterations:,} iterations"
    text = page(run, extras=Extras())
    for words in (hours, payback):
        assert words in line
        assert words in text
    assert status_record(run)["spent"]["device_hours"] == pytest.approx(1.0)


def test_what_is_not_measured_is_shown() -> None:
    parts = LaunchSeconds(gate_s=300.0, warmup_s=120.0, measured_s=900.0)
    run = history(launch_s=1800.0, launch_parts=parts, search_s=1860.0, winner=WINNER)
    words = (
        "measured 15 min 00 s (48 %), warm-up 2 min 00 s, parity checks 5 min 00 s, "
        "startup and shutdown 8 min 00 s, waiting between launches 1 min 00 s"
    )
    assert expense_lines(run)[1] == f"time      {words}"
    assert words in page(run, extras=Extras())
    assert status_record(run)["spent"]["starts_s"] == pytest.approx(480.0)
    assert status_record(run)["spent"]["measured_share"] == pytest.approx(900 / 1860)
    beside = replace(run, search_s=900.0)
    assert status_record(beside)["spent"]["measured_share"] == pytest.approx(0.5)


def test_starts_are_counted_where_some_are_warm() -> None:
    parts = LaunchSeconds(measured_s=900.0, num_warm=12, num_cold=1)
    run = history(launch_s=1800.0, launch_parts=parts, search_s=1860.0, winner=WINNER)
    assert "startup and shutdown (12 warm, 1 cold) 15 min 00 s" in expense_lines(run)[1]
    assert status_record(run)["spent"]["num_warm_starts"] == 12


def test_nothing_is_said_before_a_launch_has_ended() -> None:
    assert expense_lines(history()) == []


def test_the_seconds_between_sessions_are_nobodys() -> None:
    events = [
        {"time": time, "kind": kind}
        for time, kind in ((100.0, "begin"), (160.0, "interrupted"), (1000.0, "begin"), (1010.0, "told"))
    ]
    assert seconds_of_sessions(events, until_s=1030.0) == pytest.approx(60.0 + 30.0)
    assert seconds_of_sessions(events[:2], until_s=160.0) == pytest.approx(60.0)
    assert seconds_of_sessions([], until_s=5.0) == 0.0


def test_a_run_counts_every_launch_of_its_folder(tmp_path: Path) -> None:
    machine = WritingMachine(wall_s=90.0)
    write_run(tmp_path / "r", machine, study={"trials": 4, "rounds": 3, "control": 2})
    run = read_history(tmp_path / "r")
    assert run.launch_s == pytest.approx(90.0 * len(machine.launched))
    assert expense_of(run).device_hours == pytest.approx(2 * run.launch_s / 3600.0)
    assert 0.0 < run.launch_parts.measured_s < run.launch_s
    assert run.launch_parts.gate_s == 0.0
    final, full_size = (tmp_path / "r" / name for name in ("final", "full-size"))
    shutil.copytree(final, full_size)
    num_more = len(list(full_size.glob("*/attempt-*")))
    assert num_more
    assert read_history(tmp_path / "r").launch_s == pytest.approx(run.launch_s + 90.0 * num_more)


def test_unstable_launches_are_counted_and_a_busy_machine_is_said() -> None:
    few = history(launch_s=100.0, launch_parts=LaunchSeconds(num_measured=31, num_unstable=2))
    (line,) = [line for line in expense_lines(few) if line.startswith("unstable")]
    assert line.startswith(
        "unstable  2 of 31 measured launches (parity checks included) had unstable iteration times; each was"
    )
    assert "busy" not in line
    many = history(launch_s=100.0, launch_parts=LaunchSeconds(num_measured=31, num_unstable=4))
    assert expense_lines(many)[2].endswith("; the machine was too busy")
    none = history(launch_s=100.0, launch_parts=LaunchSeconds(num_measured=31))
    assert expense_lines(none)[2] == "unstable  none of 31 measured launches was unstable"


def test_every_key_of_the_status_is_documented() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()
    section = text.partition("## `quartet status --json`")[2].partition("\n## ")[0]
    assert [key for key in status_record(history()) if f'"{key}": ' not in section] == []
