"""The pipeline's part of a step: folded simulations against whole ones and closed forms."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.cost import pipeline
from quartet_plugin.cost.pipeline import StageTimes, activation_peak, makespan_s
from quartet_plugin.cost.run import TrainingRun
from tests.cost.runs import PIPELINE, run


def even(stages: int, *, transfer: float = 0.0) -> StageTimes:
    one = np.ones(stages)
    return StageTimes(
        forward_s=one, input_grad_s=one, weight_grad_s=one, transfer_s=np.append(one[1:] * transfer, 0.0)
    )


def small(**changes: Any) -> TrainingRun:
    return run(PIPELINE, **({"layers": 16, "pp": 4, "gpus": 4, "gbs": 12} | changes))


@pytest.mark.parametrize("count", [4, 12, 21, 64, 500])
def test_1f1b_has_its_textbook_bubble(count: int) -> None:
    assert makespan_s(small(gbs=count), even(4)) == pytest.approx(3 * (count + 3))


@pytest.mark.parametrize("count", [16, 64, 256])
def test_other_schedules_have_theirs(count: int) -> None:
    assert makespan_s(small(gbs=count, schedule="ZB-H1"), even(4)) == pytest.approx(3 * count + 3)
    interleaved = makespan_s(small(gbs=count, vpp=2), even(8))
    assert interleaved == pytest.approx(6 * count + 9)
    # Without the optimizer's barrier ZB-2p has next to no bubble left.
    assert makespan_s(small(gbs=count, schedule="ZB-2p"), even(4)) == pytest.approx(3 * count, rel=0.02)


@settings(deadline=None, max_examples=20)
@given(st.integers(37, 150), st.integers(0, 2**32 - 1), st.sampled_from(["1F1B", "ZB-1p", "ZB-2p (sync)"]))
def test_folding_changes_next_to_nothing(count: int, seed: int, schedule: str) -> None:
    draw = np.random.default_rng(seed)
    times = StageTimes(
        forward_s=draw.uniform(0.7, 1.4, 4),
        input_grad_s=draw.uniform(0.7, 1.4, 4),
        weight_grad_s=draw.uniform(0.7, 1.4, 4),
        transfer_s=np.append(draw.uniform(0, 0.3, 3), 0.0),
    )
    found = small(gbs=count, schedule=schedule)
    assert makespan_s(found, times) == pytest.approx(pipeline.simulated_s(found, times, count), rel=5e-3)


def test_without_a_pipeline_microbatches_add_up() -> None:
    found = small(pp=1, dp=4, gbs=40)
    assert makespan_s(found, even(1)) == 30


def test_1f1b_holds_p_microbatches() -> None:
    peak = activation_peak(small(gbs=64), np.ones(4), 0.6)
    assert peak.tolist() == [4, 3, 2, 1]
    assert activation_peak(small(gbs=2), np.ones(4), 0.6).max() == 2


def test_deferred_weight_gradients_hold_a_part() -> None:
    plain = activation_peak(small(gbs=64), np.ones(4), 0.6).sum()
    assert activation_peak(small(gbs=64, schedule="ZB-H1"), np.ones(4), 0.6).sum() > plain


@pytest.mark.parametrize("count", [1, 5, 9, 13, 41])
def test_interleaved_takes_any_number_of_microbatches(count: int) -> None:
    times = even(12)
    found = makespan_s(small(gbs=count, vpp=3), times)
    assert 9 * count <= found <= makespan_s(small(gbs=count + 4, vpp=3), times)
