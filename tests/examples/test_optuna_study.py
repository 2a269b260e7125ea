"""The Optuna script of the examples on real Megatron and real text."""

import os
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
import yaml

from tests.megatron.support import MODEL_FLAGS, TRAINING_FLAGS, dataset
from tests.megatron.test_plan_then_train import CLUSTER, MODEL

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_two_plans_are_trained_and_measured(tmp_path: Path) -> None:
    search = {"pipeline_parallel": 2, "recompute": "none", "schedule": ["1f1b", "zb-h1"]}
    job = {"model": MODEL, "cluster": CLUSTER, "batch": {"global_batch_size": 8}, "search": search}
    (tmp_path / "JOB.yaml").write_text(yaml.safe_dump(job))
    command = [
        "torchrun", "--nproc-per-node", "2", str(EXAMPLES / "pretrain_gpt.py"),
        *MODEL_FLAGS, "--vocab-size", "300", *TRAINING_FLAGS, "--log-interval", "1",
        "--data-path", str(dataset(tmp_path)), "--train-iters", "3",
    ]  # fmt: skip
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "optuna_study.py"), "JOB.yaml", "2", "--", *command],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr
    study = optuna.load_study(study_name="plans", storage=f"sqlite:///{tmp_path}/plans.sqlite3")
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE"] * 2, run.stderr
    assert run.stdout.split()[0] == str(study.best_value)
    assert len({tuple(sorted(trial.params.items())) for trial in study.trials}) == 2
