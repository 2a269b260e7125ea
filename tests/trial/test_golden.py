"""Golden files of an attempt: what an earlier version wrote is read for ever, and written alike."""

import json
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.schema import dump
from quartet_plugin.model.training_job import parse_training_job
from quartet_plugin.protocol.attempt_files import CommandRecord, ResultRecord, TrialSpec, read_shared
from quartet_plugin.protocol.rank_files import RankFileReader

GOLDEN = Path(__file__).parents[1] / "golden" / "attempt"
ATTEMPT = "0123456789abcdef" * 2
RECORDS: dict[str, type[Any]] = {"trial": TrialSpec, "command": CommandRecord, "result": ResultRecord}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_reads_and_writes_the_same(name: str) -> None:
    path = GOLDEN / f"{name}.json"
    assert json.loads(json.dumps(dump(read_shared(RECORDS[name], path)))) == json.loads(path.read_text())


def test_rank_files_are_read_whole() -> None:
    seen = RankFileReader(GOLDEN, attempt_id=ATTEMPT).scan()
    assert seen.faults == ()
    assert (set(seen.beats), set(seen.reports), set(seen.errs)) == ({0}, {0, 1}, {1})
    for report in seen.reports.values():
        path = GOLDEN / f"rank-{report.launch_rank}.json"
        assert json.loads(json.dumps(dump(report))) == json.loads(path.read_text())
    assert [iteration.iteration for iteration in seen.reports[1].iterations] == [1, 2, 3, 4]
    assert seen.errs[1].kind == "out-of-memory"
    assert seen.errs[1].wanted_bytes == 2 * 2**30


def test_the_job_of_rank_zero_is_read_whole() -> None:
    job = RankFileReader(GOLDEN, attempt_id=ATTEMPT).scan().reports[0].job
    assert job is not None
    assert json.loads(json.dumps(dump(parse_training_job(job)))) == job


def test_files_of_another_attempt_are_not_listened_to() -> None:
    seen = RankFileReader(GOLDEN, attempt_id="f" * 32).scan()
    assert not seen.beats
    assert not seen.reports
    assert not seen.errs


@pytest.mark.parametrize("name", ["trial", "command", "result"])
def test_an_unknown_key_is_refused(name: str, tmp_path: Path) -> None:
    data = json.loads((GOLDEN / f"{name}.json").read_text())
    (tmp_path / "x.json").write_text(json.dumps({**data, "hook": "os.system"}))
    with pytest.raises(ConfigError, match="hook"):
        read_shared(RECORDS[name], tmp_path / "x.json")
