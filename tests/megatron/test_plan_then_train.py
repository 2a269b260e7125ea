"""`quartet plan` of a JOB.yaml, then `quartet check` and `quartet train` with its plan, on real text."""

import os
import sys
from pathlib import Path

import pytest
import yaml

from quartet_plugin.cli.main import main
from quartet_plugin.model.plan import Plan, read_plan
from quartet_plugin.model.receipt import read_receipt
from tests.megatron.support import MODEL_FLAGS, TRAINING_FLAGS, dataset, read_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).with_name("recording_pretrain.py")
NUM_STEPS = 5
# The device that stands for a core, and hosts that are not where the job trains: as of another machine.
CORE = {"peak_flops": {"fp32": 5e10}, "memory_bytes": 8 * 10**9, "memory_bandwidth_bytes_per_s": 1e10}
CLUSTER = {
    "schema_version": 1,
    "devices": {"a core": CORE},
    "nodes": [{"name": "elsewhere", "devices": ["a core"] * 2}],
    "links": {"scale_up": {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-5}},
}
# The tokenizer has an entry more; a planner pads by 256 for two ranks, the command by 128.
MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "vocab_size": 300,
    "precision": "fp32",
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


def planned(folder: Path, schedule: str) -> Plan:
    """The best plan of the job with a schedule, in plan.json."""
    job = {
        "model": MODEL,
        "cluster": CLUSTER,
        "batch": {"global_batch_size": 8},
        "search": {"pipeline_parallel": 2, "micro_batch_size": 1, "recompute": "none", "schedule": schedule},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    assert main(["plan", "job.yaml", "-o", "plan.json"]) == 0
    return read_plan(folder / "plan.json")


@pytest.mark.parametrize("schedule", [pytest.param("zb-v", marks=pytest.mark.nightly), "searched"])
def test_a_planned_schedule_trains_as_stock_does(tmp_path: Path, schedule: str) -> None:
    plan = planned(tmp_path, schedule)
    assert plan.schedule.custom is not None
    assert schedule in ("searched", plan.schedule.custom.named)
    data = dataset(tmp_path)
    arguments = [
        *MODEL_FLAGS, "--vocab-size", "300", *TRAINING_FLAGS,
        "--data-path", str(data), "--train-iters", str(NUM_STEPS),
    ]  # fmt: skip
    command = ["torchrun", "--nproc-per-node", "2", str(SCRIPT), str(tmp_path / "steps"), *arguments]
    assert main(["check", "--device", "cpu", "--steps", str(NUM_STEPS), "plan.json", "--", *command]) == 0
    receipt = read_receipt(tmp_path / "plan.parity.json")
    assert receipt.verdict == "passed"
    assert max(float(step.loss_deviation) for step in receipt.steps) <= 1e-6
    assert main(["train", "--device", "cpu", "--plan", "plan.json", "--", *command]) == 0
    losses = [rank for rank in read_steps(tmp_path / "steps").values() if rank[0].loss is not None]
    assert len(losses[0]) == NUM_STEPS
