"""`kill -9` of the tuner's process at some of its writes: nothing is lost, doubled or left half-written."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tuner.dying import whole_run
from tests.tuner.fakes import outcome

ROOT = Path(__file__).parents[2]


def start(folder: Path, *dies_before: int) -> subprocess.CompletedProcess[str]:
    """The tuner as a process of its own."""
    words = [sys.executable, "-m", "tests.tuner.dying", str(folder), *map(str, dies_before)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def left(folder: Path) -> set[str]:
    """The files of a run, an attempt's number left out: what was interrupted is launched again."""
    return {
        str(path.relative_to(folder)).replace("attempt-2", "attempt-1")
        for path in folder.rglob("*")
        if path.is_file()
    }


def check(tmp_path: Path, parts: tuple[float, ...]) -> None:
    """Killed after such a part of its writes, and gone on with, a run comes to the same."""
    whole = tmp_path / "whole" / "r"
    done = start(whole)
    assert done.returncode == 0, done.stderr
    num_writes = int(done.stdout)
    assert num_writes > 100
    expected = outcome(whole_run(whole))  # a finished run measures nothing again
    for part in parts:
        folder = tmp_path / f"killed-{part}" / "r"
        killed = start(folder, int(part * num_writes))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert outcome(whole_run(folder)) == expected, part
        files = left(folder)
        assert files == left(whole), part
        assert not [name for name in files if name.endswith((".tmp", ".draft")) or "ballast" in name]
        assert not (folder / "lock.json").exists()


@pytest.mark.timeout(240)
def test_a_killed_process_ends_resumed_as_an_undisturbed_one(tmp_path: Path) -> None:
    check(tmp_path, (0.3, 0.97))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_killed_at_more_points(tmp_path: Path) -> None:
    check(tmp_path, (0.02, 0.1, 0.2, 0.45, 0.6, 0.7, 0.8, 0.9))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_killed_again_and_again_it_comes_to_its_end(tmp_path: Path) -> None:
    """Every process lives some writes longer than it takes to resume."""
    folder = tmp_path / "killed" / "r"
    for _ in range(2):
        assert start(folder, 50).returncode == -signal.SIGKILL
    assert outcome(whole_run(folder)) == outcome(whole_run(tmp_path / "whole" / "r"))
