"""Studies of real trainings on four processes whose tensor partition is free; what their winner trains."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.model.plan import Plan, read_plan
from quartet_plugin.model.receipt import read_receipt, receipt_path
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.report.kept_knobs import kept_lines
from quartet_plugin.tuner.history import read_history
from tests.megatron import support
from tests.short_rounds import short_rounds as short_rounds
from tests.tuner.live_studies import launch_settings as launch_settings
from tests.tuner.live_studies import tune

FULL_SEARCHES = True  # read by `short_searches`
pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("short_rounds", "launch_settings")]

FREE = """\
run: study
search: {scaling: {budget: parameters, tolerance: 0.02}, tensor_partition: auto, virtual_stages: 1}
trial: {warmup: 1, measure: 3, deadline_s: 240}
study: {trials: 4, top_k: 2, rounds: 3, control: 0}
device: cpu
"""
# Two plans: the command's own, and its layers cut as a grid.
TWO_PLANS = """\
run: study
search:
  tensor_parallel: 4
  pipeline_parallel: 1
  micro_batch_size: 1
  mapping: stock
  tensor_partition: [stock, grid]
trial: {warmup: 1, measure: 3, deadline_s: 240}
study: {trials: 2, top_k: 1, rounds: 3, control: 0}
device: cpu
"""
SAVED_AT, NUM_STEPS = 3, 5
CHECKPOINTS = (
    *("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"),
    *("--ckpt-format", "torch_dist", "--save-interval", str(SAVED_AT), "--lr-decay-iters", str(NUM_STEPS)),
)


def command(folder: Path, *flags: str) -> list[str]:
    """The user's command: four processes on real text."""
    length = ("--train-iters", str(NUM_STEPS), "--data-path", str(support.dataset(folder)))
    return [
        *("torchrun", "--nproc-per-node", "4", str(support.PRETRAIN_SCRIPT)),
        *(*support.MODEL_FLAGS, *support.TRAINING_FLAGS, *length, *CHECKPOINTS, *flags),
    ]


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["kind"] == kind]


def shape_flags(shape: ModelShape) -> tuple[str, ...]:
    """The flags of a model that may be another than the command's."""
    sizes = {
        "--num-layers": shape.num_layers,
        "--hidden-size": shape.hidden_size,
        "--ffn-hidden-size": shape.ffn_hidden_size,
        "--num-attention-heads": shape.num_attention_heads,
        "--kv-channels": shape.kv_channels,
    }
    return tuple(word for flag, size in sizes.items() for word in (flag, str(size)))


def choices_of(run: Path) -> set[str]:
    """Every value that a choice of the study has offered."""
    study = optuna.load_study(study_name="study", storage=f"sqlite:///{run / 'study.sqlite3'}")
    return {
        str(choice)
        for trial in study.trials
        for distribution in trial.distributions.values()
        if isinstance(distribution, optuna.distributions.CategoricalDistribution)
        for choice in distribution.choices
    }


@pytest.mark.timeout(1800)
def test_a_winner_of_all_axes_trains_and_stock_resumes_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Shape, split, schedule, mapping and partition are free; stock goes on in one process."""
    words = command(
        tmp_path,
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--sequence-parallel"),
    )
    run = tune(tmp_path, FREE, words)
    assert {"stock", "rings"} <= choices_of(run)
    best = run / "best" / "plan.json"
    assert best.exists(), capfd.readouterr().out[-3000:]
    plan = read_plan(best)
    assert main(["check", str(best), "--device", "cpu", "--", *words]) == 0
    assert read_receipt(receipt_path(best)).verdict == "passed"
    assert_stock_resumes(plan, best, tmp_path, words, capfd)


def assert_stock_resumes(
    plan: Plan, file: Path, folder: Path, words: Sequence[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """`quartet train` saves in its middle; one process of unmodified Megatron makes its last steps again."""
    saving = ("--save", str(folder / "checkpoint"))
    capfd.readouterr()
    assert main(["train", "--plan", str(file), "--device", "cpu", "--", *words, *saving]) == 0
    losses = [float(loss) for loss in re.findall(r"iteration +\d+/.*?lm loss: (\S+)", capfd.readouterr().out)]
    assert len(losses) == NUM_STEPS
    assert losses[-1] < losses[0]
    resumed = support.train(
        folder / "resumed",
        *(*CHECKPOINTS, *shape_flags(plan.shape)),
        *("--load", str(folder / "checkpoint"), "--ckpt-step", str(SAVED_AT)),
        *("--exit-on-missing-checkpoint", "--no-load-rng"),
        num_processes=1,
        data=support.dataset(folder),
        train_iters=NUM_STEPS,
    )
    assert resumed.exit_code == 0, resumed.output[-3000:]
    assert resumed.losses() == pytest.approx(losses[SAVED_AT:], rel=1e-5)


@pytest.mark.timeout(900)
def test_a_grid_is_timed_beside_stock(tmp_path: Path) -> None:
    """The grid passes the gate in its trial; the run ends with the faster, and says why that is stock."""
    run = tune(
        tmp_path, TWO_PLANS, command(tmp_path, "--tensor-model-parallel-size", "4", "--sequence-parallel")
    )
    told = events_of(run, "told")
    assert {event["verdict"] for event in told} == {"measured"}
    (receipt,) = map(read_receipt, (run / "parity").glob("plan-*/plan.parity.json"))
    assert receipt.verdict == "passed"
    attempts = sorted((run / "trials" / "000001").glob("attempt-*/plan.json"))
    plan = read_plan(attempts[-1])
    assert plan.layout.tensor_partition is not None
    assert plan.layout.tensor_partition.label == "grid"
    (end,) = events_of(run, "end")
    assert end["winner"] in (None, 1)
    best = run / "best" / "plan.json"
    assert best.exists() == (end["winner"] == 1)
    if best.exists():
        assert read_plan(best).digest == plan.digest
    history = read_history(run)
    stock_s, grid_s = (trial.iteration_s or 0.0 for trial in history.trials[:2])
    is_kept = any("tensor partition stock: with grid, trial 1" in line for line in kept_lines(history))
    assert is_kept == (end["winner"] is None and grid_s > stock_s)
