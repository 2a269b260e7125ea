"""What `benchmarks.run_big` predicts from, and the lines that it prints."""

from dataclasses import replace

import pytest

from benchmarks.run_big import (
    NUM_PROCESSES,
    EmulatedDevice,
    FullSizeRow,
    full_plans,
    num_parameters,
    rank_of_best,
    summary_lines,
    trial_plan,
)
from quartet_plugin.space.full_size import with_all_replicas

pytestmark = pytest.mark.timeout(60)

ROW = FullSizeRow(
    label="pp2 dp4", trial_processes=4, trial_s=0.5, predicted_s=1.1, low_s=0.9, high_s=1.2, measured_s=1.0
)


def test_half_of_the_plans_have_each_layout_and_none_is_there_twice() -> None:
    plans = full_plans(20)
    assert [plan.layout.pipeline_parallel for plan in plans] == [2, 4] * 10
    assert len({plan.key for plan in plans}) == 20


@pytest.mark.parametrize("num_processes", [2, 4])
def test_a_trial_is_the_full_plan_with_fewer_replicas(num_processes: int) -> None:
    for full in full_plans(20):
        if full.layout.pipeline_parallel > num_processes:
            continue
        trial = trial_plan(full, num_processes=num_processes)
        assert trial.num_microbatches == full.num_microbatches
        factor = NUM_PROCESSES // num_processes
        assert with_all_replicas(trial, factor=factor, nodes=full.made_for.nodes) == full
        device = EmulatedDevice()
        assert device.stage_costs(trial).forward_s.tolist() == device.stage_costs(full).forward_s.tolist()
        assert num_parameters(trial, 0) == num_parameters(full, 0)


def test_a_replica_that_is_larger_than_a_trial_is_cut_in_half() -> None:
    cut = [plan for plan in full_plans(20) if plan.layout.pipeline_parallel == 4]
    for full in cut:
        trial = trial_plan(full, num_processes=2)
        assert trial.layout.world_size == 2
        assert trial.num_microbatches == full.num_microbatches
        assert trial.layout.virtual_stages == full.layout.virtual_stages
        assert 2 * trial.shape.num_layers == full.shape.num_layers
        assert sum(trial.split.transformer_layers_per_stage) == trial.shape.num_layers


def test_the_summary_has_the_mean_error_and_the_place_of_the_best_measured_plan() -> None:
    rows = [ROW, replace(ROW, predicted_s=1.0, measured_s=1.25), replace(ROW, label="pp4 dp2")]
    assert rank_of_best(rows) == 2
    lines = list(summary_lines(rows))
    assert lines[0].startswith(
        "trials of 4 processes, pp2: 2 plans, mean error 15.0 %, largest 20.0 %, 1 inside"
    )
    assert lines[-2].endswith("number 2 of the predicted ones")
    assert "goal 6 %" in lines[-1]
    assert lines[-1].endswith('by the rule "same time" 53.3 %')
