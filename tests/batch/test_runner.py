"""Batches in this process: which tuners are started with which words, and what is kept of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.batch.job_file import JobFile, read_job_file, write_job_file
from quartet_plugin.batch.results import read_batch_state
from quartet_plugin.errors import ConfigError, StorageError
from quartet_plugin.model.batch import BatchPaths, BatchResults
from quartet_plugin.trial.lease import Lease, LeaseLostError
from tests.batch.support import Watcher, batch_of, log_of, runner_of
from tests.cli.tuning import living


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """The lines of the tiny tuners."""
    monkeypatch.setenv("TINY_LOG", str(tmp_path / "log"))
    return lambda: log_of(tmp_path / "log")


def states(results: BatchResults) -> dict[str, str]:
    return {job.name: job.state for job in results.jobs}


def test_a_failed_job_stops_no_other(tmp_path: Path, log: Callable[[], list[list[str]]]) -> None:
    batch = batch_of(
        tmp_path, {"name": "a"}, {"name": "bad", "words": ["--code", "5"], "priority": 1}, {"name": "c"}
    )
    watcher = Watcher()
    results = runner_of(batch, tmp_path, observer=watcher).run()
    assert states(results) == {"a": "done", "bad": "failed", "c": "done"}
    assert [line[1] for line in log() if line[0] == "start"] == ["bad", "a", "c"]
    first, bad, third = results.jobs
    assert (bad.exit_code, bad.reason) == (5, "the job's own fault")
    assert first.speedup is not None
    assert (first.num_trials, first.plan) == (6, str(tmp_path / batch.name / "runs/a/best/plan.json"))
    assert (first.started_from, third.started_from) == (None, "a")
    assert results.state == "finished"
    assert "bad: failed (exit code 5): the job's own fault" in watcher.messages
    assert any(text.startswith("a: done: 1.23x (1.20x to 1.23x)") for text in watcher.messages)
    assert living(tmp_path) == []


def test_the_words_of_related_jobs(tmp_path: Path, log: Callable[[], list[list[str]]]) -> None:
    batch = batch_of(
        tmp_path, {"name": "b", "like": "a"}, {"name": "a", "trials": 4}, share="off", limits={"trials": 3}
    )
    runner_of(batch, tmp_path).run()
    starts = {line[1]: line[3:] for line in log() if line[0] == "start"}
    assert list(starts) == ["a", "b"]
    assert "--trials=3" in starts["a"]
    assert not any(word.startswith("--from") for word in starts["a"])
    assert "--from=a" in starts["b"]


def test_at_most_so_many_jobs_run_at_once(tmp_path: Path, log: Callable[[], list[list[str]]]) -> None:
    hold = tmp_path / "hold"
    jobs = [{"name": name, "words": ["--hold", str(hold)]} for name in "abc"]
    most = 0

    def each(results: BatchResults) -> None:
        nonlocal most
        running = sum(job.state == "running" for job in results.jobs)
        most = max(most, running)
        if running == 2:
            hold.touch()

    batch = batch_of(tmp_path, *jobs, limits={"jobs_at_once": 2})
    results = runner_of(batch, tmp_path, observer=Watcher(each)).run()
    assert most == 2
    assert set(states(results).values()) == {"done"}
    assert [line for line in log() if line[0] == "doubled"] == []


def test_a_tuner_that_signals_end_is_started_again_a_few_times(
    tmp_path: Path, log: Callable[[], list[list[str]]]
) -> None:
    batch = batch_of(tmp_path, {"name": "a", "words": ["--kill"]})
    results = runner_of(batch, tmp_path).run()
    starts = [line for line in log() if line[0] == "start"]
    assert len(starts) == 4
    assert ["--resume" in line for line in starts] == [False, True, True, True]
    assert states(results) == {"a": "failed"}
    assert results.jobs[0].reason == "its tuner was killed by signal 9, 4 times"


def test_a_batch_that_is_stopped_ends_its_tuners_and_goes_on_later(
    tmp_path: Path, log: Callable[[], list[list[str]]]
) -> None:
    hold = tmp_path / "hold"
    batch = batch_of(tmp_path, {"name": "a", "words": ["--hold", str(hold)]}, {"name": "b"})
    results = runner_of(batch, tmp_path, should_stop=lambda: bool(log())).run()
    assert states(results) == {"a": "stopped", "b": "waiting"}
    assert results.state == "stopped"
    assert living(tmp_path) == []
    hold.touch()
    results = runner_of(batch, tmp_path).run()
    assert states(results) == {"a": "done", "b": "done"}
    starts = [line for line in log() if line[0] == "start"]
    assert [(line[1], "--resume" in line) for line in starts] == [("a", False), ("a", True), ("b", False)]


def test_what_is_done_is_not_done_again_and_failed_jobs_only_when_asked(
    tmp_path: Path, log: Callable[[], list[list[str]]]
) -> None:
    batch = batch_of(tmp_path, {"name": "a"}, {"name": "bad", "words": ["--code", "5"]})
    before = runner_of(batch, tmp_path).run()
    assert runner_of(batch, tmp_path).run() == before
    assert len(log()) == 4
    runner_of(batch, tmp_path, retries_failed=True).run()
    assert [line[1] for line in log() if line[0] == "start"] == ["a", "bad", "bad"]


def test_a_job_whose_command_was_changed_is_refused(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, {"name": "a"})
    runner_of(batch, tmp_path).run()
    with pytest.raises(ConfigError, match="jobs: a: the job was started with another command"):
        runner_of(batch_of(tmp_path, {"name": "a", "words": ["--more"]}), tmp_path)


def test_a_time_limit_starts_no_job_any_more(tmp_path: Path, log: Callable[[], list[list[str]]]) -> None:
    batch = replace(batch_of(tmp_path, {"name": "a"}), max_minutes=0.05)
    results = runner_of(batch, tmp_path).run()
    assert states(results) == {"a": "waiting"}
    assert log() == []
    results = runner_of(replace(batch, max_minutes=5.0), tmp_path).run()
    assert states(results) == {"a": "done"}
    assert any(word.startswith("--max-minutes=") for word in log()[0])


def test_whoever_has_lost_the_batch_leaves_its_tuners_to_the_other(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    batch = batch_of(tmp_path, {"name": "a", "words": ["--hold", str(hold)]})
    paths = BatchPaths(tmp_path / batch.name)

    def fence() -> None:
        if (file := read_job_file(paths, "a")) is not None and file.process is not None:
            raise LeaseLostError("another process has the batch")

    with pytest.raises(LeaseLostError):
        runner_of(batch, tmp_path, fence=fence).run()
    assert len(living(tmp_path)) == 1
    hold.touch()
    assert states(runner_of(batch, tmp_path).run()) == {"a": "done"}


def test_a_batch_whose_folder_fails_leaves_no_tuner(tmp_path: Path) -> None:
    """Nobody has taken its lease: nobody would see to them."""
    batch = batch_of(tmp_path, {"name": "a", "words": ["--hold", str(tmp_path / "never")]})
    paths = BatchPaths(tmp_path / batch.name)

    def fence() -> None:
        if (file := read_job_file(paths, "a")) is not None and file.process is not None:
            raise StorageError("lock.json: cannot be written: No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        runner_of(batch, tmp_path, fence=fence).run()
    assert living(tmp_path) == []


def test_a_job_that_the_sessions_minutes_cut_short_goes_on_later(
    tmp_path: Path, log: Callable[[], list[list[str]]]
) -> None:
    cut = batch_of(tmp_path, {"name": "a", "words": ["--out-of-time"]}, limits={"minutes": 5})
    results = runner_of(cut, tmp_path).run()
    assert states(results) == {"a": "stopped"}
    assert results.jobs[0].reason == "the session's minutes were over"
    assert len(log()) == 2
    results = runner_of(replace(cut, max_minutes=None), tmp_path).run()
    assert states(results) == {"a": "done"}
    assert "--resume" in log()[2]


def test_a_job_that_was_cut_short_goes_on_after_the_batch_was_killed(
    tmp_path: Path, log: Callable[[], list[list[str]]]
) -> None:
    """Its tuner has ended, and nobody has noted that."""
    cut = batch_of(tmp_path, {"name": "a", "words": ["--out-of-time"]}, limits={"minutes": 5})
    runner_of(cut, tmp_path).run()
    path = BatchPaths(tmp_path / cut.name).job("a") / "job.json"
    content = json.loads(path.read_text())
    assert content["is_shortened"] is True
    path.write_text(json.dumps({**content, "state": "running", "exit_code": None}))
    results = runner_of(replace(cut, max_minutes=None), tmp_path).run()
    assert states(results) == {"a": "done"}
    assert len(log()) == 4
    assert "--resume" in log()[2]


def test_a_job_whose_tuner_has_ended_meanwhile_is_not_shown_as_running(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, {"name": "a"}, {"name": "b", "priority": 1})
    left = replace(JobFile.of(batch.jobs[0], kind="tune"), state="running", began_at=1.0)
    write_job_file(left, paths=BatchPaths(tmp_path / batch.name))
    shown: list[dict[str, str]] = []
    results = runner_of(batch, tmp_path, observer=Watcher(lambda now: shown.append(states(now)))).run()
    assert shown[:2] == [{"a": "stopped", "b": "waiting"}, {"a": "stopped", "b": "running"}]
    assert states(results) == {"a": "done", "b": "done"}


@pytest.mark.parametrize(
    "elsewhere", [{"host": "another"}, {"boot_id": "another"}, {"pid_namespace": 2**32 + 1}]
)
def test_a_job_whose_run_another_host_holds_is_stopped_and_has_not_failed(
    tmp_path: Path, log: Callable[[], list[list[str]]], elsewhere: dict[str, Any]
) -> None:
    """The tuner of a lost host holds the run some seconds longer than that host held the batch."""
    batch = batch_of(
        tmp_path, {"name": "a", "words": ["--code", "6"]}, {"name": "b", "words": ["--code", "6"]}
    )
    run = BatchPaths(tmp_path / batch.name).runs / "a"
    run.mkdir(parents=True)
    Lease.acquire(run)
    lock = run / "lock.json"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), **elsewhere}))
    results = runner_of(batch, tmp_path).run()
    assert states(results) == {"a": "stopped", "b": "failed"}


def test_scripts_are_read_where_the_batch_was_started(tmp_path: Path) -> None:
    """Two scripts for two frameworks are not related, whatever the folder that a batch goes on from."""
    (tmp_path / "bridge.py").write_text("from megatron.bridge.training.pretrain import pretrain\n")
    (tmp_path / "plain.py").write_text("")
    start = ["torchrun", "--nproc-per-node", "2"]
    batch = batch_of(
        tmp_path,
        {"name": "a", "command": [*start, "plain.py"]},
        {"name": "b", "command": [*start, "bridge.py"]},
        {"name": "c", "command": [*start, "plain.py"]},
    )
    results = runner_of(batch, tmp_path).run()
    assert {job.name: job.started_from for job in results.jobs} == {"a": None, "b": None, "c": "a"}
    batch = replace(batch, name="planned")
    planned = runner_of(batch, tmp_path, is_plan_only=True).run()
    assert "a Megatron-Bridge command" in planned.jobs[1].reason


def test_a_jobs_own_limit_ends_it_for_good(tmp_path: Path) -> None:
    job = {"name": "a", "words": ["--out-of-time"], "max_minutes": 3}
    assert states(runner_of(batch_of(tmp_path, job, limits={"minutes": 5}), tmp_path).run()) == {"a": "done"}


def test_files_hold_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(tmp_path, {"name": "a", "words": ["--api-key", "s3cret-value-1234567890"]})
    runner_of(batch, tmp_path).run()
    for path in (tmp_path / batch.name).rglob("*"):
        if path.is_file() and "runs" not in path.parts:
            assert "s3cret-value" not in path.read_text(), path


def test_a_damaged_state_is_one_line(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, {"name": "a"})
    runner_of(batch, tmp_path).run()
    path = BatchPaths(tmp_path / batch.name).job("a") / "job.json"
    content: dict[str, Any] = json.loads(path.read_text())
    for broken in ({**content, "state": "lost"}, {**content, "mark": "$(id)"}, {**content, "name": "../a"}):
        path.write_text(json.dumps(broken))
        with pytest.raises(ConfigError, match=r"job\.json"):
            read_batch_state(BatchPaths(tmp_path / batch.name))
