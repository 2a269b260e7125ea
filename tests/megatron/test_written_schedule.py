"""A SCHEDULE.json written by hand on real Megatron and text: trained, saved, resumed, tried by a search."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.model.plan import read_plan
from quartet_plugin.model.receipt import read_receipt
from tests.megatron.entry_launch import MEGATRON_FLAGS
from tests.megatron.support import Step, dataset, read_steps
from tests.short_rounds import short_rounds as short_rounds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("short_rounds")]

SCRIPT = Path(__file__).with_name("recording_pretrain.py")
NUM_STEPS, INTERVAL = 9, 3
FLAGS = (
    *(word for word in MEGATRON_FLAGS if word != "--mock-data"),
    *("--vocab-size", "300", "--null-tokenizer-eod-id", "256", "--split", "100,0,0"),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--eval-iters", "0"),
    *("--train-iters", str(NUM_STEPS)),
)
PIPELINE = ("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "Ett|tt|t|tL")
# Two microbatches go down the V and back before the next two begin; weight gradients fill the end.
ORDERS = (
    "0F0 0F1 3F0 3B0 3F1 3I1 0F2 0I0 0F3 0B1 3W1 3F2 3I2 3F3 3B3 0W0 0B2 3W2 0I3 0W3",
    "1F0 2F0 1F1 2F1 2B0 1I0 2I1 1B1 1F2 2F2 1F3 2F3 1W0 2W1 2B2 1B2 2I3 1I3 2W3 1W3",
)
SCHEDULE = {
    "schema_version": 1,
    "num_devices": 2,
    "num_microbatches": 4,
    "placement": [0, 1, 1, 0],
    "layers_per_stage": [2, 3, 1, 2],
    "orders": [shlex.split(row) for row in ORDERS],
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def train(folder: Path, *flags: str, options: tuple[str, ...] = ()) -> list[Step]:
    """The steps of the command's last run under `quartet train`, from a rank that has the loss."""
    steps = folder / "steps"
    words = (*FLAGS, "--data-path", str(dataset(folder.parent)), *PIPELINE, *flags)
    command = ["torchrun", "--nproc-per-node", "2", str(SCRIPT), str(steps), *words]
    assert main(["train", *options, "--device", "cpu", "--", *command]) == 0
    return next(rank for rank in read_steps(steps).values() if rank[0].loss is not None)


def values(steps: list[Step]) -> list[float]:
    return [value for step in steps for value in (step.loss, step.grad_norm) if value is not None]


@pytest.mark.nightly
def test_a_schedule_by_hand_trains_as_stock_saves_and_resumes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(SCHEDULE))

    def saved_in(name: str) -> tuple[str, ...]:
        return ("--save", str(tmp_path / name), "--save-interval", str(INTERVAL))

    def loaded_from(name: str, step: int) -> tuple[str, ...]:
        where = ("--load", str(tmp_path / name), "--ckpt-step", str(step))
        return (*where, "--exit-on-missing-checkpoint")

    # Random weights depend on the stages, so both go on from one checkpoint.
    stock = train(tmp_path / "stock", *saved_in("A"))
    capfd.readouterr()
    options = ("--schedule", str(path))
    trained = train(tmp_path / "first", *loaded_from("A", INTERVAL), *saved_in("B"), options=options)
    shown = capfd.readouterr().err
    assert "no parity receipt for this command" in shown
    assert "mine.plan.json: trains as stock does" in shown
    assert len(trained) == NUM_STEPS - INTERVAL
    assert values(trained) == pytest.approx(values(stock[INTERVAL:]), rel=1e-6)
    plan = read_plan(tmp_path / "mine.plan.json")
    assert plan.split.transformer_layers_per_stage == (1, 3, 1, 1)
    assert plan.schedule.label == "searched"
    assert read_receipt(tmp_path / "mine.plan.parity.json").verdict == "passed"

    resumed = train(tmp_path / "second", *loaded_from("B", 2 * INTERVAL), options=options)
    assert "receipt" not in capfd.readouterr().err
    assert len(resumed) == NUM_STEPS - 2 * INTERVAL
    assert values(resumed) == pytest.approx(values(trained[INTERVAL:]), rel=1e-6)


def test_a_search_measures_a_schedule_by_hand_behind_the_gate(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.json").write_text(json.dumps(SCHEDULE))
    Path("q.yaml").write_text(
        "run: hand\n"
        "search: {pipeline_parallel: 2, micro_batch_size: 2, mapping: stock, schedule: mine.json}\n"
        "trial: {warmup: 1, measure: 3, deadline_s: 240}\n"
        "study: {trials: 1, top_k: 1, rounds: 3}\n"
        "device: cpu\n"
    )
    words = (*FLAGS, "--data-path", str(dataset(tmp_path)))
    command = ["torchrun", "--nproc-per-node", "2", str(SCRIPT), str(tmp_path / "steps"), *words]
    pipeline = ("--pipeline-model-parallel-size", "2")
    assert main(["tune", "--config", "q.yaml", "--", *command, *pipeline]) == 0
    assert " passed: losses and gradient norms equal" in capfd.readouterr().out
    run = tmp_path / "runs" / "hand"
    attempt = run / "trials" / "000001" / "attempt-1"
    plan = read_plan(attempt / "plan.json")
    assert plan.split.transformer_layers_per_stage == (1, 3, 1, 1)
    assert json.loads((attempt / "result.json").read_text())["outcome"] in ("OK", "UNSTABLE")
    receipt = read_receipt(run / "parity" / f"plan-{plan.key[:12]}" / "plan.parity.json")
    assert max(float(step.loss_deviation) for step in receipt.steps) <= 1e-6
    assert json.loads((run / "schedules" / "mine.json").read_text()) == SCHEDULE
