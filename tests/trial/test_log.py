"""The log is kept within a size, and its end is fit for a terminal."""

import os
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.trial.log import CappedLog, has_address_in_use, last_lines, read_tail, root_cause


def test_head_and_tail_stay_and_writers_go_on_behind_them(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = CappedLog(path, max_bytes=8_000, kept_bytes=500)
    writer = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for number in range(2_000):
            os.write(writer, f"line {number:05}\n".encode())
            log.trim()
            assert path.stat().st_size <= 8_000
    finally:
        os.close(writer)
    text = path.read_text()
    assert text.startswith("line 00000\n")
    assert text.endswith("line 01999\n")
    assert text.count("left out") >= 1


def test_a_short_log_and_a_missing_one_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("short")
    assert not CappedLog(tmp_path / "log").trim()
    assert (tmp_path / "log").read_text() == "short"
    assert not CappedLog(tmp_path / "none").trim()
    assert read_tail(tmp_path / "none") == ""


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x" * 100)
    (tmp_path / "log").symlink_to(tmp_path / "precious")
    assert not CappedLog(tmp_path / "log", max_bytes=10).trim()
    assert read_tail(tmp_path / "log") == ""
    assert (tmp_path / "precious").read_text() == "x" * 100


def test_torchruns_own_words_are_left_out() -> None:
    text = (
        "W1121 09:58:01.1 77 .venv/torch/distributed/run.py:851] Setting OMP_NUM_THREADS\n"
        "Traceback (most recent call last):\nValueError: mine\n"
        "E1121 09:58:02.1 77 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1) "
        "local_rank: 0\n"
        "Traceback (most recent call last):\nChildFailedError: theirs\n"
    )
    assert last_lines(text) == ("Traceback (most recent call last):", "ValueError: mine")
    stopped = (
        "mine\nW1121 10:51:51.0 77 torch/distributed/elastic/agent/server/api.py:739] Received 15 death "
        "signal, shutting down workers\nTraceback (most recent call last):\nSignalException: theirs\n"
    )
    assert last_lines(stopped) == ("mine",)


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=200))
def test_last_lines_are_printable(text: str) -> None:
    lines = last_lines(text, num_lines=5)
    assert len(lines) <= 5
    assert all(line.isprintable() for line in lines)


def test_escapes_are_gone_as_a_whole() -> None:
    assert last_lines("\x1b[31mred\x1b[0m \x1b]0;title\x07end\r\n50%\r100%") == ("red end", "100%")


def test_the_root_cause_is_the_last_reports() -> None:
    text = (
        "Failures:\n[1]:\n  exitcode  : -15 (pid: 12)\n----\nRoot Cause (first observed failure):\n[0]:\n"
        "  time      : x\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 11)\n"
    )
    assert root_cause(text) == (-9, 11)
    assert root_cause("exitcode : -9 (pid: 11)") is None
    assert has_address_in_use("The server socket has failed: EADDRINUSE")
    assert not has_address_in_use("address")
