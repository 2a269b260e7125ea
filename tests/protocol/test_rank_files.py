"""The files of ranks are untrusted."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError, StorageError
from quartet_plugin.model.training_job import parse_training_job
from quartet_plugin.protocol.attempt_files import CommandRecord, ResultRecord, TrialSpec, read_shared
from quartet_plugin.protocol.rank_files import RankFileReader
from tests.faults.fake_trial import job
from tests.trial.factory import ID, beat, err, iteration, report


def put(path: Path, value: Any) -> None:
    """Write a file, however wrong."""
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def test_every_kind_is_read(tmp_path: Path) -> None:
    put(tmp_path / "rank-0.beat.json", asdict(beat(0)))
    put(tmp_path / "rank-1.json", asdict(report(1, iterations=(iteration(1, loss="nan"),))))
    put(tmp_path / "rank-2.err.json", asdict(err(2)))
    put(tmp_path / "rank-x.json", "{")
    put(tmp_path / "plan.json", "{")
    snapshot = RankFileReader(tmp_path, attempt_id=ID).scan()
    assert snapshot.beats == {0: beat(0)}
    assert snapshot.reports == {1: report(1, iterations=(iteration(1, loss="nan"),))}
    assert snapshot.errs == {2: err(2)}
    assert snapshot.faults == ()


def test_files_of_another_attempt_are_left_out(tmp_path: Path) -> None:
    put(tmp_path / "rank-0.json", asdict(report(0)))
    snapshot = RankFileReader(tmp_path, attempt_id="b" * 32).scan()
    assert (snapshot.reports, snapshot.faults) == ({}, ())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 1),
        ("rank", -1),
        ("rank", "0"),
        ("rank", True),
        ("rank", 70_000),
        ("pid", 0),
        ("attempt_id", "../../x"),
        ("phase", "sleeping"),
        ("iteration", 1.5),
        ("iteration", 10**400),
        ("time", "nan"),
        ("host", "x" * 1000),
        ("schema_version", 2),
        ("extra", 1),
    ],
)
def test_a_beat_that_breaks_the_format_is_a_fault(tmp_path: Path, field: str, value: Any) -> None:
    put(tmp_path / "rank-0.beat.json", {**asdict(beat(0)), field: value})
    snapshot = RankFileReader(tmp_path, attempt_id=ID).scan()
    assert not snapshot.beats
    assert len(snapshot.faults) == 1
    assert field in snapshot.faults[0]
    assert "rank-0.beat.json" in snapshot.faults[0]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "NaN", '{"rank": NaN}', "[" * 100_000, "\x00", " " * 70_000]
)
def test_garbage_is_a_fault(tmp_path: Path, content: str) -> None:
    put(tmp_path / "rank-0.beat.json", content)
    (fault,) = RankFileReader(tmp_path, attempt_id=ID).scan().faults
    assert fault.isprintable()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1e999", "1e999"])
def test_numbers_are_finite(tmp_path: Path, number: str) -> None:
    text = json.dumps(asdict(beat(0, time=12321.5))).replace("12321.5", number)
    put(tmp_path / "rank-0.beat.json", text)
    assert RankFileReader(tmp_path, attempt_id=ID).scan().faults


def test_row_39_links_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    put(secret, asdict(beat(0)))
    folder = tmp_path / "attempt"
    folder.mkdir()
    (folder / "rank-0.beat.json").symlink_to(secret)
    os.mkfifo(folder / "rank-1.beat.json")
    (folder / "rank-2.beat.json").mkdir()
    snapshot = RankFileReader(folder, attempt_id=ID).scan()
    assert not snapshot.beats
    assert len(snapshot.faults) == 3


def test_a_file_is_read_again_when_it_changes_and_only_then(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.beat.json"
    files = RankFileReader(tmp_path, attempt_id=ID)
    put(path, asdict(beat(0)))
    first = files.scan().beats[0]
    assert files.scan().beats[0] is first
    put(tmp_path / "new", asdict(beat(0, iteration=6)))
    (tmp_path / "new").replace(path)
    assert files.scan().beats[0].iteration == 6


def test_a_folder_that_is_gone_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        RankFileReader(tmp_path / "gone", attempt_id=ID).scan()


@settings(deadline=None, max_examples=60)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from(sorted(asdict(report(0)))),
)
def test_any_json_is_a_report_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, value: Any, field: str
) -> None:
    folder = tmp_path_factory.mktemp("ranks")
    put(folder / "rank-0.json", {**asdict(report(0)), field: value})
    snapshot = RankFileReader(folder, attempt_id=ID).scan()
    assert len(snapshot.faults) <= 1
    assert all(fault.isprintable() for fault in snapshot.faults)


@pytest.mark.parametrize("kind", [TrialSpec, CommandRecord, ResultRecord])
def test_records_refuse_what_they_do_not_know(tmp_path: Path, kind: type[Any]) -> None:
    put(tmp_path / "x.json", {"schema_version": 1, "unknown": 1})
    with pytest.raises(ConfigError, match=r"x\.json"):
        read_shared(kind, tmp_path / "x.json")


def test_the_job() -> None:
    assert parse_training_job(job()).shape.num_layers == 4
    with pytest.raises(ConfigError, match="num_layers"):
        parse_training_job({**job(), "shape": {**job()["shape"], "num_layers": 0}})
    with pytest.raises(ConfigError, match="precision"):
        parse_training_job({**job(), "precision": "int3"})
