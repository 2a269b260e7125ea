"""`quartet status`, `quartet trials`, `quartet repair`: what they say of a run, and their one-line errors."""

import csv
import io
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from quartet_plugin.cli.main import main
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import dump
from quartet_plugin.protocol.rank_files import Heartbeat
from quartet_plugin.space.plan_label import plan_label
from quartet_plugin.study.view import read_study
from quartet_plugin.trial.lease import Lease
from quartet_plugin.tuner.history import open_run, read_history
from quartet_plugin.tuner.history_rows import read_events
from tests.cli.runs import copy_of, kept_run
from tests.cli.tuning import environment
from tests.short_searches import short_searches as short_searches


@pytest.fixture(scope="module")
def run() -> Iterator[Path]:
    with kept_run() as path:
        yield path


@pytest.fixture(scope="module")
def journal_run() -> Iterator[Path]:
    with kept_run(study={"trials": 6, "rounds": 3, "storage": "journal"}) as path:
        yield path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out


class Terminal(io.StringIO):
    """A terminal as far as the output can see."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "words", [("status",), ("status", "--json"), ("trials",), ("explain",)], ids=" ".join
)
def test_a_terminal_gets_no_colour_where_its_reader_wants_none(
    words: tuple[str, ...], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    name, *options = words
    assert main([name, str(run), *options]) == 0
    assert screen.getvalue()
    assert not re.search(r"\x1b\[[\d;]*[34]\d", screen.getvalue())


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """The one line on stderr."""
    assert main([*words]) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def table(capsys: pytest.CaptureFixture[str], path: Path) -> list[dict[str, Any]]:
    content = json.loads(printed(capsys, "trials", str(path), "-f", "json"))
    trials: list[dict[str, Any]] = content["trials"]
    return trials


def test_a_finished_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "status", str(run))
    assert "state     finished" in text
    assert "finished  10 of 10 trials" in text
    assert "infeasible" in text
    assert "winner    trial " in text
    assert "as fast as the baseline" not in text, "one speedup, that of the winner"
    assert f"study     sqlite:///{run}/study.sqlite3" in text


def test_watching_a_finished_run_ends(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "status", str(run), "--watch", "1") == printed(capsys, "status", str(run))
    for seconds in ("0", "nan", "inf", "1e20"):
        assert main(["status", str(run), "--watch", seconds]) == 2


def test_watching_shows_a_run_until_it_ends(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of(run, to=tmp_path / "r")
    lease = Lease.acquire(path)
    monkeypatch.setattr("time.sleep", lambda _: lease.release())
    text = printed(capsys, "status", str(path), "--watch", "3")
    assert text.count("state     running") == 1
    assert text.count("state     finished") == 1


def test_the_status_as_data(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(printed(capsys, "status", str(run), "--json"))
    assert content["state"] == "finished"
    assert content["num_spent"] == content["num_asked"] == 10
    assert content["holder"] is None
    assert content["best"]["versus_baseline"] > 1
    assert sum(content["verdicts"].values()) >= 10


def test_every_trial_is_listed_with_what_came_of_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = table(capsys, run)
    study = read_study(open_run(run).storage)
    assert study is not None
    assert [row["trial"] for row in rows] == [one.number for one in study.rows if one.is_finished]
    assert rows[0]["versus_baseline"] == 1.0
    for row, one in zip(rows, study.rows, strict=False):
        assert row["verdict"] == one.record["verdict"]
        assert row["iteration_s"] == pytest.approx(one.record["iteration_s"])
        assert row["plan"] == {name: one.labels[name] for name in row["plan"]}
        assert row["class"] in ("-", "A", "B", "C", "D")
    measured = [row for row in rows if row["verdict"] == "measured"]
    assert all(row["tokens_per_s"] > 0 and row["peak_memory_bytes"] for row in measured)
    assert all(row["predicted_iteration_s"] > 0 for row in measured[1:] if row["repeats"] is None)
    proposals = read_events(open_run(run).folder.events_file)
    gains = {event["trial"]: event["gain"] for event in proposals if "gain" in event}
    assert len(gains) > 1
    expected = {
        row["trial"]: math.log1p(row["expected_gain"]) for row in rows if row["expected_gain"] is not None
    }
    assert expected == pytest.approx(gains)
    failed = [row for row in rows if row["verdict"] == "infeasible" and row["repeats"] is None]
    assert failed
    assert all(row["reason"] and row["memory_excess_bytes"] == 1 << 20 for row in failed)


def test_plans_are_listed_by_labelled_parts(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy_of(run, to=tmp_path / "r")
    listed = printed(capsys, "trials", str(path))
    plans = [row.plan for row in read_history(path).trials if row.number and row.plan is not None]
    assert plans
    assert all(plan_label(plan) in listed for plan in plans)
    (path / "trials/000002/attempt-1/plan.json").unlink()
    kept = next(row for row in table(capsys, path) if row["trial"] == 2)["plan"]
    words = " · ".join(f"{part} {label}" for part, label in kept.items())
    assert words in printed(capsys, "trials", str(path))


def test_the_forms_say_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_yaml = yaml.safe_load(printed(capsys, "trials", str(run), "-f", "yaml"))
    assert as_yaml["trials"] == table(capsys, run)
    rows = list(csv.DictReader(io.StringIO(printed(capsys, "trials", str(run), "-f", "csv"))))
    assert next(iter(rows[0])) == "trial"
    for row, trial in zip(rows, as_yaml["trials"], strict=True):
        assert row["iteration_s"] == ("" if trial["iteration_s"] is None else str(trial["iteration_s"]))
        assert row["reason"] == (trial["reason"] or "")
        assert {name: row[f"plan.{name}"] for name in trial["plan"]} == {
            name: "" if value is None else str(value) for name, value in trial["plan"].items()
        }
    text = printed(capsys, "trials", str(run))
    assert len([line for line in text.splitlines() if "your command" in line]) == 1
    assert "INFEASIBLE: " in text
    assert main(["trials", str(run), "-f", "xml"]) == 2


def test_a_run_by_its_name_and_several_at_once(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "state     finished" in printed(capsys, "status", "r", "--run-dir", str(run.parent))
    assert "state     finished" in printed(capsys, "status", "--run-dir", str(run.parent))
    for name in ("a", "b", "c"):
        copy_of(run, to=tmp_path / name)
    (tmp_path / "c" / "config.json").write_text("{")
    lines = printed(capsys, "status", "--run-dir", str(tmp_path)).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("r: finished, trial 10 of 10, winner ")
    assert lines[2].startswith("c: ")
    assert "not JSON" in lines[2]
    assert "name one of a, b, c" in refused(capsys, 2, "trials", "--run-dir", str(tmp_path))


def test_several_runs_as_data_include_those_that_cannot_be_read(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        copy_of(run, to=tmp_path / name)
    (tmp_path / "b" / "config.json").write_text("{")
    words = ("status", "--json", "--run-dir", str(tmp_path))
    assert main([*words]) == 0
    shown = capsys.readouterr()
    first, second, third = json.loads(shown.out)
    assert (first["state"], third["state"]) == ("finished", "finished")
    assert list(second) == ["schema_version", "run", "path", "state", "faults"]
    assert (second["run"], second["path"], second["state"]) == ("b", str(tmp_path / "b"), "unreadable")
    (fault,) = second["faults"]
    assert "not JSON" in fault
    assert shown.err.startswith("b: ")
    shutil.rmtree(tmp_path / "b")
    shutil.rmtree(tmp_path / "c")
    assert json.loads(printed(capsys, *words))["state"] == "finished", "the only run is no list"


def test_a_name_is_a_run_before_a_folder_here(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert "state     finished" in printed(capsys, "status", "r", "--run-dir", str(run.parent))
    assert "command: must be a list" in refused(capsys, 2, "status", "./r", "--run-dir", str(run.parent))


@pytest.mark.parametrize("command", ["status", "trials", "report"])
def test_no_such_run(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such run" in refused(capsys, 2, command, "nowhere", "--run-dir", str(tmp_path))
    assert "contains no runs" in refused(capsys, 2, command, "--run-dir", str(tmp_path))
    assert "no such run" in refused(capsys, 2, command, str(tmp_path))


@pytest.mark.parametrize("command", ["status", "trials"])
def test_a_damaged_study_is_said_in_one_line(
    command: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy_of(run, to=tmp_path / "r")
    (path / "study.sqlite3").write_bytes(b"this is no database " * 400)
    assert main([command, str(path)]) == 6
    shown = capsys.readouterr()
    assert len(shown.err.strip().splitlines()) == 1
    assert "study.sqlite3" in shown.err
    if command == "trials":
        assert "your command" in shown.out  # the folders hold the trials all the same
        assert "INFEASIBLE" in shown.out


def test_without_a_study_the_folders_say_the_same(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy_of(run, to=tmp_path / "r")
    (path / "study.sqlite3").unlink()
    keys = ("trial", "verdict", "outcome", "iteration_s", "plan", "class", "repeats")
    ours = [[row[key] for key in keys] for row in table(capsys, path)]
    assert ours == [[row[key] for key in keys] for row in table(capsys, run)]


def test_files_that_cannot_be_read_cost_their_row_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy_of(run, to=tmp_path / "r")
    (path / "trials/000001/attempt-1/result.json").write_text("{}")
    (path / "trials/000002/attempt-1/plan.json").write_text("[]")
    with (path / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "kind"')
    text = printed(capsys, "status", str(path))
    assert text.count("unread    ") == 2
    assert len(table(capsys, path)) == len(table(capsys, run))


def test_a_run_that_was_stopped(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy_of(run, to=tmp_path / "r")
    events = (path / "events.jsonl").read_text().splitlines(keepends=True)
    (path / "events.jsonl").write_text("".join(events[:-1]))
    assert "stopped; `quartet tune --resume` continues it" in printed(capsys, "status", str(path))


# Shown in whole minutes: nearly one may pass until somebody looks.
_ELAPSED_S = 80 * 60 + 1


def begin_attempt(path: Path, *, iteration: int, trial: str = "trials/000003") -> None:
    """The trial runs again: its result is not there yet, its ranks have beaten."""
    attempt = path / trial / "attempt-1"
    (attempt / "result.json").unlink()
    command = json.loads((attempt / "command.json").read_text())
    write_json_atomic(attempt / "command.json", {**command, "time": time.time() - _ELAPSED_S})
    for rank, at in ((0, iteration), (1, iteration + 1)):
        beat = Heartbeat(
            schema_version=1,
            attempt_id=command["attempt_id"],
            rank=rank,
            pid=os.getpid(),
            process_start=1.0,
            host="node-a",
            local_rank=rank,
            phase="measure",
            iteration=at,
            time=time.time(),
        )
        write_json_atomic(attempt / f"rank-{rank}.beat.json", dump(beat))


def test_a_run_that_runs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy_of(run, to=tmp_path / "r")
    begin_attempt(path, iteration=5)
    shutil.rmtree(path / "final")
    (path / "study.sqlite3").unlink()
    with Lease.acquire(path):
        text = printed(capsys, "status", str(path))
    assert f"state     running: process {os.getpid()} on {socket.gethostname()}, alive" in text
    assert "now       trial 3" in text
    assert ": measure 5/11, 1 h 20 min" in text
    assert "left" in text


def test_what_runs_beside_the_trials_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy_of(run, to=tmp_path / "r")
    for purpose, words in (("control/000010", "the baseline again"), ("parity/plan-3", "a parity check")):
        copy_of(path / "trials/000003", to=path / purpose)
        begin_attempt(path, iteration=2, trial=purpose)
        with Lease.acquire(path):
            assert f"now       {words}: measure 2/11, 1 h 20 min" in printed(capsys, "status", str(path))
        shutil.rmtree(path / purpose)


def test_the_drift_of_the_machine_is_kept(run: Path, tmp_path: Path) -> None:
    path = copy_of(run, to=tmp_path / "r")
    (path / "events.jsonl").write_text(
        '{"time": 1.0, "kind": "control", "trial": 0, "after": 10, "ratio": 0.9}\n'
        '{"time": 2.0, "kind": "control", "trial": 0, "after": 5, "ratio": 1.02}\n'
        '{"time": 3.0, "kind": "control", "trial": 0, "after": 10, "ratio": 0.9}\n'
    )
    found = [(check.num_tried, check.ratio) for check in read_history(path).drift_checks]
    assert found == [(5, 1.02), (10, 0.9)]


def test_a_run_whose_tuner_was_killed(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy_of(run, to=tmp_path / "r")
    code = (
        "import sys, os, pathlib; from quartet_plugin.trial.lease import Lease; "
        "Lease.acquire(pathlib.Path(sys.argv[1])); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], env=environment(), timeout=60)
    text = printed(capsys, "status", str(path))
    assert "its tuner ended unexpectedly" in text
    assert ", ended, renewed" in text
    assert "now " not in text
    begin_attempt(path, iteration=1)
    content = json.loads((path / "lock.json").read_text())
    hidden = {"pid_namespace": content["pid_namespace"] + 1}
    for elsewhere in ({"host": "elsewhere.example"}, hidden, {"boot_id": "another"}):
        write_json_atomic(path / "lock.json", {**content, **elsewhere})
        text = printed(capsys, "status", str(path))
        assert "held on another host" in text
        assert "not visible from here" in text
    # An earlier boot's, and of a time before the clock was set back.
    for when in (0, time.time() + 1e6):
        os.utime(path / "lock.json", (when, when))
        assert "its tuner ended unexpectedly" in printed(capsys, "status", str(path))


def test_looking_changes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def stamps() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")}

    before, children = stamps(), psutil.Process().children()
    for command in ("status", "trials"):
        printed(capsys, command, str(run))
    assert stamps() == before
    # Other tests of this process may have started servers that still run.
    assert set(psutil.Process().children()) <= set(children)


def test_a_control_character_does_not_reach_the_terminal(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy_of(run, to=tmp_path / "r")
    (path / "study.sqlite3").unlink()
    failed = next(row for row in read_history(path).trials if row.verdict == "infeasible")
    result = path / failed.folder / "result.json"
    write_json_atomic(result, {**json.loads(result.read_text()), "reason": "no\x1b[2J\x07memory"})
    text = printed(capsys, "trials", str(path))
    assert "no [2J memory" in text
    assert "\x1b" not in text


def test_a_torn_journal_is_named_and_a_damaged_one_repaired(
    journal_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy_of(journal_run, to=tmp_path / "r")
    journal = path / "study.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:5])
    assert f"record {len(lines)} is damaged" in refused(capsys, 6, "status", str(path))
    journal.write_bytes(b"".join([*lines[:9], b"{]\n", *lines[9:]]))
    assert "run `quartet status` for the fix" in refused(capsys, 6, "trials", str(path))
    assert "bytes (copy: study.journal.torn-1)" in printed(capsys, "repair", str(path))
    assert journal.read_bytes() == b"".join(lines[:9])
    assert "nothing is damaged" in printed(capsys, "repair", str(path))


def test_only_a_journal_is_repaired_and_not_while_a_tuner_runs(
    run: Path, journal_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "only a journal" in refused(capsys, 2, "repair", str(copy_of(run, to=tmp_path / "s")))
    path = copy_of(journal_run, to=tmp_path / "r")
    with Lease.acquire(path):
        assert "another tuner holds this run" in refused(capsys, 6, "repair", str(path))
