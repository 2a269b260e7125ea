"""The process that holds an attempt's connections outlives its tuner, and a later tuner finds it."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from quartet_plugin.errors import InfrastructureError
from quartet_plugin.launchers.held_run import CONNECTIONS_FILE, HeldRun, start_held

HOLDER = """import json, sys, time
json.load(sys.stdin)
time.sleep(600)
"""


@dataclass(frozen=True, slots=True)
class Started:
    """A holding process, as the tuner that started it has it."""

    run: HeldRun
    folder: Path

    def adopted(self) -> HeldRun:
        """The same, as a later tuner has it."""
        return HeldRun(self.folder, "a" * 32)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """A process that stands for one that holds connections."""
    (tmp_path / "holder_of_nothing.py").write_text(HOLDER)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    output = tmp_path / "stdout.log"
    process = start_held(
        "holder_of_nothing", {}, env=environment, stdout=output, connections={"address": "a"}
    )
    run = HeldRun(tmp_path, "a" * 32, process)
    try:
        yield Started(run, tmp_path)
    finally:
        run.cut()


def test_a_later_tuner_finds_the_holder_and_ends_it(started: Started) -> None:
    later = started.adopted()
    assert later.pid == started.run.pid
    assert later.read(CONNECTIONS_FILE)["address"] == "a"
    assert later.poll() is None
    later.cut()
    assert later.pid == 0
    assert later.poll() not in (None, 0)
    assert started.run.poll() is not None


def test_row_34_a_clock_that_was_set_meanwhile_hides_no_holder(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + 3600.0)
    assert started.adopted().poll() is None


@pytest.mark.parametrize("change", [{"boot_id": "another"}, {"start_ticks": 5}, {"pid": "x"}])
def test_another_process_of_that_pid_is_not_the_holder(started: Started, change: dict[str, object]) -> None:
    path = started.folder / CONNECTIONS_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    later = started.adopted()
    assert later.pid == 0
    assert later.poll() not in (None, 0)
    later.terminate()
    later.cut()
    assert started.run.poll() is None


def test_what_an_earlier_version_wrote_down_is_enough(started: Started) -> None:
    path = started.folder / CONNECTIONS_FILE
    content = json.loads(path.read_text())
    path.write_text(json.dumps({name: content[name] for name in ("schema_version", "pid", "process_start")}))
    assert started.adopted().poll() is None


def test_a_python_that_is_not_there_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="holder_of_nothing: cannot start: No such file"):
        start_held(
            "holder_of_nothing",
            {},
            env={},
            stdout=tmp_path / "stdout.log",
            connections={},
            python=str(tmp_path / "python"),
        )
