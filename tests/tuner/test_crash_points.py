"""A tuner that dies before any single one of its writes ends, resumed, as one that was left alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.pool import Pool

from quartet_plugin.model.plan import Plan
from quartet_plugin.tuner.tune_result import TuneResult, write_best
from tests.tuner.fakes import FakeMachine, Killed, begin, by_formula, outcome, resume, tune

CONFIG: dict[str, Any] = {
    "search": {"pipeline_parallel": 2, "mapping": "stock", "schedule": ["1f1b", "zb-h1", "zb-v"]},
    "study": {"trials": 4, "rounds": 3, "top_k": 1},
}


def seconds(plan: Plan) -> float:
    return by_formula(plan) * (0.5 if plan.schedule.custom is not None else 1.0)


def machine() -> FakeMachine:
    return FakeMachine(seconds=seconds, gate=lambda plan: plan.schedule.label != "zb-v")


class Writes:
    """Counts files that appear, lines that are appended and transactions; dies before the given one."""

    def __init__(self, dies_before: int | None) -> None:
        self.count = 0
        self._dies_before = dies_before
        self._connections: list[Any] = []

    def connected(self, connection: Any, trial: Any) -> None:
        """A connection was made, and would end with its process."""
        del trial
        self._connections.append(connection)

    def let_go(self) -> None:
        """What a killed process leaves open its system closes."""
        for connection in self._connections:
            connection.close()

    def one(self, *args: Any) -> None:
        """A write is about to happen."""
        del args
        if self.count == self._dies_before:
            raise Killed
        self.count += 1


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, *, dies_before: int | None = None) -> Iterator[Writes]:
    """Every write of the tuner goes past a counter."""
    writes = Writes(dies_before)

    def before(function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            writes.one()
            return function(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", before(os.replace))
        patch.setattr(os, "write", before(os.write))
        event.listen(Engine, "commit", writes.one)
        event.listen(Pool, "connect", writes.connected)
        try:
            yield writes
        finally:
            event.remove(Engine, "commit", writes.one)
            event.remove(Pool, "connect", writes.connected)
            if dies_before is not None:
                writes.let_go()


def left(folder: Path) -> set[str]:
    """The files of a run."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, int, set[str]]:
    """An undisturbed run: what it comes to, its number of writes, its files."""
    folder = tmp_path / "whole" / "r"
    with watched(monkeypatch) as writes:
        result = whole_run(folder, machine())
    assert {trial.record.verdict for trial in result.trials} == {"measured", "wrong"}
    assert result.winner is not None
    return outcome(result), writes.count, left(folder)


def whole_run(folder: Path, survivors: FakeMachine) -> TuneResult:
    """A run that begins, or goes on where it has begun."""
    run = resume(folder) if (folder / "config.json").exists() else begin(folder, **CONFIG)
    result = tune(run, survivors)
    write_best(result, run=run)
    return result


def dies_and_resumes(folder: Path, monkeypatch: pytest.MonkeyPatch, *, dies_before: int) -> Any:
    """The outcome of a run that was killed before that write, and gone on with."""
    survivors = machine()
    with pytest.raises(Killed), watched(monkeypatch, dies_before=dies_before):
        whole_run(folder, survivors)
    return outcome(whole_run(folder, survivors))


def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any, points: range) -> None:
    expected, num_writes, files = whole
    assert num_writes > 60
    for dies_before in points:
        folder = tmp_path / f"{dies_before}" / "r"
        assert dies_and_resumes(folder, monkeypatch, dies_before=dies_before) == expected, dies_before
        assert left(folder) == files, dies_before


@pytest.mark.slow
def test_killed_before_some_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any) -> None:
    check(tmp_path, monkeypatch, whole, range(0, whole[1], 23))


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(8))
def test_killed_before_every_write(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any
) -> None:
    check(tmp_path, monkeypatch, whole, range(first, whole[1], 8))
