"""The parity gate's judgement and its receipt."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.model.plan import write_plan
from quartet_plugin.model.receipt import (
    ParityFailure,
    Receipt,
    StepValues,
    Tolerance,
    Versions,
    compare,
    find_failure,
    needs_receipt,
    parts_of,
    read_receipt,
    receipt_path,
    require_receipt,
    tolerance_for,
    write_receipt,
)
from tests.model.plans import PLAN, plan_with

GOLDEN = Path(__file__).parents[1] / "golden" / "plan.parity.json"
LIMIT = Tolerance(loss=1e-6, grad_norm=1e-6)


def series(
    *, loss: Sequence[float], norm: Sequence[float], parts: dict[str, float] | None = None
) -> list[StepValues]:
    pairs = zip(loss, norm, strict=True)
    return [StepValues(loss=one, grad_norm=two, parts=parts or {}) for one, two in pairs]


STOCK = series(loss=[9.0, 8.0, 7.0, 6.0], norm=[2.0, 2.0, 2.0, 2.0])


def scaled(**factors: Sequence[float]) -> list[StepValues]:
    """STOCK with each step's loss and norm multiplied."""
    ones = [1.0] * len(STOCK)
    rows = zip(STOCK, factors.get("loss", ones), factors.get("norm", ones), strict=True)
    return [replace(one, loss=one.loss * a, grad_norm=one.grad_norm * b) for one, a, b in rows]


def receipt_of(plan: Any = PLAN, **changes: Any) -> Receipt:
    values: dict[str, Any] = {
        "plan_digest": plan.digest,
        "plan_key": plan.key,
        "reference": "command",
        "versions": Versions(
            framework="megatron-core", framework_version="0.19.2", torch_version="2.11.0", quartet_version="0"
        ),
        "precision": "fp32",
        "tolerance": LIMIT,
        "steps": compare(STOCK, STOCK),
        "verdict": "passed",
        "failure": None,
    }
    return Receipt(**{**values, **changes})


def test_the_golden_receipt_reads_and_writes_to_the_byte(tmp_path: Path) -> None:
    receipt = read_receipt(GOLDEN)
    assert (receipt.verdict, len(receipt.steps)) == ("passed", 5)
    write_receipt(receipt, path=tmp_path / "x.json")
    assert (tmp_path / "x.json").read_bytes() == GOLDEN.read_bytes()


def test_equal_series_pass() -> None:
    assert find_failure(PLAN, STOCK, STOCK, tolerance=LIMIT) is None
    assert find_failure(PLAN, STOCK, scaled(loss=[1 + 5e-7] * 4), tolerance=LIMIT) is None


def test_the_first_step_that_differs_is_named() -> None:
    found = find_failure(PLAN, STOCK, scaled(loss=[1, 1, 1 + 2e-6, 1.5]), tolerance=LIMIT)
    assert found is not None
    assert (found.step, found.quantity, found.grows) == (3, "loss", False)
    assert "step 3: loss 7.000014, stock has 7" in found.reason


def test_a_gradient_norm_alone_fails() -> None:
    # Adam hides a constant factor: halved gradients leave the losses as they are.
    found = find_failure(PLAN, STOCK, scaled(norm=[0.5] * 4), tolerance=LIMIT)
    assert found is not None
    assert (found.step, found.quantity) == (1, "grad_norm")


def test_what_is_not_a_number_fails() -> None:
    for value in (math.nan, math.inf):
        found = find_failure(PLAN, STOCK, scaled(norm=[1, value, 1, 1]), tolerance=LIMIT)
        assert found is not None
        assert found.step == 2


def test_a_growing_difference_fails_below_the_tolerance() -> None:
    loose = Tolerance(loss=2e-3, grad_norm=1e-2)
    grows = scaled(loss=[1, 1 + 1e-5, 1 + 2e-4, 1 + 1.9e-3])
    found = find_failure(PLAN, STOCK, grows, tolerance=loose)
    assert found is not None
    assert (found.step, found.quantity, found.grows) == (4, "loss", True)
    assert find_failure(PLAN, STOCK, scaled(loss=[1 + 1.5e-3] * 4), tolerance=loose) is None
    assert find_failure(PLAN, STOCK, scaled(loss=[1, 1, 1, 1 + 9e-4]), tolerance=loose) is None


PARTS = {"embedding": 1.0, "head": 0.5, **{f"layer.{layer}": 0.1 for layer in range(8)}}


@pytest.mark.parametrize(
    ("changed", "stage"), [("layer.7", 1), ("head", 1), ("embedding", 0), ("layer.5", 0)]
)
def test_the_stage_of_a_wrong_gradient_is_named(changed: str, stage: int) -> None:
    stock = series(loss=[9.0], norm=[2.0], parts=PARTS)
    ours = series(loss=[9.0], norm=[2.1], parts={**PARTS, changed: PARTS[changed] * 1.5})
    found = find_failure(PLAN, stock, ours, tolerance=LIMIT)
    assert found is not None
    assert found.stage == stage
    assert f"first in stage {stage} (" in found.reason


def test_a_fault_travels_backward_with_gradients_and_forward_with_losses() -> None:
    stock = series(loss=[9.0], norm=[2.0], parts=PARTS)
    everywhere = {name: 2 * value for name, value in PARTS.items()}
    backward = find_failure(PLAN, stock, series(loss=[9.0], norm=[4.0], parts=everywhere), tolerance=LIMIT)
    forward = find_failure(PLAN, stock, series(loss=[9.5], norm=[4.0], parts=everywhere), tolerance=LIMIT)
    assert backward is not None
    assert forward is not None
    assert (backward.stage, forward.stage) == (1, 0)


def test_parts_cover_the_model_once() -> None:
    stages = range(len(PLAN.split.transformer_layers_per_stage))
    names = [name for stage in stages for name in parts_of(PLAN, stage)]
    assert names == ["embedding", *(f"layer.{layer}" for layer in range(8)), "head"]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=8), st.floats(1e-7, 1e-2))
def test_a_verdict_is_the_deviations(factors: list[float], limit: float) -> None:
    stock = series(loss=[3.0] * len(factors), norm=[1.0] * len(factors))
    ours = series(loss=[3.0 * factor for factor in factors], norm=[1.0] * len(factors))
    found = find_failure(PLAN, stock, ours, tolerance=Tolerance(loss=limit, grad_norm=limit))
    above = [i for i, one in enumerate(compare(stock, ours), 1) if float(one.loss_deviation) > limit]
    assert (found is None or found.grows) == (not above)
    if found is not None and not found.grows:
        assert found.step == above[0]


def test_experts_with_other_tokens_fail() -> None:
    def with_loads(*tokens: int) -> list[StepValues]:
        return [replace(step, expert_loads={"layer.1": tokens}) for step in STOCK]

    assert find_failure(PLAN, with_loads(500, 500), with_loads(500, 500), tolerance=LIMIT) is None
    # One token in a thousand may lie between two experts.
    assert find_failure(PLAN, with_loads(500, 500), with_loads(501, 499), tolerance=LIMIT) is None
    found = find_failure(PLAN, with_loads(500, 500), with_loads(505, 495), tolerance=LIMIT)
    assert found is not None
    assert (found.step, found.quantity) == (1, "expert_load")
    assert "0.005 of the routed tokens lie with other experts" in found.reason
    assert find_failure(PLAN, with_loads(500, 500), STOCK, tolerance=LIMIT) is None


def test_tolerances_follow_the_precision() -> None:
    assert tolerance_for("fp32", partition_differs=False) == LIMIT
    assert tolerance_for("fp32", partition_differs=True).loss == 5e-6
    assert tolerance_for("bf16", partition_differs=True) == Tolerance(loss=2e-3, grad_norm=1e-2)


def test_series_of_different_length_are_not_compared() -> None:
    with pytest.raises(ConfigError, match="3; the reference has 4"):
        compare(STOCK, STOCK[:3])


def test_stock_schedules_need_no_receipt() -> None:
    assert not needs_receipt(PLAN)


def saved(folder: Path, receipt: Receipt | None) -> Path:
    path = folder / "plan.json"
    write_plan(PLAN, path=path)
    if receipt is not None:
        write_receipt(receipt, path=receipt_path(path))
    return path


def test_a_matching_receipt_is_accepted(tmp_path: Path) -> None:
    path = saved(tmp_path, receipt_of())
    assert receipt_path(path).name == "plan.parity.json"
    assert require_receipt(PLAN, path=path, torch_version="2.11.0") == receipt_of()
    assert require_receipt(PLAN, path=path, torch_version=None).verdict == "passed"


FAILED = ParityFailure(step=2, quantity="loss", grows=False, stage=1, reason="step 2: loss 8, stock has 9")


@pytest.mark.parametrize(
    ("receipt", "words"),
    [
        (None, "has no parity receipt"),
        (receipt_of(plan_key="0" * 64), "another plan"),
        (receipt_of(versions=replace(receipt_of().versions, framework_version="0.19.3")), "0.19.3"),
        (receipt_of(versions=replace(receipt_of().versions, torch_version="2.0")), "torch 2.0"),
        (receipt_of(verdict="failed", failure=FAILED), "step 2: loss 8"),
    ],
)
def test_other_receipts_are_refused(receipt: Receipt | None, words: str, tmp_path: Path) -> None:
    path = saved(tmp_path, receipt)
    with pytest.raises(PlanError, match=words):
        require_receipt(PLAN, path=path, torch_version="2.11.0")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hook": "os.system"}, "hook"),
        ({"steps": []}, "steps"),
        ({"verdict": "failed"}, "verdict"),
        ({"plan_key": "x"}, "plan_key"),
        ({"schema_version": 2}, "schema_version"),
        ({"tolerance": {"loss": 2.0, "grad_norm": 0.1}}, "tolerance.loss"),
    ],
)
def test_a_receipt_that_breaks_its_format_is_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    data = json.loads(GOLDEN.read_text())
    (tmp_path / "x.json").write_text(json.dumps({**data, **change}))
    with pytest.raises(ConfigError, match=words):
        read_receipt(tmp_path / "x.json")


def test_a_receipt_outlives_a_measurement(tmp_path: Path) -> None:
    renamed = plan_with(provenance=replace(PLAN.provenance, trial=99))
    path = saved(tmp_path, receipt_of())
    assert require_receipt(renamed, path=path, torch_version=None).plan_digest != renamed.digest
