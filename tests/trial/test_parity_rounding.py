"""The parity gate and layouts that round otherwise: stock under the plan's layout is a second reference."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.model.receipt import Precision, Receipt, StepValues, read_receipt, write_receipt
from quartet_plugin.model.schema import dump
from quartet_plugin.model.tensor_partition import partition_from_label
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.protocol.attempt_files import KEPT_FILE, KeptWeights
from quartet_plugin.trial import parity
from quartet_plugin.trial.parity import ParityGate, stock_of
from quartet_plugin.trial.request import Outcome, TrialRequest, TrialResult
from tests.megatron.entry_launch import make_plan
from tests.model.plans import LAYOUT, PLAN, plan_with
from tests.space.jobs import make_job

NUM_STEPS = 5
OTHER_BATCH = plan_with(layout=replace(LAYOUT, micro_batch_size=2))
# What Adam and convolutions were seen to give: 2.6e-6 at the last of five steps.
GROWING = (1e-7, 3e-7, 8e-7, 1.5e-6, 2.6e-6)
NO_ROUNDING = (0.0,) * NUM_STEPS


@dataclass
class Trainer:
    """Runs of a job whose gradient norm is rounded by its layout; a plan's two stages may have a fault.

    `factors` scale the gradient of each stage of the plan that is checked; stock's runs have none.
    """

    rounding: Callable[[Layout], tuple[float, ...]]
    checked: Plan
    factors: tuple[float, float] = (1.0, 1.0)
    outcome_of_second: Outcome = Outcome.OK
    precision: Precision = "fp32"
    tensor_parallel: int = 1
    names: list[str] = field(default_factory=list)
    requests: list[TrialRequest] = field(default_factory=list)

    def run(self, request: TrialRequest, **_: Any) -> TrialResult:
        """What `run_trial` returns."""
        self.names.append(request.folder.name)
        self.requests.append(request)
        request.folder.mkdir(parents=True, exist_ok=True)
        plan = request.plan
        layout = LAYOUT if plan is None else plan.layout
        is_checked = plan is not None and plan.key == self.checked.key
        # Half of the squared norm is each stage's.
        fault = math.hypot(*self.factors) / math.sqrt(2.0) if is_checked else 1.0
        is_second = plan is not None and not is_checked
        outcome = self.outcome_of_second if is_second else Outcome.OK
        has_run = outcome is Outcome.OK
        return TrialResult(
            attempt_id="a" * 32,
            plan_key=request.plan_key,
            outcome=outcome,
            reason=outcome.value,
            phase="done",
            loss=tuple(9.0 - step for step in range(NUM_STEPS)) if has_run else (),
            grad_norm=tuple(2.0 * fault * (1.0 + part) for part in self.rounding(layout)) if has_run else (),
            job=dump(self._job()),
            folder=request.folder,
        )

    def _job(self) -> TrainingJob:
        job = make_job()
        layout = replace(job.layout, tensor_parallel=self.tensor_parallel)
        return replace(job, precision=self.precision, layout=layout)


def by_micro_batch(*parts: float) -> Callable[[Layout], tuple[float, ...]]:
    """Rounding of every layout with another micro-batch than the command's."""
    return lambda layout: NO_ROUNDING if layout.micro_batch_size == LAYOUT.micro_batch_size else parts


def gate_of(trainer: Trainer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ParityGate:
    monkeypatch.setattr(parity, "run_trial", trainer.run)
    command = parse_command(["torchrun", "--nproc-per-node", "2", "train.py"], environment={})
    return ParityGate(command=command, folder=folder, weights=folder / "weights")


def check(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, plan: Plan = OTHER_BATCH, **options: Any
) -> tuple[Receipt, Trainer]:
    options.setdefault("rounding", by_micro_batch(*GROWING))
    trainer = Trainer(checked=plan, **options)
    return gate_of(trainer, folder, monkeypatch).check(plan), trainer


def test_another_micro_batch_is_allowed_the_rounding_that_stock_has_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt, trainer = check(tmp_path, monkeypatch)
    assert receipt.verdict == "passed"
    assert float(receipt.steps[-1].grad_norm_deviation) == pytest.approx(2.6e-6, rel=1e-3)
    second = receipt.layout_reference
    assert second is not None
    assert second.plan_key == stock_of(OTHER_BATCH).key
    assert float(second.grad_norm_rounding) == pytest.approx(2.6e-6, rel=1e-3)
    assert second.tolerance.grad_norm == 1e-6
    assert second.limit.grad_norm == pytest.approx(2e-5)
    assert receipt.decisive_steps == second.steps
    assert max(float(step.grad_norm_deviation) for step in second.steps) <= 1e-12
    assert len([name for name in trainer.names if name.startswith("layout-")]) == 1


@pytest.mark.parametrize("label", ["stock", "rings"])
def test_linear_layers_that_are_cut_otherwise_have_a_larger_tolerance(
    label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = None if label == "stock" else partition_from_label(label)
    stock = make_plan(split=(6,), tensor=2, hosts=("node-a",))
    plan = replace(stock, layout=replace(stock.layout, sequence_parallel=True, tensor_partition=partition))
    receipt, _ = check(tmp_path, monkeypatch, plan=plan, tensor_parallel=2, rounding=lambda _: NO_ROUNDING)
    assert receipt.tolerance.grad_norm == (1e-6 if partition is None else 5e-6)


def test_the_second_reference_is_run_once_a_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(checked=OTHER_BATCH, rounding=by_micro_batch(*GROWING))
    gate = gate_of(trainer, tmp_path, monkeypatch)
    gate.check(OTHER_BATCH)
    trainer.checked = replace(OTHER_BATCH, split=Split(transformer_layers_per_stage=(5, 3)))
    assert gate.check(trainer.checked).verdict == "passed"
    assert len([name for name in trainer.names if name.startswith("layout-")]) == 1


@pytest.mark.parametrize("factors", [(1.0 + 1e-4, 1.0), (1.0, 1.0 + 1e-4), (1.0 + 1e-5, 1.0)])
@pytest.mark.parametrize("rounding", [GROWING, NO_ROUNDING])
def test_a_gradient_that_is_wrong_in_one_stage_fails(
    factors: tuple[float, float],
    rounding: tuple[float, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receipt, _ = check(tmp_path, monkeypatch, factors=factors, rounding=by_micro_batch(*rounding))
    assert receipt.failure is not None
    assert receipt.failure.quantity == "grad_norm"
    assert receipt.failure.step == 1


def test_a_small_fault_that_hides_behind_the_rounding_is_told_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt, _ = check(tmp_path, monkeypatch, factors=(1.0 + 1e-5, 1.0))
    assert receipt.layout_reference is not None
    assert receipt.failure is not None
    assert "compared with stock under pp2 mb2" in receipt.failure.reason


def test_more_than_rounding_fails_without_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt, trainer = check(tmp_path, monkeypatch, rounding=by_micro_batch(0.0, 0.0, 0.0, 0.0, 3e-5))
    assert receipt.verdict == "failed"
    assert receipt.layout_reference is None
    assert not [name for name in trainer.names if name.startswith("layout-")]


def test_an_unchanged_layout_keeps_its_tolerance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Class A: another split, or another pipeline degree alone, has no rounding to be excused by."""
    receipt, trainer = check(tmp_path, monkeypatch, plan=PLAN, factors=(1.0 + 4e-6, 1.0))
    assert receipt.verdict == "failed"
    assert receipt.tolerance.grad_norm == 1e-6
    assert receipt.layout_reference is None
    assert not [name for name in trainer.names if name.startswith("layout-")]


def test_a_plan_within_the_tolerance_needs_no_second_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt, trainer = check(tmp_path, monkeypatch, rounding=by_micro_batch(*[5e-7] * NUM_STEPS))
    assert (receipt.verdict, receipt.layout_reference) == ("passed", None)
    assert not [name for name in trainer.names if name.startswith("layout-")]


def test_where_stock_does_not_run_under_the_layout_the_failure_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt, _ = check(tmp_path, monkeypatch, outcome_of_second=Outcome.INFEASIBLE)
    assert receipt.layout_reference is None
    assert receipt.failure is not None
    assert "stock does not run under pp2 mb2" in receipt.failure.reason


def test_half_precision_has_less_room_beyond_its_tolerance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, _ = check(
        tmp_path / "a", monkeypatch, precision="bf16", rounding=by_micro_batch(*[2e-2] * NUM_STEPS)
    )
    outside, _ = check(
        tmp_path / "b", monkeypatch, precision="bf16", rounding=by_micro_batch(*[4e-2] * NUM_STEPS)
    )
    assert (inside.verdict, outside.verdict) == ("passed", "failed")


def test_the_receipt_holds_the_second_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receipt, _ = check(tmp_path, monkeypatch)
    write_receipt(receipt, path=tmp_path / "plan.parity.json")
    assert read_receipt(tmp_path / "plan.parity.json") == receipt


def steps_of(result: TrialResult) -> tuple[StepValues, ...]:
    pairs = zip(result.loss, result.grad_norm, strict=True)
    return tuple(StepValues(loss=loss, grad_norm=norm, parts={}) for loss, norm in pairs)


@pytest.mark.parametrize("has_weights", [True, False])
def test_a_trial_is_compared_with_trial_0_and_stock_runs_under_its_layout_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_weights: bool
) -> None:
    trainer = Trainer(checked=OTHER_BATCH, rounding=by_micro_batch(*GROWING))
    gate = gate_of(trainer, tmp_path, monkeypatch)
    monkeypatch.setattr(parity, "needs_receipt", lambda plan: True)
    command = parse_command(["torchrun", "train.py"], environment={})
    trial, own = (
        trainer.run(TrialRequest(folder=tmp_path / name, command=command, plan=plan))
        for name, plan in (("000000", None), ("000001", OTHER_BATCH))
    )
    trainer.names.clear()
    if has_weights:
        (gate.weights / "stock").mkdir(parents=True)
        kept = KeptWeights(attempt_id=trial.attempt_id)
        (gate.weights / "stock" / KEPT_FILE).write_text(json.dumps(dump(kept)))
    gate.adopt_trial(trial, steps_of(trial))
    receipt = gate.compare_trial(OTHER_BATCH, own, steps_of(own))
    assert receipt.verdict == "passed"
    assert receipt.layout_reference is not None
    prefixes = ["layout"] if has_weights else ["stock", "plan", "layout"]
    assert [name.split("-")[0] for name in trainer.names] == prefixes
    # Where nothing has to be told from rounding, nothing is launched.
    trainer.names.clear()
    same = gate.compare_trial(OTHER_BATCH, own, steps_of(trial))
    assert (same.verdict, same.layout_reference, trainer.names) == ("passed", None, [])


@pytest.mark.parametrize(("rounding", "verdict"), [(GROWING, "passed"), ((1e-3,) * NUM_STEPS, "failed")])
def test_a_stock_plan_may_round_as_a_layout_does_in_its_own_trial_and_takes_no_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounding: tuple[float, ...], verdict: str
) -> None:
    trainer = Trainer(rounding=by_micro_batch(*rounding), checked=OTHER_BATCH)
    gate = gate_of(trainer, tmp_path, monkeypatch)
    trial, own = (
        trainer.run(TrialRequest(folder=tmp_path / name, command=gate.command, plan=plan))
        for name, plan in (("000000", None), ("000001", OTHER_BATCH))
    )
    gate.adopt_trial(trial, steps_of(trial))
    receipt = gate.compare_trial(OTHER_BATCH, own, steps_of(own))
    assert receipt.verdict == verdict
    assert receipt.tolerance.loss > 1e-6
    assert trainer.names == ["000000", "000001"]
