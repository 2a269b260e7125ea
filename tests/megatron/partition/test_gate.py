"""Tensor partitions before the parity gate: what trains as stock does passes, a wrong table does not."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.errors import PlanError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.plan import Plan, write_plan
from quartet_plugin.model.receipt import Receipt, needs_receipt
from quartet_plugin.model.tensor_partition import partition_from_label
from quartet_plugin.partition.named import named_partition
from quartet_plugin.partition.table import Phase
from quartet_plugin.partition.validate import validate
from quartet_plugin.trial.parity import ParityGate
from tests import warm_ranks
from tests.megatron.entry_launch import MEGATRON_FLAGS, ROOT, SCRIPT, make_plan

TAMPERED = Path(__file__).with_name("tampered_pretrain.py")
CASES = [
    pytest.param("rings", 2, marks=pytest.mark.slow),
    pytest.param("grid", 4, marks=pytest.mark.nightly),
]


def plan_of(label: str, devices: int) -> Plan:
    """One stage on all devices."""
    plan = make_plan(split=(6,), tensor=devices)
    layout = replace(plan.layout, sequence_parallel=True, tensor_partition=partition_from_label(label))
    return replace(plan, layout=layout)


def checked(plan: Plan, folder: Path, *, script: Path = SCRIPT) -> Receipt:
    """The receipt after four steps; the reference is the command, whose ranks have copies of the model."""
    write_plan(plan, path=folder / "plan.json")
    devices = plan.layout.tensor_parallel
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(devices)]
    gate = ParityGate(
        launcher=warm_ranks.launcher(),
        command=parse_command([*torchrun, str(script), *MEGATRON_FLAGS], environment={}),
        folder=folder / "parity",
        weights=folder / "weights",
        num_steps=4,
        device="cpu",
        deadline_s=240.0,
        cwd=ROOT,
    )
    return gate.check(plan)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("label", "devices"), CASES)
def test_a_partition_trains_as_the_command_does(label: str, devices: int, tmp_path: Path) -> None:
    plan = plan_of(label, devices)
    assert needs_receipt(plan)
    receipt = checked(plan, tmp_path)
    assert (receipt.verdict, receipt.reference, len(receipt.steps)) == ("passed", "command", 4)
    deviations = [(float(step.loss_deviation), float(step.grad_norm_deviation)) for step in receipt.steps]
    assert max(map(max, deviations)) <= 1e-5


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("label", "devices"), CASES)
def test_a_tampered_table_is_wrong(label: str, devices: int, tmp_path: Path) -> None:
    receipt = checked(plan_of(label, devices), tmp_path, script=TAMPERED)
    assert receipt.verdict == "failed"
    assert receipt.failure is not None
    assert (receipt.failure.step, receipt.failure.quantity) == (1, "grad_norm")


@pytest.mark.parametrize("name", ["ring-column2", "ring-row2", "home2x2-in", "home2x2-out"])
def test_the_validator_refuses_that_table(name: str) -> None:
    table = named_partition(name)
    gradient = table.steps[Phase.G]
    with pytest.raises(PlanError, match=r"G"):
        validate(replace(table, steps={**table.steps, Phase.G: (*gradient[:-1], gradient[0])}))
