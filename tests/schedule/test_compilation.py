"""Machine code on disk: read after an upgrade in place, and thrown away when a kernel it contains changed."""

import fcntl
import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
from numba import njit

from quartet_plugin.schedule import compilation

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


def loaded(folder: Path) -> ModuleType:
    """A module of its own with one kernel, as another process would have it."""
    path = folder / "helper.py"
    if not path.exists():
        path.write_text(HELPER.replace("FACTOR", "3"))
    spec = importlib.util.spec_from_file_location("helper", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def locked(kernel: object) -> int:
    """The lock of a kernel, as a process has it that compiles."""
    cache = kernel._cache  # type: ignore[attr-defined]
    cache._impl.locator.ensure_cache_path()
    path = Path(cache._cache_path, f"{cache._impl.filename_base}.lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def test_a_kernel_that_another_process_compiles_is_read_and_not_compiled_again(tmp_path: Path) -> None:
    assert loaded(tmp_path).scaled(2) == 6
    files, away = sorted((tmp_path / "__pycache__").glob("*.nb*"), reverse=True), tmp_path / "away"
    away.mkdir()
    for path in files:
        path.rename(away / path.name)
    kernel = loaded(tmp_path).scaled
    lock = locked(kernel)
    caught: list[int] = []
    waiting = threading.Thread(target=lambda: caught.append(kernel(2)))
    waiting.start()
    time.sleep(0.2)
    assert not caught
    # What the other process leaves before it gives the lock back.
    for path in files:
        (away / path.name).rename(path)
    os.close(lock)
    waiting.join()
    assert caught == [6]
    assert sum(kernel.stats.cache_hits.values()) == 1
    assert not kernel.stats.cache_misses
    assert kernel._cache._lock is None


def test_a_process_that_never_gives_a_lock_back_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "OTHERS_LIMIT_S", 0.1)
    kernel = loaded(tmp_path).scaled
    lock = locked(kernel)
    assert kernel(2) == 6
    os.close(lock)


def test_the_first_compilation_is_told_once() -> None:
    told: list[str] = []
    with compilation.compilation_notice(told.append):
        for kernel in (lambda number: number + 1, lambda number: number + 2):
            assert njit(kernel)(1) > 1
    assert told == [compilation.COMPILING]
    with compilation.compilation_notice(told.append):
        pass
    assert len(told) == 1
