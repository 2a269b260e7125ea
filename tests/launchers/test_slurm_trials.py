"""Trials on a real Slurm: what its queue, its nodes and its controller do to them, and how each ends.

The ranks are the stand-in of the fault matrix; launcher, queue, nodes and processes are real.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.launchers import slurm, slurm_batch
from quartet_plugin.launchers.command import ENTRY_MODULE, parse_command
from quartet_plugin.launchers.nodes_command import on_nodes
from quartet_plugin.launchers.protocol import NodesHandle, NodesLauncher
from quartet_plugin.launchers.site import Site
from quartet_plugin.trial.processes import marked_processes
from quartet_plugin.trial.recover import recover
from quartet_plugin.trial.request import Outcome, Timeouts, TrialRequest, TrialResult
from quartet_plugin.trial.runner import run_trial
from tests.launchers.slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "tests" / "faults"
SHORT = Timeouts(init_s=40.0, first_step_s=30.0, step_s=30.0, shutdown_s=3.0)
HASTY = Timeouts(init_s=6.0, first_step_s=6.0, step_s=5.0, shutdown_s=3.0)


class BareNodes:
    """Starts the command on the nodes without the adapter; the stand-in writes the adapter's files."""

    def __init__(self, inner: NodesLauncher) -> None:
        self._inner, self.num_nodes, self.engine = inner, inner.num_nodes, inner.engine

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdout: Path) -> NodesHandle:
        """Leave the adapter's module out."""
        words = list(argv)
        place = words.index(ENTRY_MODULE)
        del words[place - 1 : place + 1]
        return self._inner.start(words, env=env, cwd=cwd, stdout=stdout)


@pytest.fixture
def torchrun(tmp_path: Path) -> Path:
    program = tmp_path / "bin" / "torchrun"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAULTS / "torchrun.py"}" "$@"\n')
    program.chmod(0o755)
    return program


@pytest.fixture
def request_of(tmp_path: Path, torchrun: Path) -> Callable[..., TrialRequest]:
    """Two ranks a node on two nodes; each waits for a file after its first iteration."""

    def make(*fake: str, timeouts: Timeouts = SHORT, **options: Any) -> TrialRequest:
        words = [str(torchrun), "--nproc-per-node", "1", str(FAULTS / "fake_trial.py")]
        command = parse_command([*words, "--hold", str(tmp_path / "go"), *fake], environment={})
        return TrialRequest(
            folder=tmp_path / "trials" / "000001",
            command=on_nodes(command, num_nodes=2),
            warmup=1,
            measure=4,
            deadline_s=60.0,
            device="cpu",
            timeouts=timeouts,
            min_free_bytes=0,
            **options,
        )

    return make


@pytest.fixture(autouse=True)
def _nothing_is_left(cluster: SlurmCluster, tmp_path: Path) -> Iterator[None]:
    yield
    for sheet in tmp_path.rglob("trial.json"):
        assert not marked_processes(json.loads(sheet.read_text())["attempt_id"])
    assert not [line for line in cluster.run("squeue", "-h", "-o", "%j").split() if "quartet" in line]


def in_allocation() -> BareNodes:
    return BareNodes(slurm.engine(Site()).launcher(("n1", "n2"), num_nodes=2))


def in_jobs() -> BareNodes:
    return BareNodes(slurm_batch.engine(Site()).launcher((), num_nodes=2))


class Running:
    """A trial that runs in a thread, and what is done to it meanwhile."""

    def __init__(
        self,
        request: TrialRequest,
        launcher: BareNodes,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = request.folder
        self._results: list[TrialResult] = []
        self._thread = threading.Thread(target=self._run, args=(request, launcher, clock))
        self._thread.start()

    def _run(self, request: TrialRequest, launcher: BareNodes, clock: Callable[[], float]) -> None:
        self._results.append(run_trial(request, launcher=launcher, poll_s=0.05, clock=clock))

    def await_ranks(self, number: int = 2, *, attempt: int = 1) -> None:
        """Wait until so many ranks have made their first iteration."""
        end = time.monotonic() + 60
        pattern = f"attempt-{attempt}/rank-*.beat.json"
        while sum(json.loads(p.read_text())["iteration"] >= 1 for p in self.folder.glob(pattern)) < number:
            assert time.monotonic() < end, list(self.folder.rglob("*"))
            time.sleep(0.05)

    @property
    def result(self) -> TrialResult:
        """The result, when the trial has ended."""
        self._thread.join(timeout=120)
        assert self._results, "the trial has not ended, or was never run"
        return self._results[0]


def go(tmp_path: Path) -> None:
    (tmp_path / "go").touch()


@pytest.mark.usefixtures("allocation")
def test_a_trial_spans_two_nodes(tmp_path: Path, request_of: Callable[..., TrialRequest]) -> None:
    go(tmp_path)
    result = run_trial(request_of(), launcher=in_allocation(), poll_s=0.05)
    assert result.outcome is Outcome.OK
    reports = [json.loads((result.folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [report["host"] for report in reports] == ["n1", "n2"]


@pytest.mark.usefixtures("allocation")
def test_a_hang_on_another_node_is_ended_there(
    tmp_path: Path, request_of: Callable[..., TrialRequest]
) -> None:
    go(tmp_path)
    request = request_of("--mode", "hang", "--faulty-rank", "1", timeouts=HASTY, max_attempts=1)
    result = run_trial(request, launcher=in_allocation(), poll_s=0.05)
    assert result.outcome is Outcome.INFRA
    assert result.reason.startswith("hang:")


@pytest.mark.usefixtures("outside_of_jobs")
def test_a_lost_node_is_named_and_no_plan_is_to_blame(
    cluster: SlurmCluster, request_of: Callable[..., TrialRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocation goes on without the node: it was made with --no-kill."""
    cluster.run("salloc", "--no-shell", "--no-kill", "--nodes=4", "--job-name=no-kill", "--quiet")
    job = cluster.run("squeue", "-h", "-o", "%i", "-n", "no-kill")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")
    try:
        running = Running(request_of(max_attempts=1), in_allocation())
        running.await_ranks()
        cluster.kill("n2")
        result = running.result
        assert result.outcome is Outcome.INFRA
        assert "Slurm lost n2" in result.reason
        assert cluster.run("squeue", "-h", "-o", "%T", "-j", job) == "RUNNING"
    finally:
        cluster.run("scancel", job)
        cluster.start_node("n2")
        cluster.await_up()


def first_of_two(running: Running, folder: Path, *words: str, cluster: SlurmCluster) -> dict[str, Any]:
    """The result of the first attempt, which the command of Slurm ends; the second is measured."""
    running.await_ranks()
    cluster.run(*words)
    running.await_ranks(attempt=2)
    go(folder)
    assert running.result.outcome is Outcome.OK
    result: dict[str, Any] = json.loads((running.folder / "attempt-1" / "result.json").read_text())
    return result


@pytest.mark.usefixtures("outside_of_jobs")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        pytest.param(("scancel", "--user=root"), "Slurm has ended the job: CANCELLED", id="cancelled"),
        pytest.param(
            ("srun", "--partition=urgent", "--nodes=4", "--exclusive", "sleep", "3"),
            "Slurm has ended the job: PREEMPTED",
            id="preempted",
        ),
        # Before it preempts with a grace time Slurm sends the steps, not the job's script, a first SIGTERM
        # (slurm.conf(5), GraceTime).
        pytest.param(
            ("scancel", "--signal=TERM", "--user=root"), "the job's processes got a SIGTERM", id="grace time"
        ),
    ],
)
def test_a_job_that_is_ended_by_others_is_queued_again(
    words: tuple[str, ...],
    reason: str,
    cluster: SlurmCluster,
    tmp_path: Path,
    request_of: Callable[..., TrialRequest],
) -> None:
    first = first_of_two(Running(request_of(), in_jobs()), tmp_path, *words, cluster=cluster)
    assert first["outcome"] == "INFRA"
    assert first["reason"].startswith(reason)


@pytest.mark.usefixtures("outside_of_jobs")
def test_a_suspended_job_is_queued_again(
    cluster: SlurmCluster, tmp_path: Path, request_of: Callable[..., TrialRequest]
) -> None:
    running = Running(request_of(timeouts=HASTY), in_jobs())
    running.await_ranks()
    job = cluster.run("squeue", "-h", "-o", "%i", "--user=root")
    first = first_of_two(running, tmp_path, "scontrol", "suspend", job, cluster=cluster)
    assert "Slurm has stopped the job: SUSPENDED" in first["reason"]


@pytest.mark.usefixtures("outside_of_jobs")
def test_a_job_that_waits_is_no_hang(
    cluster: SlurmCluster,
    tmp_path: Path,
    request_of: Callable[..., TrialRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every look at the job that waits takes longer than a start, and a trial, may."""
    poll, waits_s, have_passed = slurm_batch.SlurmJob.poll, list[float](), threading.Event()

    def late_poll(job: slurm_batch.SlurmJob) -> int | None:
        if len(waits_s) == 3:
            have_passed.set()  # what follows on the last late look was done
        elif job.is_pending:
            waits_s.append(100.0)
        return poll(job)

    monkeypatch.setattr(slurm_batch.SlurmJob, "poll", late_poll)
    cluster.run("salloc", "--no-shell", "--nodes=4", "--exclusive", "--job-name=others", "--quiet")
    others = cluster.run("squeue", "-h", "-o", "%i", "-n", "others")
    go(tmp_path)
    request = request_of(max_attempts=1)
    running = Running(request, in_jobs(), clock=lambda: time.monotonic() + sum(waits_s))
    assert have_passed.wait(60)
    assert waits_s[0] > max(request.timeouts.init_s, request.deadline_s)
    assert cluster.run("squeue", "-h", "-o", "%T", "--states=PENDING") == "PENDING"
    cluster.run("scancel", others)
    assert running.result.outcome is Outcome.OK
    assert running.result.wall_s < sum(waits_s)


@pytest.mark.usefixtures("outside_of_jobs")
def test_a_controller_that_restarts_loses_nothing(
    cluster: SlurmCluster, tmp_path: Path, request_of: Callable[..., TrialRequest]
) -> None:
    running = Running(request_of(max_attempts=1), in_jobs())
    running.await_ranks()
    cluster.stop_controller()
    time.sleep(2.0)
    cluster.start_controller()
    go(tmp_path)
    assert running.result.outcome is Outcome.OK


@pytest.mark.usefixtures("outside_of_jobs")
def test_a_job_that_outlived_its_tuner_is_measured_to_its_end(
    tmp_path: Path, request_of: Callable[..., TrialRequest]
) -> None:
    request = request_of(max_attempts=1)
    words = ["-m", "tests.launchers.slurm_tuner", str(tmp_path), *request.command.words]
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=dict(os.environ))
    waiting = Running.__new__(Running)
    waiting.folder = request.folder
    waiting.await_ranks()
    process.send_signal(signal.SIGKILL)
    process.wait()
    go(tmp_path)
    (result,) = recover(tmp_path / "trials")
    assert result.outcome is Outcome.OK
