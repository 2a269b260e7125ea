"""The files of a rank: what is read is checked, what is written is whole and truthful."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError, InfrastructureError, PlanError, SeamError
from quartet_plugin.model.schema import as_number, read_record
from quartet_plugin.protocol.rank_files import RankFailure
from quartet_plugin.rank.failure import describe_failure, exit_code_of, kind_of
from quartet_plugin.rank.failure_texts import wanted_bytes_of
from quartet_plugin.rank.files import RankFileWriter, read_trial_spec
from quartet_plugin.rank.rendezvous import RankEnv
from tests.megatron.entry_launch import write_trial

RANK_ENV = RankEnv.of(
    {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"attempt_id": "x"}, "attempt_id"),
        ({"folder": "relative"}, "folder"),
        ({"folder": "/no/such/folder"}, "folder"),
        ({"warmup": -1}, "warmup"),
        ({"measure": 0}, "measure"),
        ({"measure": "5"}, "measure"),
        ({"more": 1}, "more"),
        ({"schema_version": 2}, "schema_version"),
    ],
)
def test_bad_trial_names_the_field(change: dict[str, Any], part: str, tmp_path: Path) -> None:
    path = write_trial(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=part) as raised:
        read_trial_spec(path)
    assert "\n" not in str(raised.value)


def test_heartbeat_tells_progress_and_nothing_else(tmp_path: Path) -> None:
    files = RankFileWriter(read_trial_spec(write_trial(tmp_path)), RANK_ENV)
    files.start()
    path = tmp_path / "rank-3.beat.json"
    first = json.loads(path.read_text())
    assert (first["phase"], first["iteration"], first["local_rank"]) == ("import", 0, 1)
    files.move("warmup", 0)
    deadline = time.monotonic() + 20
    while json.loads(path.read_text())["phase"] != "warmup" and time.monotonic() < deadline:
        time.sleep(0.01)
    at_warmup = json.loads(path.read_text())
    assert at_warmup["time"] > first["time"]
    written = path.stat().st_mtime_ns
    time.sleep(1.5)
    assert path.stat().st_mtime_ns == written
    files.move("done", 7)
    files.close()
    assert json.loads(path.read_text())["iteration"] == 7


def test_a_failure_tells_where_the_rank_was(tmp_path: Path) -> None:
    files = RankFileWriter(read_trial_spec(write_trial(tmp_path)), RANK_ENV)
    files.move("warmup", 2)
    files.write_failure(describe_failure(MemoryError("full"), num_steps=2, peak_bytes=5))
    failure = read_record(RankFailure, tmp_path / "rank-3.err.json")
    assert (failure.kind, failure.phase, failure.iteration) == ("out-of-memory", "warmup", 2)
    assert (failure.launch_rank, failure.host, failure.message) == (3, RANK_ENV.host, "full")


def test_numbers_that_json_lacks() -> None:
    values = [1.5, math.nan, math.inf, -math.inf]
    assert [as_number(value) for value in values] == [1.5, "nan", "inf", "-inf"]


def test_place_without_a_launcher() -> None:
    alone = RankEnv.of({})
    assert (alone.launch_rank, alone.world_size, alone.local_rank, alone.group_rank) == (0, 1, None, 0)


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PlanError("x"), "plan"),
        (SeamError("x"), "seam"),
        (InfrastructureError("x"), "network"),
        (MemoryError(), "out-of-memory"),
        (OutOfMemoryError("x"), "out-of-memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            "out-of-memory",
        ),
        (RuntimeError("std::bad_alloc"), "out-of-memory"),
        (OSError(98, "Address already in use"), "network"),
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:3"), "network"),
        (FileNotFoundError(2, "no such file"), "error"),
        (ValueError("of the script's own"), "error"),
    ],
)
def test_kinds(error: BaseException, kind: str) -> None:
    with pytest.raises(type(error)) as raised:
        raise error
    assert kind_of(raised.value, num_steps=0) == kind


def test_verdict_of_the_framework_counts_before_the_first_step() -> None:
    from megatron.core.utils import divide

    with pytest.raises(AssertionError) as raised:
        divide(7, 2)
    assert kind_of(raised.value, num_steps=0) == "refused"
    assert kind_of(raised.value, num_steps=1) == "error"


def test_sizes_and_codes() -> None:
    assert wanted_bytes_of("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0") == 3 * 2**29
    assert wanted_bytes_of("you tried to allocate 4096 bytes. Error code 12") == 4096
    assert wanted_bytes_of("no size") == 0
    codes = [
        exit_code_of(e) for e in (PlanError("x"), SystemExit(2), SystemExit("text"), KeyboardInterrupt())
    ]
    assert codes == [2, 2, 1, 130]


def test_failure_is_bounded() -> None:
    def deep(level: int) -> None:
        if level == 0:
            raise ValueError("x" * 100_000)
        deep(level - 1)

    with pytest.raises(ValueError, match="x") as raised:
        deep(300)
    failure = describe_failure(raised.value, num_steps=0, peak_bytes=5)
    assert len(failure.message) <= 4000
    assert len(failure.traceback) <= 200
    assert failure.peak_memory_bytes == 5
