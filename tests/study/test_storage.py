"""Where a study is kept: what is accepted, what is never shown, and what is left after a torn write."""

import atexit
import builtins
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError, InterruptedByUserError, StorageError
from quartet_plugin.space.plan_space import build_space
from quartet_plugin.study.storage import (
    StudyStorage,
    check_address,
    passwords_of,
    without_password,
)
from quartet_plugin.study.tune_study import TuneStudy
from quartet_plugin.tuner.config import parse_config
from quartet_plugin.tuner.run_folder import TuningRun
from quartet_plugin.tuner.study_remake import with_remake
from quartet_plugin.tuner.tune_result import TuneResult
from tests.in_memory import MEMORY
from tests.tuner.fakes import FakeMachine, Killed, Watching, begin, resume, tune

PLACE = MEMORY if os.access(MEMORY, os.W_OK) else None
STUDY = {"trials": 7, "rounds": 3, "top_k": 1}
# What the messages say anyway: a password that is part of it cannot be told apart.
SHOWN = "postgresql://tuner@db.example:5432/studies?sslmode=require FATAL and *** were refused"
PASSWORDS = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x2FF, blacklist_categories=("Cs", "Cc")),
    min_size=4,
    max_size=20,
).filter(lambda text: text not in SHOWN)


def outcomes(result: TuneResult) -> set[tuple[Any, ...]]:
    return {
        (trial.number, trial.plan.key, trial.record.verdict, trial.record.value, trial.record.repeats)
        for trial in result.trials
    }


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that has ended: its folder, the machine that it was on, and its result."""

    run: TuningRun
    machine: FakeMachine
    result: TuneResult

    def copy(self, folder: Path) -> "Finished":
        """The same in another folder, which a test may damage."""
        shutil.copytree(self.run.folder.path, folder)
        machine = deepcopy(self.machine)
        machine.disk = {
            (place := folder / path.relative_to(self.run.folder.path)): replace(result, folder=place)
            for path, result in self.machine.disk.items()
        }
        return Finished(resume(folder), machine, self.result)


@functools.cache
def finished(address: str = "sqlite") -> Finished:
    """STUDY where nothing fails, which each test process runs once in each kind of file."""
    folder = Path(tempfile.mkdtemp(prefix="quartet-finished-", dir=PLACE))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    run, machine = begin(folder / "r", study={**STUDY, "storage": address}), FakeMachine()
    return Finished(run, machine, tune(run, machine))


def undisturbed() -> set[tuple[Any, ...]]:
    """The outcomes of STUDY where nothing fails."""
    return outcomes(finished().result)


@pytest.mark.parametrize(
    "address",
    ["sqlite", "journal", "postgresql://u@h/d", "postgresql+psycopg://u:p@h:5/d", "grpc://127.0.0.1:13000"],
)
def test_addresses_that_are_taken(address: str) -> None:
    assert parse_config({"study": {"storage": address}}, where="q").study.storage == address


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("redis://:hunter22@h/0", "pickled"),
        ("rediss://h/0", "pickled"),
        ("mysql://u:hunter22@h/d", "must be sqlite, journal"),
        ("postgresql://u:hunter22@h", "names no database"),
        ("postgresql://u:hunter22@h:port/d", "not a URL"),
        ("grpc://host", "host and port"),
        ("grpc://u:hunter22@host:1", "host and port"),
        ("sqlite:///elsewhere.db", "must be sqlite, journal"),
        ("", "must be sqlite, journal"),
        (["postgresql://u:hunter22@h/d"], "must be sqlite, journal"),
        (5, "must be sqlite, journal"),
    ],
)
def test_others_are_refused_in_one_line_without_the_password(address: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=r"q: study\.storage: ") as caught:
        parse_config({"study": {"storage": address}}, where="q")
    assert says in str(caught.value)
    assert "hunter22" not in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(deadline=None, max_examples=60)
@given(PASSWORDS)
def test_a_password_is_in_nothing_that_is_shown_or_written(password: str) -> None:
    from urllib.parse import quote

    address = f"postgresql://tuner:{quote(password, safe='')}@db.example:5432/studies?sslmode=require"
    shown = without_password(check_address(address))
    assert shown == "postgresql://tuner@db.example:5432/studies?sslmode=require"
    config = parse_config({"study": {"storage": address}}, where="q")
    assert config.study.storage == address
    assert config.model_dump(mode="json")["study"]["storage"] == shown
    place = StudyStorage(folder=Path("/nowhere"), run="r", address=address)
    assert place.shown == shown
    assert password not in place.scrubbed(f"FATAL: {password} and {quote(password, safe='')} were refused")


def test_a_password_in_the_query_goes_too() -> None:
    address = "postgresql://h/d?user=u&password=hunter22&sslmode=require"
    assert without_password(address) == "postgresql://h/d?user=u&sslmode=require"
    assert passwords_of(address) == ("hunter22",)


def test_a_run_is_resumed_with_the_password_or_without_it(tmp_path: Path) -> None:
    from quartet_plugin.tuner.run_folder import resume_run

    address = "postgresql://u:hunter22@127.0.0.1:1/d"
    run = begin(tmp_path / "r", study={"storage": address})
    assert "hunter22" not in (tmp_path / "r" / "config.json").read_text()
    assert resume(run.folder.path).config.study.storage == "postgresql://u@127.0.0.1:1/d"
    again = resume_run(run.folder.path, config=run.config, command=run.command)
    assert again.storage.address == address
    other = parse_config({"study": {"storage": "journal"}}, where="q")
    with pytest.raises(
        ConfigError, match=r"study\.storage: journal; the run was started with postgresql://u@"
    ):
        resume_run(run.folder.path, config=other, command=run.command)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["sqlite", "journal"])
def test_every_file_holds_the_same_study(tmp_path: Path, address: str) -> None:
    import optuna

    watching = Watching()
    run = begin(tmp_path / "r", study={**STUDY, "storage": address})
    result = tune(run, FakeMachine(), observer=watching)
    assert outcomes(result) == undisturbed()
    words = f"`optuna-dashboard {run.storage.shown}` shows the study in a browser"
    assert words in watching.messages
    storage: Any = run.storage.shown
    if address == "journal":
        storage = optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(run.storage.shown)
        )
    assert len(optuna.load_study(study_name="r", storage=storage).trials) >= len(result.trials)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["sqlite", "journal"])
def test_a_killed_tuner_goes_on_where_it_was(tmp_path: Path, address: str) -> None:
    machine = FakeMachine(dies_at=4, dies_before_result=False)
    with pytest.raises(Killed):
        tune(begin(tmp_path / "r", study={**STUDY, "storage": address}), machine)
    machine.dies_at = None
    assert outcomes(tune(resume(tmp_path / "r"), machine)) == undisturbed()


def test_a_run_with_a_journal_is_not_begun_again(tmp_path: Path) -> None:
    finished("journal").copy(tmp_path / "r")
    with pytest.raises(ConfigError, match="the run exists"):
        begin(tmp_path / "r", study={**STUDY, "storage": "journal"})


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_a_torn_journal_loses_its_last_record_alone(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    said: list[str] = []
    place = StudyStorage(
        folder=folder, run="r", address="journal", say=said.append, sleep=lambda seconds: None
    )
    trials = data.draw(st.lists(st.dictionaries(st.text(max_size=5), st.integers(), max_size=3), max_size=6))
    lines = [json.dumps(record).encode() + b"\n" for record in [*trials, {"op": 1, "name": "whole"}]]
    whole = b"".join(lines[:-1])
    torn = lines[-1][: data.draw(st.integers(1, len(lines[-1]) - 1))]
    assert place.file is not None
    place.file.write_bytes(whole + torn)
    with pytest.raises(StorageError, match="is damaged; `quartet tune --resume` truncates the file there"):
        place.check()
    place.mend()
    assert place.file.read_bytes() == whole
    assert (folder / "study.journal.torn-1").read_bytes() == whole + torn
    assert f"removed {len(torn)} bytes" in said[0]
    place.mend()
    place.check()
    assert len(said) == 1


def test_a_record_that_is_just_being_written_is_no_damage(tmp_path: Path) -> None:
    def append(seconds: float) -> None:
        assert place.file is not None
        place.file.write_bytes(place.file.read_bytes() + b": 2}\n")

    place = StudyStorage(folder=tmp_path, run="r", address="journal", sleep=append)
    assert place.file is not None
    place.file.write_bytes(b'{"op": 1}\n{"op"')
    place.check()
    assert place.file.read_bytes() == b'{"op": 1}\n{"op": 2}\n'
    place.file.write_bytes(b'{"op"\n{"op": 1}\n')
    with pytest.raises(StorageError, match="record 1 is damaged"):
        place.check()


@pytest.mark.slow
def test_a_torn_journal_is_mended_and_its_trial_told_again(tmp_path: Path) -> None:
    before = finished("journal").copy(tmp_path / "r")
    machine = before.machine
    file = before.run.folder.path / "study.journal"
    content = file.read_bytes()
    for cut in (len(content) // 3, len(content) // 2, len(content) - 9):
        file.write_bytes(content[:cut])
        watching = Watching()
        num_launched = len(machine.launched)
        assert outcomes(tune(resume(tmp_path / "r"), machine, observer=watching)) == undisturbed()
        assert len(machine.launched) == num_launched  # told from the folders
        assert any("the last record is incomplete" in text for text in watching.messages)


@pytest.mark.slow
def test_damage_inside_a_journal_costs_no_measurement(tmp_path: Path) -> None:
    before = finished("journal").copy(tmp_path / "r")
    machine, reference = before.machine, before.result
    file = before.run.folder.path / "study.journal"
    lines = file.read_bytes().splitlines(keepends=True)
    middle = len(lines) // 2
    damaged = b"".join([*lines[:middle], b"\x00" * 20 + b"\n", *lines[middle + 1 :]])
    file.write_bytes(damaged)
    num_launched, watching = len(machine.launched), Watching()
    assert outcomes(tune(resume(tmp_path / "r"), machine, observer=watching)) == outcomes(reference)
    assert len(machine.launched) == num_launched
    assert any("a record in the middle is damaged" in text for text in watching.messages)
    assert Path(f"{file}.torn-1").read_bytes() == damaged


def test_the_lock_of_a_killed_writer_does_not_stall(tmp_path: Path) -> None:
    import time

    run = finished("journal").copy(tmp_path / "r").run
    lock = run.folder.path / "study.journal.lock"
    lock.symlink_to(run.folder.path / "study.journal")
    began = time.monotonic()
    run.storage.mend()
    assert not lock.is_symlink()
    assert time.monotonic() - began < 25  # Optuna itself waits 30 s


@pytest.mark.parametrize("content", [b"", b"no database at all, but long enough for its header" * 40])
def test_a_damaged_sqlite_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    run = finished().copy(tmp_path / "r").run
    (run.folder.path / "study.sqlite3").write_bytes(content)
    with pytest.raises(StorageError, match=r"study\.sqlite3: (damaged|not a study)") as caught:
        run.storage.check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param("overwritten", marks=pytest.mark.slow),
        *(pytest.param(damage, marks=pytest.mark.nightly) for damage in ("cut", "a page")),
    ],
)
def test_a_damaged_sqlite_file_is_put_aside_and_made_again(tmp_path: Path, damage: str) -> None:
    before, watching = finished().copy(tmp_path / "r"), Watching()
    run, machine, reference = before.run, before.machine, before.result
    file = run.folder.path / "study.sqlite3"
    content = file.read_bytes()
    file.write_bytes(
        {
            "overwritten": b"no database at all, but long enough for its header" * 40,
            "cut": content[: len(content) // 2],
            "a page": content[:4096] + b"\xff" * 4096 + content[8192:],
        }[damage]
    )
    damaged, num_launched = file.read_bytes(), len(machine.launched)
    assert outcomes(tune(resume(tmp_path / "r"), machine, observer=watching)) == outcomes(reference)
    assert len(machine.launched) == num_launched
    assert (run.folder.path / "study.sqlite3.damaged-1").read_bytes() == damaged
    assert any("study.sqlite3 is damaged (" in text for text in watching.messages)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["sqlite", "journal"])
def test_damage_is_refused_where_the_trials_would_be_lost(tmp_path: Path, address: str) -> None:
    """Workers propose by what is under way, so that a second time other plans would be proposed.

    An earlier version's events do not hold the trials' records.
    """
    before = finished(address).copy(tmp_path / "r")
    run, machine = before.run, before.machine
    file = run.storage.file
    assert file is not None
    content = file.read_bytes()
    middle = len(content) // 2
    damaged = content[:middle] + b"\xff" * 4096 + content[middle + 4096 :]
    file.write_bytes(damaged)
    lines = [json.loads(line) for line in run.folder.events_file.read_text().splitlines()]
    lines = [{name: line[name] for name in line.keys() - {"params", "record"}} for line in lines]
    lines.append({"time": 0.0, "kind": "taken", "trial": 1})
    run.folder.events_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(StorageError, match="plans again, and its log is incomplete"):
        tune(resume(tmp_path / "r"), machine)
    with pytest.raises(StorageError, match=r"its log is incomplete; (put a copy back|`quartet repair)"):
        with_remake(run.storage, run.folder)[0].check()
    assert file.read_bytes() == damaged


def test_a_link_is_no_study(tmp_path: Path) -> None:
    run = begin(tmp_path / "r", study=STUDY)
    (tmp_path / "elsewhere").write_bytes(b"")
    (run.folder.path / "study.sqlite3").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="a link"):
        tune(resume(tmp_path / "r"), FakeMachine())


# A server that is lost


def server(folder: Path, **options: Any) -> StudyStorage:
    return StudyStorage(folder=folder, run="r", address="postgresql://u:hunter22@127.0.0.1:1/d", **options)


def test_a_lost_server_is_asked_again_with_growing_pauses(tmp_path: Path) -> None:
    slept: list[float] = []
    said: list[str] = []
    place = server(tmp_path, sleep=slept.append, say=said.append)
    lost: list[StorageError | str] = [StorageError("lost")] * 3
    answers = iter([*lost, "back"])
    seen: list[bool] = []

    def action(is_again: bool) -> str:
        seen.append(is_again)
        answer = next(answers)
        if isinstance(answer, StorageError):
            raise answer
        return answer

    assert place.patiently(action) == "back"
    assert seen == [False, True, True, True]
    assert sum(slept) == pytest.approx(1 + 2 + 4)
    assert len(said) == 1


def test_patience_ends(tmp_path: Path) -> None:
    slept: list[float] = []
    place = server(tmp_path, sleep=slept.append)

    def action(is_again: bool) -> None:
        raise StorageError("lost")

    with pytest.raises(StorageError, match="lost"):
        place.patiently(action)
    assert sum(slept) == pytest.approx(600.0)


def test_waiting_for_a_server_ends_when_asked_to(tmp_path: Path) -> None:
    slept: list[float] = []
    place = server(tmp_path, sleep=slept.append, should_stop=lambda: len(slept) >= 3)

    def action(is_again: bool) -> None:
        raise StorageError("lost")

    with pytest.raises(InterruptedByUserError, match="--resume"):
        place.patiently(action)
    assert len(slept) == 3


def test_a_file_that_fails_is_not_waited_for(tmp_path: Path) -> None:
    slept: list[float] = []
    place = StudyStorage(folder=tmp_path, run="r", sleep=slept.append)

    def action(is_again: bool) -> None:
        raise StorageError("full")

    with pytest.raises(StorageError, match="full"):
        place.patiently(action)
    assert slept == []


@pytest.mark.slow
def test_a_storage_that_fails_mid_run_ends_it_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th telling fails, for every n: what was measured is told by the next tuner."""
    tell = TuneStudy._tell
    for fails_at in range(1, 5):
        machine, calls = FakeMachine(), iter(range(fails_at, 0, -1))

        def failing(self: TuneStudy, *args: Any, _calls: Any = calls, **options: Any) -> None:
            if next(_calls) == 1:
                raise StorageError("study.sqlite3: cannot be read or written: disk I/O error")
            tell(self, *args, **options)

        folder = tmp_path / f"r{fails_at}"
        run = begin(folder, study=STUDY)
        monkeypatch.setattr(TuneStudy, "_tell", failing)
        with pytest.raises(StorageError, match="disk I/O"):
            tune(run, machine)
        monkeypatch.setattr(TuneStudy, "_tell", tell)
        num_launched = len(machine.launched)
        result = tune(resume(folder), machine)
        assert outcomes(result) == undisturbed()
        searched = [name for name, _ in machine.launched if "round" not in name]
        assert len(searched) == len(set(searched)) >= num_launched


def test_a_study_with_other_choices_is_refused_in_a_line(tmp_path: Path) -> None:
    """Optuna would end with an error of its own at the next trial that draws the parameter."""
    before = finished().copy(tmp_path / "r")
    run, machine = before.run, before.machine
    space = build_space(machine.job, nodes=machine.cluster, search=run.config.search, run="r", seed=0)
    (shape,) = space.layouts
    same = TuneStudy.open(run.storage, space=space, seed=0)
    assert same is not None
    same.close()
    fewer = replace(space, layouts={shape: space.layouts[shape][:-8]}, _groups={})
    with pytest.raises(StorageError, match="layout had other choices; resume with the release that began"):
        TuneStudy.open(run.storage, space=fewer, seed=0)


@pytest.mark.parametrize("name", ["a%20b", "x?y", "exp{1}", "Grün #1"])
def test_a_study_is_kept_under_its_folders_own_name(tmp_path: Path, name: str) -> None:
    """A name may hold what has a meaning in an address, and in Optuna's templates."""
    folder = tmp_path / name
    folder.mkdir()
    storage = StudyStorage(folder=folder, run="r")
    storage.connect()
    assert [path.name for path in folder.iterdir()] == ["study.sqlite3"]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_study_whose_tuner_was_killed_in_a_transaction_is_a_study(tmp_path: Path) -> None:
    """What it left is taken back by the next tuner, not by a command that only reads."""
    storage = StudyStorage(folder=tmp_path, run="r")
    storage.connect()
    killed = (
        "import os, sqlite3, sys; file = sqlite3.connect(sys.argv[1]); "
        "file.execute('PRAGMA cache_size = 1'); file.execute('CREATE TABLE more (x)'); "
        "file.executemany('INSERT INTO more VALUES (?)', [('x' * 4000,)] * 100); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", killed, str(tmp_path / "study.sqlite3")], check=False)
    assert (tmp_path / "study.sqlite3-journal").exists()
    storage.check()


@pytest.mark.parametrize(("address", "has_tables"), [("sqlite", True), ("journal", False)])
def test_libraries_are_those_of_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, has_tables: bool
) -> None:
    imported: set[str] = set()
    import_ = builtins.__import__

    def recorded(name: str, *arguments: Any, **options: Any) -> Any:
        imported.add(name)
        return import_(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", recorded)
    StudyStorage(folder=tmp_path, run="r", address=address).import_libraries()
    assert "optuna.storages" in imported
    assert ("alembic.command" in imported) == has_tables
