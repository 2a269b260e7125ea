"""Whole studies on a real Slurm: inside of an allocation that is requeued, and with jobs of their own.

Most have the stand-in for a training; one has real Megatron, on two nodes, and trains with its winner.
"""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.tuning import environment, living, prepare, wait_until
from tests.launchers.slurm_cluster import SlurmCluster
from tests.megatron.entry_launch import GLOBAL_BATCH_SIZE, MEGATRON_FLAGS, SCRIPT
from tests.short_rounds import SHORT_ENTRY

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("outside_of_jobs")]

ROOT = Path(__file__).parents[2]
CONFIG = """\
run: fake
search: {pipeline_parallel: 2, virtual_stages: 1, schedule: 1f1b}
trial: {warmup: 1, measure: 3, deadline_s: 60}
study: {trials: 3, top_k: 1, rounds: 3, control: 0}
device: cpu
"""
MEGATRON_CONFIG = """\
run: real
device: cpu
launcher: slurm
trial: {nodes: 2, warmup: 1, measure: 3}
study: {trials: 2, top_k: 1, rounds: 3, control: 0}
search: {schedule: stock}
"""


SMALL_CONFIG = """\
run: small
device: cpu
launcher: slurm
nodes: 4
confirm: none
trial: {nodes: 2, warmup: 1, measure: 3}
study: {trials: 2, top_k: 1, rounds: 3, control: 0}
search: {schedule: stock}
"""


DEEP_CONFIG = """\
run: deep
device: cpu
launcher: slurm
nodes: 4
trial: {nodes: 2, warmup: 1, measure: 3}
study: {trials: 1, top_k: 1, rounds: 3, control: 0}
search: {schedule: stock, pipeline_parallel: 2, micro_batch_size: 4, split: even}
"""


def tuner_words(folder: Path, *options: str, fake: Sequence[str] = ()) -> list[str]:
    """The tuner with two ranks of the stand-in, one on each of two nodes."""
    words, command = prepare(folder, config=CONFIG)
    per_node = [*command[:2], "1", *command[3:]]
    return [sys.executable, "-c", SHORT_ENTRY, *words, *options, "--", *per_node, *fake]


def submit(cluster: SlurmCluster, folder: Path, words: Sequence[str], *options: str) -> str:
    """Queue a job that runs the words on its first node; its id."""
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\n{shlex.join(words)}\n")
    return cluster.run(
        "sbatch",
        "--parsable",
        "--nodes=4",
        f"--output={folder / 'out.txt'}",
        "--open-mode=append",
        *options,
        str(script),
        more=environment(),
    )


def await_end(cluster: SlurmCluster, job: str, folder: Path, *, limit_s: float = 240.0) -> str:
    """What the job has printed, when it has ended well."""

    def state() -> str:
        return cluster.run("squeue", "-h", "--states=all", "-o", "%T", "-j", job)

    try:
        wait_until(
            lambda: state() not in ("PENDING", "RUNNING", "COMPLETING"),
            what="the job's end",
            timeout_s=limit_s,
        )
    except AssertionError:
        # The next test needs its nodes.
        cluster.run("scancel", job)
        raise
    printed = (folder / "out.txt").read_text()
    assert state() == "COMPLETED", printed
    return printed


def verdicts(run: Path) -> list[str]:
    import optuna

    study = optuna.load_study(study_name=run.name, storage=f"sqlite:///{run / 'study.sqlite3'}")
    return [trial.user_attrs["told"]["verdict"] for trial in study.trials if trial.state.is_finished()]


def check_nothing_is_left(cluster: SlurmCluster, folder: Path) -> None:
    names = cluster.run("squeue", "-h", "-o", "%j").split()
    assert not [name for name in names if name.startswith("quartet")]
    wait_until(lambda: not living(folder), what="the end of every process", timeout_s=120.0)


@pytest.mark.slow
def test_the_job_script_queues_itself_again_and_goes_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    """As Slurm's signal before the time limit, or of a preemption, makes it do."""
    words = tuner_words(tmp_path, fake=["--step-s", "0.3"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "quartet").write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{SHORT_ENTRY}" "$@"\n')
    (tmp_path / "bin" / "quartet").chmod(0o755)
    own = [
        f"PATH={shlex.quote(str(tmp_path / 'bin'))}:$PATH",
        "run=fake",
        f"options=({shlex.join(words[4 : words.index('--')])} --trial-nodes 2 --workers 2)",
        f"command=({shlex.join(words[words.index('--') + 1 :])})",
    ]
    text = (ROOT / "launch" / "slurm" / "tune.sbatch").read_text()
    before, _, rest = text.partition("# ---- edit")
    script = tmp_path / "tune.sbatch"
    script.write_text("\n".join([before, *own, rest.partition("# ---- end of what is to be edited ----")[2]]))
    job = cluster.run(
        "sbatch",
        "--parsable",
        f"--chdir={tmp_path}",
        f"--output={tmp_path / 'out.txt'}",
        str(script),
        more=environment(),
    )
    run = tmp_path / "runs" / "fake"
    wait_until(
        lambda: any(run.glob("trials/00000[12]/attempt-1/rank-*.beat.json")), what="a trial", timeout_s=200.0
    )
    cluster.run("scancel", "--signal=TERM", "--batch", job)
    # Slurm lets a requeued job wait for two minutes, as long as a credential lives: a node refuses one that
    # was made in the second in which the job's former one was revoked, and the job's script does not start.
    wait_until(
        lambda: cluster.run("squeue", "-h", "-o", "%T", "-j", job) == "PENDING",
        what="the queue",
        timeout_s=200.0,
    )
    cluster.run("scontrol", "update", f"jobid={job}", "starttime=now+5")
    printed = await_end(cluster, job, tmp_path)
    assert printed.count("trial 0: your command") >= 1
    assert verdicts(run) == ["measured"] * 4
    hosts = {
        tuple(sorted(json.loads(sheet.read_text())["host"] for sheet in sheets))
        for attempt in run.glob("trials/*/attempt-*")
        # Slurm may cut an attempt off between the records of its two ranks.
        if len(sheets := list(attempt.glob("rank-[01].json"))) == 2
    }
    assert hosts <= {("n1", "n2"), ("n3", "n4")}
    assert ("n1", "n2") in hosts
    check_nothing_is_left(cluster, tmp_path)


@pytest.mark.nightly
def test_a_study_of_jobs_whose_tuner_is_killed(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The jobs go on; a tuner with --resume waits for them and measures nothing twice."""
    options = ("--launcher", "slurm-batch", "--trial-nodes", "2", "--workers", "2")
    words = tuner_words(tmp_path, *options, fake=["--step-s", "0.3"])
    run = tmp_path / "runs" / "fake"
    with (tmp_path / "first.txt").open("wb") as log:
        process = subprocess.Popen(words, env=environment(), stdout=log, stderr=log)
    wait_until(
        lambda: any(run.glob("trials/000001/attempt-1/rank-*.beat.json")),
        what=f"a trial: {(tmp_path / 'first.txt').read_text()}",
        timeout_s=200.0,
    )
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = subprocess.run(
        tuner_words(tmp_path, *options, "--resume", fake=["--step-s", "0.3"]),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert verdicts(run) == ["measured"] * 4
    check_nothing_is_left(cluster, tmp_path)


@pytest.mark.slow
def test_ctrl_c_ends_the_jobs(cluster: SlurmCluster, tmp_path: Path) -> None:
    words = tuner_words(tmp_path, "--launcher", "slurm-batch", "--trial-nodes", "2", fake=["--step-s", "3"])
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = tmp_path / "runs" / "fake"
    wait_until(
        lambda: any(run.glob("trials/000000/attempt-1/rank-*.beat.json")), what="a trial", timeout_s=200.0
    )
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    check_nothing_is_left(cluster, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(1100)
def test_megatron_is_tuned_and_trained_on_two_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "q.yaml").write_text(MEGATRON_CONFIG)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--nproc-per-node", "1", str(SCRIPT), *MEGATRON_FLAGS]
    options = ["--config", str(tmp_path / "q.yaml"), "--run-dir", str(tmp_path / "runs"), "--workers", "2"]
    words = [sys.executable, "-c", SHORT_ENTRY, "tune", *options, "--", *command]
    job = submit(cluster, tmp_path, words)
    printed = await_end(cluster, job, tmp_path, limit_s=800.0)
    run = tmp_path / "runs" / "real"
    assert len(verdicts(run)) == 3, printed
    plan = next(run.glob("trials/000001/attempt-1/plan.json"))
    train = ["train", "--launcher", "slurm", "--device", "cpu", "--plan", str(plan), "--", *command]
    began = time.monotonic()
    (tmp_path / "out.txt").unlink()
    job = submit(cluster, tmp_path, [sys.executable, "-c", SHORT_ENTRY, *train])
    trained = await_end(cluster, job, tmp_path)
    assert "iteration       20/      20" in trained, (trained, time.monotonic() - began)
    check_nothing_is_left(cluster, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_megatron_is_tuned_on_two_nodes_for_four(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Trials have half of the replicas and of the batch."""
    (tmp_path / "q.yaml").write_text(SMALL_CONFIG)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    # Microbatches of one sequence are slow: there is a plan that wins.
    slow = ["--micro-batch-size", "1"]
    command = [torchrun, "--nproc-per-node", "1", str(SCRIPT), *MEGATRON_FLAGS, *slow]
    options = ["--config", str(tmp_path / "q.yaml"), "--run-dir", str(tmp_path / "runs")]
    job = submit(cluster, tmp_path, [sys.executable, "-c", SHORT_ENTRY, "tune", *options, "--", *command])
    printed = await_end(cluster, job, tmp_path, limit_s=800.0)
    run = tmp_path / "runs" / "small"
    assert set(verdicts(run)) == {"measured"}, printed
    assert "a trial has 2 of 4 nodes, and as much of the replicas" in printed
    reported = json.loads(next(run.glob("trials/000000/attempt-1/rank-0.json")).read_text())
    assert reported["job"]["global_batch_size"] == GLOBAL_BATCH_SIZE // 2
    check_nothing_is_left(cluster, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_pipeline_of_four_nodes_is_tuned_on_two_and_compared_on_four(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """Trials have two of four stages; the winner has all, and runs once beside the command at full size."""
    (tmp_path / "q.yaml").write_text(DEEP_CONFIG)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    # Microbatches of one sequence are slow: there is a plan that wins.
    deep = shlex.split("--micro-batch-size 1 --num-layers 8 --pipeline-model-parallel-size 4")
    command = [torchrun, "--nproc-per-node", "1", str(SCRIPT), *MEGATRON_FLAGS, *deep]
    options = ["--config", str(tmp_path / "q.yaml"), "--run-dir", str(tmp_path / "runs")]
    job = submit(cluster, tmp_path, [sys.executable, "-c", SHORT_ENTRY, "tune", *options, "--", *command])
    printed = await_end(cluster, job, tmp_path, limit_s=800.0)
    run = tmp_path / "runs" / "deep"
    assert set(verdicts(run)) == {"measured"}, printed
    reported = json.loads(next(run.glob("trials/000000/attempt-1/rank-0.json")).read_text())["job"]
    assert (reported["stage_divisor"], reported["shape"]["num_layers"]) == (2, 4)
    assert reported["layout"]["pipeline_parallel"] == 2
    assert "a replica is larger than a trial" in printed
    assert "full size: 4 nodes" in printed, printed
    plan = json.loads((run / "best" / "full-size" / "plan.json").read_text())
    assert (plan["shape"]["num_layers"], plan["layout"]["pipeline_parallel"]) == (8, 4)
    said = json.loads((run / "best" / "full-size" / "prediction.json").read_text())
    assert said["confirmation"]["speedup"] > 1.0, said
    check_nothing_is_left(cluster, tmp_path)
