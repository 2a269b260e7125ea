"""A lost study of a run with workers, or of one that began with another run, is made again from its log."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import StorageError
from quartet_plugin.study.study_log import read_log
from quartet_plugin.tuner.history_rows import read_events
from quartet_plugin.tuner.study_remake import with_remake
from quartet_plugin.tuner.tune_result import TuneResult
from tests.tuner.fakes import FakeMachine, Watching, begin, resume, tune
from tests.tuner.run_folders import WritingMachine, write_run
from tests.tuner.workers.test_parallel_search import OWN, Shop, killed, run_shared, spent

pytestmark = pytest.mark.slow

STUDY = {"trials": 7, "rounds": 3, "top_k": 1}


def cut_in_half(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def overwrite(file: Path) -> None:
    file.write_bytes(b"no database at all, but long enough for its header" * 40)


def damage_the_middle(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    lines[len(lines) // 2] = b"\x00" * 20 + b"\n"
    file.write_bytes(b"".join(lines))


def records(result: TuneResult) -> list[tuple[Any, ...]]:
    return [(trial.number, trial.plan.key, asdict(trial.record)) for trial in result.trials]


@pytest.mark.parametrize(
    ("address", "damage"),
    [
        pytest.param("sqlite", cut_in_half, marks=pytest.mark.nightly),
        ("sqlite", overwrite),
        pytest.param("sqlite", Path.unlink, marks=pytest.mark.nightly),
        ("journal", damage_the_middle),
        ("journal", cut_in_half),
        ("journal", Path.unlink),
    ],
)
def test_a_damaged_study_of_a_run_with_workers_is_made_again(
    address: str, damage: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers, plans, records and repeats are the same, and nothing is launched again."""
    shop = Shop(seed=3, gate=lambda plan: plan.schedule.label != "zb-v")
    reference = run_shared(monkeypatch, tmp_path / "r", shop, search=OWN, study={**STUDY, "storage": address})
    run = resume(tmp_path / "r")
    assert run.storage.file is not None
    damage(run.storage.file)
    num_launched, watching = len(shop.launched), Watching()
    again = run_shared(monkeypatch, tmp_path / "r", shop, is_resumed=True, options={"observer": watching})
    assert records(again) == records(reference)
    assert len(shop.launched) == num_launched
    if damage is not Path.unlink:
        assert any("rebuilding the study from events.jsonl" in text for text in watching.messages)


def test_what_was_under_way_when_the_study_was_lost_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(dies_after=4, seed=2)
    killed(monkeypatch, tmp_path / "r", shop, storage="sqlite")
    shop.holding.clear()
    shop.num_started, shop.dies_after = 0, None
    for worker in shop.workers():
        shop.queue.forget(worker.name)
    for claim in shop.queue.claims():
        (shop.queue.path / "claims" / f"{claim.stem}.json").unlink()
    file = resume(tmp_path / "r").storage.file
    assert file is not None
    overwrite(file)
    result = run_shared(monkeypatch, tmp_path / "r", shop, is_resumed=True)
    assert len(spent(result)) == 8
    assert [trial.number for trial in result.trials] == list(range(len(result.trials)))
    measured = [name for name, key in shop.launched if "round" not in name and key is not None]
    assert len(measured) == len(set(measured)) == 8


@pytest.mark.parametrize("is_the_other_run_gone", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_study_that_began_with_another_run_is_made_again(
    tmp_path: Path, is_the_other_run_gone: bool
) -> None:
    write_run(tmp_path / "other", study={"trials": 6, "rounds": 3})
    machine = FakeMachine()
    run = begin(tmp_path / "r", study=STUDY)
    reference = tune(run, machine, earlier_run=tmp_path / "other")
    assert any(trial.record.source for trial in reference.trials)
    if is_the_other_run_gone:
        shutil.rmtree(tmp_path / "other")
    assert run.storage.file is not None
    cut_in_half(run.storage.file)
    with pytest.raises(StorageError, match=r"renames it and rebuilds the study from events\.jsonl"):
        with_remake(run.storage, run.folder)[0].check()
    num_launched = len(machine.launched)
    again = tune(resume(tmp_path / "r"), machine)
    assert records(again) == records(reference)
    assert len(machine.launched) == num_launched


def test_a_trial_that_the_log_does_not_name_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, watching = Shop(seed=4), Watching()
    run_shared(monkeypatch, tmp_path / "r", shop, study={**STUDY, "storage": "sqlite"})
    run = resume(tmp_path / "r")
    lines = run.folder.events_file.read_text().splitlines()
    lines = [line for line in lines if json.loads(line)["trial"] != 2]
    run.folder.events_file.write_text("".join(f"{line}\n" for line in lines))
    assert run.storage.file is not None
    run.storage.file.unlink()
    again = run_shared(monkeypatch, tmp_path / "r", shop, is_resumed=True, options={"observer": watching})
    assert again.trials[2].record.verdict == "lost"
    assert any("1 trials are skipped" in text for text in watching.messages)
    assert len(spent(again)) == 7


def test_a_trial_that_only_its_folder_names_is_kept(tmp_path: Path) -> None:
    write_run(tmp_path / "other", study={"trials": 3, "rounds": 3})
    machine = WritingMachine()
    run = begin(tmp_path / "r", study=STUDY)
    reference = tune(run, machine, earlier_run=tmp_path / "other")
    last = max(trial.number for trial in reference.trials if trial.is_spent)
    lines = run.folder.events_file.read_text().splitlines()
    lines = [line for line in lines if json.loads(line)["trial"] != last]
    run.folder.events_file.write_text("".join(f"{line}\n" for line in lines))
    assert run.storage.file is not None
    run.storage.file.unlink()
    num_launched = len(machine.launched)
    again = tune(resume(tmp_path / "r"), machine)
    assert again.trials[last].record.value == reference.trials[last].record.value
    assert len(machine.launched) == num_launched


def test_a_study_behind_its_log_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a copy from a backup is, or a journal that `quartet repair` has cut."""
    shop, watching = Shop(seed=5), Watching()
    reference = run_shared(monkeypatch, tmp_path / "r", shop, study={**STUDY, "storage": "journal"})
    file = resume(tmp_path / "r").storage.file
    assert file is not None
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[: 2 * len(lines) // 3]))
    again = run_shared(monkeypatch, tmp_path / "r", shop, is_resumed=True, options={"observer": watching})
    assert records(again) == records(reference)
    assert any("is missing finished trials" in text for text in watching.messages)


def test_the_events_of_a_run_hold_its_study(tmp_path: Path) -> None:
    run = begin(tmp_path / "r", study=STUDY)
    result = tune(run, FakeMachine())
    log = read_log(read_events(run.folder.events_file))
    assert log is not None
    assert {n: trial.record for n, trial in log.trials.items()} == {
        trial.number: trial.record for trial in result.trials if trial.number
    }


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "told", "trial": 1},
        {"kind": "told", "trial": 1, "params": {}, "record": {"verdict": "measured"}},
        {"kind": "told", "trial": 10**9, "params": {}, "record": None},
        {"kind": "proposed", "trial": 1, "params": {"layout": ["pp2"]}},
        {"kind": "proposed", "trial": True, "params": {}},
        {"kind": "from", "run": "other"},
    ],
)
def test_events_that_lack_something_are_no_log(event: dict[str, Any]) -> None:
    assert read_log([{"kind": "begin", "trial": None}]) is not None
    assert read_log([event]) is None
