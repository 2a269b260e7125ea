"""The best split of a pipeline, with microbatches simulated one by one and extrapolated from fewer."""

from dataclasses import replace

import pytest

from quartet_plugin.cost.iteration.split_model import CalibratedSplits
from quartet_plugin.mapping.orders import slot_indices
from quartet_plugin.model.plan import Split
from quartet_plugin.planner.split_search import Pipeline, balanced_split, best_splits
from quartet_plugin.space.layouts import stock_choice
from quartet_plugin.split.layers import even_split
from tests.planner.test_best_moves import every_split, space_of, truth_of

NUM_LAYERS, NUM_STAGES = 11, 5
# Of micro-batches of 2. More than 9 times PP of them are extrapolated; the last batch has no whole round.
BATCHES = {"one by one": 16, "extrapolated": 300, "extrapolated, with a rest": 298}


@pytest.mark.parametrize(("ranks", "chunks"), [(4, 1), (3, 2)])
def test_best_splits_with_mtp_before_the_last_stage_match_exhaustive_search(ranks: int, chunks: int) -> None:
    """Multi-token prediction lies on the stage before the last one, which may have no layer beside it."""
    stages = ranks * chunks
    schedule = "1f1b" if chunks == 1 else "interleaved"
    space = space_of(ranks, num_layers=9, search={"schedule": schedule, "virtual_stages": chunks})
    layout = replace(space.baseline.layout, virtual_stages=chunks, pipeline_parallel=ranks)
    plan = replace(
        space.baseline,
        made_for=replace(space.baseline.made_for, mtp_layers=1),
        layout=layout,
        schedule=stock_choice(layout),
        split=Split.of(even_split(9, num_stages=stages, is_mtp_before_last=True), is_mtp_before_last=True),
    )
    slots = slot_indices(space.nodes, plan.mapping)
    every = list(every_split(9, stages, is_mtp_before_last=True))
    assert any(split[-2] == 0 for split in every)
    for seed in range(4):
        truth = truth_of(space, seed)
        model = truth._iteration_models.split_model(plan)
        calibrated = CalibratedSplits(model=model, point=truth.theta)
        pipeline = Pipeline(calibrated.times(slots, plan.mapping))
        assert balanced_split(pipeline.times, 9)[-1] == 0
        found = best_splits(calibrated, [(slots, plan.mapping)], num_layers=9, max_work=50_000_000)
        assert not found.num_cut_off
        times = sorted(pipeline.seconds(split) for split in every)
        assert [split.seconds for split in found.splits] == pytest.approx(times[:5], rel=1e-8)
        assert all(split.split in every for split in found.splits)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_it_is_the_best_of_all(batch: int) -> None:
    """Devices up to 2.3 times as fast as others: which one is the busiest changes with the split."""
    space = space_of(NUM_STAGES, num_layers=NUM_LAYERS, batch=batch, search={"schedule": "1f1b"})
    plan = space.baseline
    slots = slot_indices(space.nodes, plan.mapping)
    for seed in range(6):
        truth = truth_of(space, seed)
        model = truth._iteration_models.split_model(plan)
        calibrated = CalibratedSplits(model=model, point=truth.theta)
        pipeline = Pipeline(calibrated.times(slots, plan.mapping))
        found = best_splits(calibrated, [(slots, plan.mapping)], num_layers=NUM_LAYERS, max_work=50_000_000)
        assert not found.num_cut_off
        times = sorted(pipeline.seconds(split) for split in every_split(NUM_LAYERS, NUM_STAGES))
        assert found.splits[0].seconds == pytest.approx(times[0], rel=1e-8)
        # Extrapolated times are convex in the layers up to the error of the extrapolation.
        close = 1e-8 if batch == BATCHES["one by one"] else 1e-3
        assert [split.seconds for split in found.splits] == pytest.approx(times[:5], rel=close)
