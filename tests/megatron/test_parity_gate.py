"""The parity gate on real Megatron: what trains as stock does passes, a wrong gradient is found and named."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.cli.trace import trace
from quartet_plugin.errors import InfrastructureError, PlanError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.receipt import Receipt, needs_receipt
from quartet_plugin.trial.parity import ParityGate, stock_of
from tests import warm_ranks
from tests.megatron.entry_launch import MEGATRON_FLAGS, ROOT, SCRIPT, SHAPE, make_plan
from tests.megatron.runtime.test_plan import custom_plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FAULTY = Path(__file__).with_name("faulty_pretrain.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
# Dropout is on: the gate must turn it off.
FLAGS = [*MEGATRON_FLAGS, "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]


def gate_for(folder: Path, *, script: Path = SCRIPT, steps: int = 10) -> ParityGate:
    return ParityGate(
        launcher=warm_ranks.launcher(),
        command=parse_command([*TORCHRUN, str(script), *FLAGS], environment={}),
        folder=folder,
        weights=folder / "weights",
        num_steps=steps,
        device="cpu",
        deadline_s=240.0,
        cwd=ROOT,
    )


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> ParityGate:
    """The gate of a command whose model is right in one layout and wrong in another."""
    return gate_for(tmp_path_factory.mktemp("gate"), script=FAULTY)


def worst(receipt: Receipt) -> float:
    return max(max(float(one.loss_deviation), float(one.grad_norm_deviation)) for one in receipt.steps)


def test_an_uneven_pipeline_trains_as_the_command_does(gate: ParityGate) -> None:
    receipt = gate.check(make_plan(split=(4, 2), pipeline=2))
    assert (receipt.verdict, receipt.reference, receipt.precision) == ("passed", "command", "fp32")
    assert len(receipt.steps) == 10
    assert worst(receipt) <= 1e-6
    assert len({one.reference_loss for one in receipt.steps}) == 10
    launches = {folder.parent.name for folder in gate.folder.glob("*/attempt-*")}
    assert {name for name in launches if not name.startswith(("plan-", "layout-"))} == {"stock"}


def test_a_schedule_of_ours_passes_and_leaves_its_actions(gate: ParityGate, tmp_path: Path) -> None:
    plan = custom_plan()
    assert needs_receipt(plan)
    receipt = gate.check(plan)
    assert (receipt.verdict, receipt.reference) == ("passed", "command")
    assert worst(receipt) <= 1e-6
    attempt = gate.folder / f"plan-{plan.key[:12]}" / "attempt-1"
    assert trace(attempt, tmp_path / "trace.json")[0].startswith("makespan: measured ")


def test_a_wrong_weight_gradient_is_found_in_its_step_and_stage(gate: ParityGate) -> None:
    plan = make_plan(split=(3, 3), pipeline=2)
    receipt = gate.check(plan)
    assert receipt.verdict == "failed"
    assert receipt.failure is not None
    assert (receipt.failure.step, receipt.failure.quantity, receipt.failure.stage) == (2, "grad_norm", 1)
    assert receipt.plan_key == plan.key


def test_another_tensor_parallel_size_is_allowed_its_rounding(gate: ParityGate) -> None:
    receipt = gate.check(make_plan(split=(6,), tensor=2))
    assert (receipt.verdict, receipt.tolerance.loss) == ("passed", 5e-6)


def test_a_plan_that_does_not_run_here_says_so(gate: ParityGate) -> None:
    other = make_plan(split=(4, 2), pipeline=2, framework_version="0.19.99")
    with pytest.raises(PlanError, match=r"does not run: .*0\.19\.99"):
        gate.check(other)


def test_another_shape_is_compared_with_stock_of_that_shape(tmp_path: Path) -> None:
    shape = replace(SHAPE, num_layers=4, hidden_size=48, kv_channels=12, ffn_hidden_size=192)
    plan = make_plan(split=(3, 1), pipeline=2, shape=shape)
    assert stock_of(plan).split.transformer_layers_per_stage == (2, 2)
    receipt = gate_for(tmp_path, steps=4).check(plan)
    launches = {folder.parent.name for folder in tmp_path.glob("*/attempt-*")}
    assert launches == {f"stock-{stock_of(plan).key[:12]}", f"plan-{plan.key[:12]}"}
    assert (receipt.verdict, receipt.reference) == ("passed", "stock")
    assert worst(receipt) <= 1e-6


def test_a_command_that_does_not_run_is_not_the_plans_fault(tmp_path: Path) -> None:
    gate = gate_for(tmp_path, script=tmp_path / "absent.py")
    with pytest.raises(InfrastructureError, match="stock does not run"):
        gate.check(make_plan(split=(4, 2), pipeline=2))
