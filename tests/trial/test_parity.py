"""The launches of the parity gate: the reference's, which also writes the weights, and the plan's."""

from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.errors import PlanError
from quartet_plugin.model.plan import Split
from quartet_plugin.protocol.attempt_files import KEPT_FILE
from quartet_plugin.trial.parity import stock_of
from tests.model.plans import PLAN
from tests.trial.test_parity_rounding import NO_ROUNDING, NUM_STEPS, Trainer, gate_of


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(rounding=lambda _: NO_ROUNDING, checked=PLAN)


def test_a_check_launches_the_reference_once_and_the_plan_once(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_of(trainer, tmp_path, monkeypatch)
    assert gate.check(PLAN).verdict == "passed"
    reference, measured = trainer.requests
    weights = gate.weights / "stock"
    assert (reference.plan, reference.save_weights, reference.weights) == (None, weights, None)
    assert (measured.plan, measured.save_weights, measured.weights) == (PLAN, None, weights)
    for request in trainer.requests:
        assert (request.warmup, request.measure, request.num_compared) == (0, NUM_STEPS, None)
    # The reference writes and reads the weights in its first step, where others write or read them alone.
    limits = measured.timeouts
    assert reference.timeouts.first_step_s >= limits.first_step_s + limits.init_s
    assert reference.deadline_s >= measured.deadline_s + limits.first_step_s + limits.init_s


def test_a_reference_serves_every_plan_of_a_shape(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_of(trainer, tmp_path, monkeypatch)
    other = replace(PLAN, split=Split(transformer_layers_per_stage=(5, 3)))
    wider = replace(PLAN, shape=replace(PLAN.shape, ffn_hidden_size=2048))
    stock = stock_of(wider)
    name = f"stock-{stock.key[:12]}"
    for plan in (PLAN, other, wider, wider):
        assert gate.check(plan).verdict == "passed"
    keys = [f"plan-{plan.key[:12]}" for plan in (PLAN, other, wider)]
    assert trainer.names == ["stock", keys[0], keys[1], name, keys[2], keys[2]]
    reference, measured = trainer.requests[3:5]
    assert (reference.plan, reference.save_weights) == (stock, gate.weights / name)
    assert measured.weights == reference.save_weights


def test_weights_of_an_earlier_process_are_removed_before_the_reference_writes_its_own(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_of(trainer, tmp_path, monkeypatch)
    earlier = gate.weights / "stock" / KEPT_FILE
    earlier.parent.mkdir(parents=True)
    earlier.write_text("{}")
    calls: list[bool] = []
    gate.fence = lambda: calls.append(earlier.exists())
    gate.check(PLAN)
    assert calls == [True], "the right to write is checked before the weights are removed"
    assert not earlier.exists()


def test_a_plan_that_loads_no_weights_of_the_command_is_refused_before_a_launch(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_of(trainer, tmp_path, monkeypatch)
    sharded = replace(PLAN, layout=PLAN.layout.with_setting("use_megatron_fsdp", True))
    words = (
        r"^parity: the plan turns Megatron-FSDP on or off, .* equal weights; train the plan without a check$"
    )
    with pytest.raises(PlanError, match=words):
        gate.check(sharded)
    assert trainer.requests == []
