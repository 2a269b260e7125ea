"""`kill -9` of a batch, and of its tuners: nothing is lost, nothing is doubled, no process is left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.batch.job_file import JobFile
from quartet_plugin.batch.job_process import end_left_behind, find_tuner, job_processes, start
from quartet_plugin.model.batch import BatchPaths, BatchResults
from quartet_plugin.model.plan import read_plan
from quartet_plugin.model.schema import dump, parse, read_record
from quartet_plugin.trial.lease import Lease
from tests.batch.support import ROOT, TINY, batch_of, log_of, start_batch
from tests.cli.tuning import living, wait_until

ARITHMETIC = (sys.executable, "-m", "tests.batch.arithmetic_quartet")


def starts(folder: Path) -> list[list[str]]:
    return [line for line in log_of(folder / "log") if line[0] == "start"]


def kill(batch: "subprocess.Popen[bytes]") -> None:
    """Kill the batch alone."""
    batch.kill()
    batch.wait()
    assert batch.stdout is not None
    batch.stdout.close()


def finish(batch: "subprocess.Popen[bytes]") -> str:
    """The output of a batch that comes to its end."""
    output, _ = batch.communicate(timeout=280)
    assert batch.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.timeout(600)
def test_killed_twice_and_gone_on_with_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_LOG", str(tmp_path / "log"))
    hold = tmp_path / "hold"
    lines = [f"- {{name: j{index}, command: torchrun x.py --hold {hold}}}" for index in range(5)]
    (tmp_path / "jobs.yaml").write_text("\n".join(["limits: {jobs_at_once: 2}", "jobs:", *lines]))
    first = start_batch(tmp_path, "jobs.yaml")
    wait_until(lambda: len(starts(tmp_path)) == 2, what="two tuners", timeout_s=500.0)
    kill(first)
    assert len(living(tmp_path)) == 2

    second = start_batch(tmp_path, "jobs.yaml", "--resume")
    output_of_second = second.stdout
    assert output_of_second is not None
    wait_until(
        lambda: b"j1: still running" in (output_of_second.readline() or b"j1: still running"),
        what="adoption",
        timeout_s=500.0,
    )
    kill(second)
    _, killed, pid, *_ = starts(tmp_path)[0]
    os.kill(int(pid), signal.SIGKILL)
    hold.touch()

    output = finish(start_batch(tmp_path, "jobs.yaml", "--resume"))
    assert "5 jobs: 5 done" in output
    assert living(tmp_path) == []
    lines_of_log = log_of(tmp_path / "log")
    assert not [line for line in lines_of_log if line[0] == "doubled"]
    assert [line[1] for line in starts(tmp_path)].count(killed) == 2
    assert sorted(line[1] for line in lines_of_log if line[0] == "end") == [f"j{index}" for index in range(5)]
    results = read_record(BatchResults, tmp_path / "batches" / "jobs" / "results.json")
    assert [job.state for job in results.jobs] == ["done"] * 5
    assert not list((tmp_path / "batches").rglob("*.tmp"))


def test_a_tuner_is_known_again_though_the_batch_was_killed_before_it_noted_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_LOG", str(tmp_path / "log"))
    words = ["--hold", str(tmp_path / "never")]
    batch = batch_of(tmp_path, {"name": "a", "words": words})
    paths = BatchPaths(tmp_path / "batch")
    paths.runs.mkdir(parents=True)
    file = replace(JobFile.of(batch.jobs[0], kind="tune"), state="running")
    argv = [*TINY, "tune", f"--run-dir={paths.runs}", "--name=a", "--", *words]
    process = start(argv, cwd=tmp_path, output=tmp_path / "output", mark=file.mark)
    try:
        assert job_processes(file.mark) == {process.identity}
        adopted = find_tuner(file, paths=paths)
        assert adopted is not None
        assert adopted.identity == process.identity
        assert find_tuner(replace(file, mark="0" * 32), paths=paths) is None
        (paths.runs / "a").mkdir(exist_ok=True)
        with Lease.acquire(paths.runs / "a"):
            held = find_tuner(file, paths=paths)
        assert held is not None
        noted = replace(file, process=held.identity)
        assert parse(JobFile, dump(noted), where="job.json") == noted
    finally:
        assert end_left_behind(file.mark) == 1
    assert process.is_over
    assert (adopted.is_over, adopted.exit_code) == (True, None)
    assert find_tuner(file, paths=paths) is None


Q_YAML = """\
search: {pipeline_parallel: 2, virtual_stages: 1, mapping: stock, schedule: 1f1b}
trial: {warmup: 1, measure: 3}
study: {trials: 2, rounds: 3, top_k: 1, storage: journal, starts: none, sampler: random}
device: cpu
"""


def arithmetic_batch(folder: Path, *, num_jobs: int) -> None:
    """A file of jobs on the machine made of arithmetic, whose launches take long enough to be killed in."""
    (folder / "q.yaml").write_text(Q_YAML)
    (folder / "jobs.yaml").write_text(
        "config: q.yaml\n"
        "matrix:\n"
        f"  axes: {{batch: {[32 * (1 + index) for index in range(num_jobs)]}}}\n"
        "  name: b{batch}\n"
        "  command: torchrun --nproc-per-node 2 pretrain.py --batch {batch} --launch-s 0.05\n"
    )


def check_killed(folder: Path, *, num_jobs: int) -> None:
    """Two kills between launches, then the end: a plan or its reason for every job, no launch twice."""
    log = folder / "launches"
    arithmetic_batch(folder, num_jobs=num_jobs)
    environment_of = {"ARITHMETIC_LOG": str(log), "PYTHONPATH": str(ROOT)}
    os.environ.update(environment_of)
    words: tuple[str, ...] = ("jobs.yaml",)
    for num_launches in (5, 9 * num_jobs // 2):
        batch = start_batch(folder, *words, program=ARITHMETIC)
        end = time.monotonic() + 900.0
        while len(log_of(log)) < num_launches:
            assert time.monotonic() < end, f"waited 900 s for {num_launches} launches"
            time.sleep(0.02)
        kill(batch)
        words = ("jobs.yaml", "--resume")
    output, _ = start_batch(folder, *words, program=ARITHMETIC).communicate(timeout=1500)
    assert f"{num_jobs} jobs: {num_jobs} done" in output.decode()
    results = read_record(BatchResults, folder / "batches" / "jobs" / "results.json")
    assert len(results.jobs) == num_jobs
    for job in results.jobs:
        assert (job.state, job.num_trials) == ("done", 2)
        assert (job.plan is None) == (job.speedup is None)
        if job.plan is not None:
            assert read_plan(Path(job.plan)).provenance.run == job.name
    assert sum(job.started_from is not None for job in results.jobs) == num_jobs - 1
    launches = [line[0] for line in log_of(log)]
    assert len(launches) == len(set(launches)), "the tuners went on: none was killed, none is repeated"
    assert living(folder) == []
    assert re.search(r"batch jobs: finished", output.decode())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "num_jobs", [pytest.param(6, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.nightly)]
)
def test_jobs_on_the_machine_of_arithmetic(num_jobs: int, tmp_path: Path) -> None:
    check_killed(tmp_path, num_jobs=num_jobs)
