"""The parity gate on real DeepSpeed: what trains as the command does passes, a wrong gradient is named."""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.launchers import warm as warm_starts
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.launchers.warm import WarmLauncher
from quartet_plugin.model.plan import Plan, ScheduleChoice, write_plan
from quartet_plugin.model.receipt import Receipt, needs_receipt, read_receipt, receipt_path, tolerance_for
from quartet_plugin.trial import parity
from quartet_plugin.trial.parity import ParityGate
from tests.deepspeed.support import ROOT, command_of, environment, layout, plan, schedule, shape, text_in

FAULTY = ROOT / "tests" / "deepspeed" / "faulty_pretrain.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "steps_per_print": 10**9,
}
STEPS = 4


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmLauncher]:
    """One server forks the ranks of all checks."""
    with WarmLauncher(command_of=command_of) as launcher:
        yield launcher


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of the text that all commands train on."""
    return text_in(tmp_path_factory.mktemp("text"))


def command(folder: Path, text: Path, *, starter: list[str], fault: str, **config: Any) -> list[str]:
    """The words of a training command with dropout on `text`, and with its ds_config written."""
    (folder / "ds.json").write_text(json.dumps({**CONFIG, **config}), encoding="utf-8")
    sizes = "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 260"
    flags = f"--fault {fault} --data-path {text} --pipeline-stages 2 --train-iters 8 {sizes}".split()
    return [*starter, str(FAULTY), *flags, "--deepspeed_config", str(folder / "ds.json")]


def gate_for(folder: Path, words: list[str], launcher: WarmLauncher) -> ParityGate:
    return ParityGate(
        launcher=launcher,
        command=parse_command(words, environment={}),
        folder=folder / "gate",
        weights=folder / "weights",
        num_steps=STEPS,
        device="cpu",
        deadline_s=200.0,
        cwd=ROOT,
    )


def for_example(made: Plan) -> Plan:
    """For the example's vocabulary."""
    own = replace(shape(4), vocab_size=260)
    return replace(made, shape=own, made_for=replace(made.made_for, shape=own))


def v_plan(*, is_sharded: bool = False, permuted: bool = True, micro_batch: int = 2) -> Plan:
    return for_example(
        plan(
            (1, 2, 1, 0),
            planned=layout(2, world=2, chunks=2, is_sharded=is_sharded, micro_batch=micro_batch),
            own=layout(2, world=2, is_sharded=is_sharded),
            batch=8,
            order=(1, 0) if permuted else None,
            schedule=schedule("zb-v", 2, 8 // micro_batch, (2, 2, 1, 1)),
        )
    )


def worst(receipt: Receipt) -> float:
    return max(max(float(one.loss_deviation), float(one.grad_norm_deviation)) for one in receipt.steps)


@pytest.mark.slow
def test_what_trains_as_the_command_does_passes_and_a_wrong_gradient_does_not(
    tmp_path: Path, text: Path, warm: WarmLauncher
) -> None:
    gate = gate_for(tmp_path, command(tmp_path, text, starter=TORCHRUN, fault="gradient"), warm)
    made = v_plan()
    assert needs_receipt(made)
    receipt = gate.check(made)
    assert (receipt.verdict, receipt.reference, receipt.precision) == ("passed", "command", "fp32"), receipt
    assert receipt.versions.framework == "deepspeed"
    assert worst(receipt) <= 1e-6
    assert len({one.reference_loss for one in receipt.steps}) == STEPS
    launches = {folder.parent.name for folder in gate.folder.glob("*/attempt-*")}
    assert launches == {"stock", f"plan-{made.key[:12]}"}
    assert len(list((gate.folder / f"plan-{made.key[:12]}").glob("attempt-1/rank-*.actions.json"))) == 2
    own = layout(2, world=2)
    failed = gate.check(for_example(plan((3, 1), planned=own, own=own, batch=8)))
    assert failed.failure is not None
    assert (failed.failure.step, failed.failure.quantity, failed.failure.stage) == (2, "grad_norm", 0)


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        pytest.param("none", "passed", marks=pytest.mark.nightly),
        pytest.param("stage", "failed", marks=pytest.mark.slow),
    ],
)
def test_the_rounding_of_another_micro_batch_is_stocks_own_and_a_wrong_stage_is_not(
    fault: str,
    verdict: str,
    tmp_path: Path,
    text: Path,
    warm: WarmLauncher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A narrow tolerance stands for a large model, whose rounding exceeds the usual one."""
    usual = tolerance_for("fp32", partition_differs=False)
    narrow = replace(usual, loss=5e-9, grad_norm=1e-9)
    monkeypatch.setattr(parity, "tolerance_for", lambda *_, **__: narrow)
    wide = replace(usual, loss=1e-3, grad_norm=1e-3)
    monkeypatch.setattr(parity, "rounding_limit", lambda *_, **__: wide)
    gate = gate_for(tmp_path, command(tmp_path, text, starter=TORCHRUN, fault=fault), warm)
    receipt = gate.check(v_plan(micro_batch=1))
    second = receipt.layout_reference
    assert second is not None
    assert receipt.verdict == verdict, receipt
    assert float(second.grad_norm_rounding) > narrow.grad_norm
    if receipt.failure is not None:
        assert (receipt.failure.step, receipt.failure.quantity, receipt.failure.stage) == (1, "grad_norm", 0)


@pytest.mark.slow
def test_a_sharded_optimizer_in_bf16(tmp_path: Path, text: Path, warm: WarmLauncher) -> None:
    words = command(
        tmp_path,
        text,
        starter=TORCHRUN,
        fault="none",
        bf16={"enabled": True},
        zero_optimization={"stage": 1},
        gradient_clipping=1.0,
    )
    receipt = gate_for(tmp_path, words, warm).check(v_plan(is_sharded=True))
    assert (receipt.verdict, receipt.precision) == ("passed", "bf16"), receipt
    assert all(float(one.grad_norm) > 0 for one in receipt.steps)


@pytest.mark.slow
def test_check_writes_the_receipt_that_train_asks_for(
    tmp_path: Path,
    text: Path,
    warm: WarmLauncher,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Under the launcher whose ranks are forked; training then begins under DeepSpeed's own."""
    # This file's server in place of a further one.
    monkeypatch.setattr(warm_starts, "WarmLauncher", lambda: nullcontext(warm))
    words = command(tmp_path, text, starter=TORCHRUN, fault="none")
    path = tmp_path / "plan.json"
    write_plan(v_plan(), path=path)
    own = ["deepspeed", "--num_gpus", "2", *words[len(TORCHRUN) :]]
    train = ["train", "--plan", str(path), "--device", "cpu", "--", *own]
    assert main(train) == 2
    assert "has no parity receipt" in capfd.readouterr().err
    assert main(["check", str(path), "--device", "cpu", "--steps", "2", "--", *words]) == 0
    assert warm.latest.is_warm, warm.latest.cold_reason
    assert read_receipt(receipt_path(path)).plan_key == v_plan().key
    assert not list((tmp_path / "plan.parity").rglob("layer-*.pt")), "the weights are gone"
    capfd.readouterr()
    assert main(train) == 0
    assert "mapping: rank 0 on" in capfd.readouterr().err


def test_an_interleaved_schedule_is_ours_under_deepspeed() -> None:
    own = layout(2, world=2)
    made = plan((1, 1, 1, 1), planned=layout(2, world=2, chunks=2), own=own, batch=8, group=2)
    assert made.schedule == ScheduleChoice(name="interleaved", group=2)
    assert needs_receipt(made)
    assert not needs_receipt(replace(made, made_for=replace(made.made_for, framework="megatron-core")))
    assert not needs_receipt(plan((2, 2), planned=own, own=own, batch=8))
