"""Real training of a tiny GPT through the wheel of Megatron-Bridge, with its Megatron-Core, on a CPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.model.plan import write_plan
from quartet_plugin.model.schema import parse
from quartet_plugin.model.training_job import parse_training_job
from quartet_plugin.protocol.rank_files import RankReport
from quartet_plugin.trial.as_planned import difference_from
from tests.megatron.entry_launch import SHAPE, Launch, launch, make_plan, write_trial
from tests.megatron.support import REPOSITORY

BRIDGE = REPOSITORY / ".venv" / "releases" / "megatron-bridge"
ENTRY = ("-m", "quartet_plugin.bridge")
RELEASE = "0.16.1"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's script in a folder of its own, with the Bridge before the installed Megatron."""
    for name in ("pretrain_tiny.py", "stubs.py"):
        shutil.copy(Path(__file__).with_name(name), tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{BRIDGE}{os.pathsep}{REPOSITORY}")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    return tmp_path / "pretrain_tiny.py"


def trial_of(script: Path, name: str, *flags: str, **trial: Any) -> Launch:
    """A trial of three iterations on two processes."""
    folder = script.parent / name
    words = ["--quartet-trial", str(write_trial(folder, **trial)), *flags]
    done = launch(2, words, script=script, folder=folder, entry=ENTRY, timeout_s=500)
    assert done.code == 0, done.output[-4000:]
    return done


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trials_of_the_bridge_run_as_planned(script: Path) -> None:
    baseline = trial_of(script, "baseline")
    job = parse_training_job(baseline.ranks[0]["job"])
    assert (job.framework, job.framework_version, job.shape) == ("megatron-core", RELEASE, SHAPE)
    assert (job.layout.data_parallel, job.global_batch_size, job.precision) == (2, 8, "fp32")
    assert job.features == ()
    assert job.no_custom_schedules is not None
    assert set(job.neutralised) == {"checkpoint.save", "train.exit_interval"}
    plan = make_plan(split=(2, 4), pipeline=2, micro_batch=1, framework_version=RELEASE)
    path = script.parent / "plan.json"
    write_plan(plan, path=path)
    planned = trial_of(script, "planned", "--quartet-plan", str(path), plan=plan)
    assert any("pipeline_model_parallel_layout left out -> Ett|ttttL" in line for line in planned.told)
    reports = [parse(RankReport, content, where="rank") for content in planned.ranks.values()]
    assert difference_from(plan, reports) is None
    # Weights are drawn by pipeline rank, so that the losses are near, and no more.
    assert planned.losses() == pytest.approx(baseline.losses(), rel=0.01)
    assert len(set(planned.losses())) == 3
    assert not (script.parent / "checkpoints").exists()


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_the_bridge_is_tuned_and_trained_with_the_winner(script: Path) -> None:
    (script.parent / "q.yaml").write_text(
        "run: tuned\nsearch: {pipeline_parallel: [1, 2], micro_batch_size: [1, 2]}\n"
        "trial: {warmup: 1, measure: 3, deadline_s: 500}\nstudy: {trials: 3, top_k: 1, rounds: 3}\n"
        "device: cpu\n"
    )
    quartet = str(Path(sys.executable).with_name("quartet"))
    start = ("torchrun", "--nproc-per-node", "2", script.name)
    output = _run(
        quartet, "tune", "--config", "q.yaml", "--run-dir", "runs", "--", *start, folder=script.parent
    )
    run = script.parent / "runs" / "tuned"
    results = list(run.glob("trials/*/attempt-*/plan.json"))
    assert len(results) >= 3, output[-4000:]
    best = run / "best" / "plan.json"
    plan = best if best.exists() else results[-1]
    words = ("train", "--device", "cpu", "--plan", str(plan), "--", *start)
    assert "iteration       20/      20" in _run(quartet, *words, folder=script.parent)


def _run(*words: str, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=2300, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr
