"""A whole tuning run on real Megatron whose only schedules are custom: each is proven in its own trial."""

import json
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.plan_checks import check_receipt
from quartet_plugin.model.plan import Plan, read_plan, write_plan
from quartet_plugin.model.receipt import needs_receipt, read_receipt, worst_of
from quartet_plugin.protocol.rank_files import read_actions
from quartet_plugin.trial.attempt import attempt_number, read_result
from quartet_plugin.trial.parity import STEPS
from quartet_plugin.trial.request import Outcome
from tests.megatron.entry_launch import MEGATRON_FLAGS
from tests.short_rounds import short_rounds as short_rounds
from tests.tuner.live_studies import launch_settings as launch_settings
from tests.tuner.live_studies import tune

FULL_SEARCHES = True  # read by `short_searches`
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("short_rounds", "launch_settings"),
]

# Two that train as stock does, and a third, with two stages a rank, in whose model there is a fault.
CONFIG = """\
run: own
search:
  {pipeline_parallel: 2, micro_batch_size: 2, mapping: stock, split: even, schedule: [zb-h1, zb-h2, zb-v]}
trial: {warmup: 1, measure: 3, deadline_s: 240}
study: {trials: 3, top_k: 1, rounds: 3, control: 0}
device: cpu
"""
SCRIPT = Path(__file__).parents[1] / "megatron" / "faulty_chunks_pretrain.py"


def losses(attempt: Path) -> list[float]:
    """The loss of every iteration, from a rank that has it."""
    for path in sorted(attempt.glob("rank-[0-9].json")):
        values = [step["loss"] for step in json.loads(path.read_text())["iterations"]]
        if None not in values:
            return values
    raise AssertionError("no rank has a loss")


def latest_attempt(run: Path, number: int) -> Path:
    """The attempt of a trial that counts: times that scatter are measured once more."""
    folder = run / "trials" / f"{number:06d}"
    return max(folder.glob("attempt-*"), key=attempt_number)


def attempts(run: Path) -> dict[str, Path]:
    """The attempt of each plan's trial, by its schedule."""
    folders = (latest_attempt(run, number) for number in (1, 2, 3))
    return {read_plan(folder / "plan.json").schedule.label: folder for folder in folders}


def test_every_custom_plan_is_proven_in_its_trial_and_a_wrong_one_is_refused_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Dropout is on, as Megatron has it by default: the compared iterations are without.
    command = ["torchrun", "--nproc-per-node", "2", str(SCRIPT), *MEGATRON_FLAGS]
    # The local layers are those whose backward is split.
    pipeline = ["--pipeline-model-parallel-size", "2"]
    run = tune(tmp_path, CONFIG, [*command, *pipeline])
    printed = capfd.readouterr().out
    assert "parity check of zb-h1 (linear) passed: losses" in printed
    assert "zb-v (v) is excluded from the search: step 2: loss" in printed

    assert not list((run / "parity").rglob("attempt-*"))
    assert not (run / "parity" / "weights").exists()
    reference = losses(latest_attempt(run, 0))
    measured: dict[str, list[float]] = {}
    for name, attempt in attempts(run).items():
        plan = read_plan(attempt / "plan.json")
        receipt = read_receipt(run / "parity" / f"plan-{plan.key[:12]}" / "plan.parity.json")
        assert (receipt.plan_key, receipt.precision, len(receipt.steps)) == (plan.key, "fp32", STEPS)
        assert [step.reference_loss for step in receipt.steps] == reference[:STEPS]
        assert [step.loss for step in receipt.steps] == losses(attempt)[:STEPS]
        result = read_result(attempt)
        assert result is not None
        if name == "zb-v":
            assert receipt.failure is not None
            assert (receipt.failure.step, receipt.failure.quantity) == (2, "loss")
            assert (result.outcome, result.iteration_s) == (Outcome.WRONG, ())
            continue
        assert receipt.verdict == "passed"
        assert max(worst_of(receipt.steps)) <= 1e-6
        assert (result.outcome in (Outcome.OK, Outcome.UNSTABLE), len(result.iteration_s)) == (True, 3)
        measured[name] = losses(attempt)[STEPS:]
        check_trains(plan, attempt, receipt=run / "parity" / f"plan-{plan.key[:12]}", folder=tmp_path)
    # The measured iterations are the command's, dropout included: these orders draw the same masks.
    assert set(measured) == {"zb-h1", "zb-h2"}
    assert all(values == pytest.approx(reference[STEPS:], rel=1e-5) for values in measured.values())
    for number in (1, 2, 3):
        assert not (run / "final" / f"{number:06d}-round-1" / "attempt-1" / "rank-0.parity.json").exists()
    best = run / "best" / "plan.json"
    assert best.exists() == best.with_name("plan.parity.json").exists()


def check_trains(plan: Plan, attempt: Path, *, receipt: Path, folder: Path) -> None:
    """The plan ran its own actions, and with its receipt beside it `quartet train` takes it at once."""
    devices: list[Any] = read_actions(attempt)
    assert [sheet.device for sheet in devices] == [0, 1]
    # Megatron has no such action. On device 0 every W follows its I, and both may run as one.
    assert any("W" in text for text in devices[1].actions)
    assert needs_receipt(plan)
    write_plan(plan, path=folder / "again.json")
    (folder / "again.parity.json").write_text((receipt / "plan.parity.json").read_text())
    check_receipt(plan, path=folder / "again.json", skip=False)
