"""Runs of tests that go on where they were ended: by pytest's logs, with and without workers."""

import os
from pathlib import Path

import pytest

from tools import kept_tests
from tools.kept_tests import is_left, kept_states, states_of
from tools.nightly_tests import summary

FILE = "tests/schedule/test_search.py"
TESTS = [f"{FILE}::test_one[2]", f"{FILE}::test_one[a b]", f"{FILE}::test_two", f"{FILE}::test_three"]
LOG = f"""
{TESTS[0]} PASSED [ 25%]
[gw1] [ 50%] FAILED {TESTS[1]}
[gw0] [ 75%] PASSED {TESTS[2]}
[gw0] [ 75%] ERROR {TESTS[2]}
{TESTS[3]}
FAILED {TESTS[0]} - AssertionError: the line of the summary
"""
NEXT = f"""
{TESTS[1]} SKIPPED (no file) [100%]
[gw1] [100%] PASSED {TESTS[2]}
"""


def test_a_test_has_the_state_of_its_last_run() -> None:
    states = states_of(TESTS, [LOG])
    assert list(states.values()) == ["PASSED", "FAILED", "ERROR", ""]
    assert [test for test, state in states.items() if is_left(state)] == TESTS[1:]
    states = states_of(TESTS, [LOG, NEXT])
    assert [test for test, state in states.items() if is_left(state)] == TESTS[3:]


def test_the_summary_counts_days_minutes_and_names_what_failed(tmp_path: Path) -> None:
    logs = [tmp_path / "20260102-100000.log", tmp_path / "20260103-100000.log"]
    for log, text in zip(logs, (LOG, NEXT), strict=True):
        log.write_text(text)
        _set_length(log, 600)
    assert summary(kept_states(TESTS, tmp_path), logs).splitlines() == [
        "4 tests: 1 not run, 2 passed, 1 skipped; 2026-01-02 to 2026-01-03, 20 min in 2 runs"
    ]
    assert summary(states_of(TESTS, [LOG]), logs[:1]).splitlines() == [
        "4 tests: 1 error, 1 failed, 1 not run, 1 passed; 2026-01-02, 10 min in 1 run",
        f"FAILED {TESTS[1]}",
        f"ERROR {TESTS[2]}",
    ]


def test_a_real_run_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(
        "import pytest\n\n\n@pytest.mark.parametrize('word', ['a b', 'c'])\ndef test_it(word):\n"
        "    assert word == 'c'\n"
    )
    monkeypatch.setattr(kept_tests, "ROOT", tmp_path)
    tests = kept_tests.collected("-m", "")
    assert tests == ["tests/test_it.py::test_it[a b]", "tests/test_it.py::test_it[c]"]
    kept_tests.run(tests, folder=tmp_path / "kept", timeout_s=60)
    assert list(kept_states(tests, tmp_path / "kept").values()) == ["FAILED", "PASSED"]


def _set_length(log: Path, length_s: float) -> None:
    begin, _ = kept_tests.time_of(log)
    os.utime(log, (begin.timestamp() + length_s,) * 2)
