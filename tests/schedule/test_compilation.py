"""Machine code on disk: read after an upgrade in place, and thrown away when a kernel it contains changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNEL = """
from typing import NamedTuple
from quartet_plugin.schedule.compilation import compiled
from helper import scaled

class NAME(NamedTuple):
    number: int

@compiled
def kernel(problem: NAME) -> int:
    return scaled(problem.number)

print(kernel(NAME(2)))
"""
HELPER = """
from quartet_plugin.schedule.compilation import compiled

@compiled
def scaled(number: int) -> int:
    return number * FACTOR
"""


def run(folder: Path, *, name: str, factor: int) -> str:
    """The output of a kernel that takes a class called `name` and calls a kernel of another file."""
    (folder / "kernels.py").write_text(KERNEL.replace("NAME", name))
    (folder / "helper.py").write_text(HELPER.replace("FACTOR", str(factor)))
    command = [sys.executable, "-B", "-c", "import kernels"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("name", "factor"), [("Renamed", 3), ("Problem", 5)])
def test_old_machine_code_is_not_used_after_an_upgrade(tmp_path: Path, name: str, factor: int) -> None:
    assert run(tmp_path, name="Problem", factor=3) == "6"
    assert list(tmp_path.glob("__pycache__/*.nbi"))
    assert run(tmp_path, name=name, factor=factor) == str(2 * factor)


def test_machine_code_is_used_again(tmp_path: Path) -> None:
    for _ in range(2):
        assert run(tmp_path, name="Problem", factor=3) == "6"
        times = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("__pycache__/*.nb*")}
    assert run(tmp_path, name="Problem", factor=3) == "6"
    assert times == {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("__pycache__/*.nb*")}
