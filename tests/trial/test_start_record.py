"""How an attempt started is in its result."""

from pathlib import Path

import pytest

from quartet_plugin.launchers.warm import StartRecord
from quartet_plugin.protocol.attempt_files import TrialSpec
from quartet_plugin.trial.attempt import read_result, write_result
from quartet_plugin.trial.outcome import Cause, Verdict
from quartet_plugin.trial.request import Outcome


@pytest.mark.parametrize(
    ("record", "start", "reason", "start_s"),
    [
        (StartRecord(is_warm=True, import_s=4.0), "warm", None, 4.0),
        (StartRecord(is_warm=False, cold_reason="no fork"), "cold", "no fork", 0.0),
        (StartRecord(is_warm=False), "cold", None, 0.0),
        (None, None, None, 0.0),
    ],
)
def test_a_result_says_how_its_processes_started(
    tmp_path: Path, record: StartRecord | None, start: str | None, reason: str | None, start_s: float
) -> None:
    spec = TrialSpec(attempt_id="a" * 32, folder=str(tmp_path), warmup=0, measure=1, plan_key=None)
    verdict = Verdict(cause=Cause.LAUNCHER, outcome=Outcome.INFRA, reason="none", phase="launch")
    write_result(tmp_path, spec, verdict, wall_s=9.0, start=record)
    result = read_result(tmp_path)
    assert result is not None
    assert (result.start, result.cold_reason, result.start_s) == (start, reason, start_s)
