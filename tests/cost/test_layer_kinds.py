"""A hybrid model's layers by their kinds: what each takes, and what stages hold."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.iteration.terms import stage_parts, stage_sums
from quartet_plugin.cost.layer_kinds import layers_before, sequence_of
from quartet_plugin.cost.memory import (
    layer_activation_bytes,
    memory_by_device,
    peak_memory,
    stage_activations,
    weights_of_stages,
)
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.model.job_description import Experts
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.planner.job import PlanRequest, parse_job
from tests.model.plans import LAYOUT
from tests.planner.planning import job_data, with_pattern

EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 1024}


def job(pattern: str = "", **changes: Any) -> PlanRequest:
    """A job on eight devices, its layers those of the pattern."""
    made = parse_job(job_data(model={"num_layers": 8, "position_embedding": "rope", **changes}), where="job")
    return with_pattern(made, pattern) if pattern else made


def layout() -> Layout:
    """Two tensor-parallel, two pipeline and two data-parallel ranks."""
    return replace(
        LAYOUT,
        tensor_parallel=2,
        pipeline_parallel=2,
        data_parallel=2,
        micro_batch_size=1,
        sequence_parallel=True,
    )


def run(job: PlanRequest, *split: int, **changes: Any) -> TrainingRun:
    return job.run(job.shape, replace(layout(), **changes), split)


def stage_s(run: TrainingRun) -> list[float]:
    """Seconds of a microbatch on each stage."""
    return [times.total_s for times in stage_sums(stage_parts(run, fitted()))]


def quantities(run: TrainingRun) -> list[float]:
    """Seconds, weights and bytes of everything that a run's layers have."""
    prediction, weights = predict(run, fitted()), weights_of_stages(run)
    kept, held = stage_activations(run)
    return [
        *prediction.terms.values(),
        *(each for stage in weights for each in (stage.num_dense, stage.num_expert)),
        *(sum(memory.terms.values()) for memory in memory_by_device(run)),
        *held.tolist(),
        *kept.tolist(),
    ]


@pytest.mark.parametrize("model", [{}, {"gated_ffn": True}, EXPERTS])
@pytest.mark.parametrize(
    "changes",
    [{}, {"recompute": "full"}, {"recompute": "selective"}, {"context_parallel": 2, "data_parallel": 1}],
)
def test_attention_and_an_ffn_make_a_transformer_layer(model: dict[str, Any], changes: Any) -> None:
    """Their seconds and bytes, their exchanges among devices, and what recompute repeats of them."""
    letters = "*E" if model is EXPERTS else "*-"
    # Layers so large that no device waits for its host.
    model = {**model, "hidden_size": 4096, "seq_length": 8192}
    pairs = run(job(8 * letters, **model), 8, 8, **changes)
    plain = run(job(**model), 4, 4, **changes)
    assert stage_s(pairs) == pytest.approx(stage_s(plain))
    if changes.get("recompute") != "full":
        assert quantities(pairs) == pytest.approx(quantities(plain))
    else:
        # Each letter is a layer whose input is kept.
        assert stage_activations(pairs)[0][0] > stage_activations(plain)[0][0]


def with_depth(job: PlanRequest, kinds: LayerKinds | None) -> PlanRequest:
    """The job with one layer of multi-token prediction."""
    shape = replace(job.shape, tied_embeddings=False)
    return replace(job, shape=shape, mtp_layers=1, mtp_kinds=kinds)


@pytest.mark.parametrize("model", [{}, EXPERTS])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_attention_and_an_ffn_make_a_layer_of_multi_token_prediction(
    model: dict[str, Any], recompute: str
) -> None:
    letters = "*E" if model is EXPERTS else "*-"
    model = {**model, "hidden_size": 4096, "seq_length": 8192}
    routed = model.get("num_experts") is not None
    depth = LayerKinds(attention=1, mlp=int(not routed), experts=int(routed), state_space=0)
    pairs = run(with_depth(job(8 * letters, **model), depth), 8, 8, recompute=recompute)
    plain = run(with_depth(job(**model), None), 4, 4, recompute=recompute)
    assert stage_s(pairs) == pytest.approx(stage_s(plain))
    assert quantities(pairs) == pytest.approx(quantities(plain))


def test_a_depth_takes_what_its_letters_take() -> None:
    """On long sequences attention takes far more time than a state-space layer with many weights."""

    def last_stage(letters: str) -> tuple[float, float, float]:
        made = with_pattern(job(seq_length=65_536), "MMMM****", projected_size=16_384)
        empty = LayerKinds(attention=0, mlp=0, experts=0, state_space=0, projected_size=16_384)
        kinds = empty.with_pattern(letters)
        run_with = run(with_depth(made, kinds), 4, 4)
        weights = weights_of_stages(run_with)[-1].num_total
        return stage_s(run_with)[-1], weights, float(stage_activations(run_with)[0][-1])

    attention, state_space, both = (
        last_stage("*"),
        last_stage("M"),
        last_stage("*M"),
    )
    assert attention[0] > 1.1 * state_space[0]
    assert attention[1] < state_space[1]
    two = last_stage("**")
    for first, other, more, double in zip(attention, state_space, both, two, strict=True):
        assert more - other == pytest.approx(double - first)


def test_a_stage_takes_what_its_letters_take() -> None:
    """Attention together on the second stage, or shared: the same model, another price."""
    made = {"seq_length": 32_768}
    apart, mixed = (run(job(pattern, **made), 4, 4) for pattern in ("MMMM****", "M*M*M*M*"))
    first, last = stage_s(apart)
    assert last > 3 * first
    even = stage_s(mixed)
    ends = stage_s(run(job("M" * 8, **made), 4, 4))
    assert even[1] - even[0] == pytest.approx(ends[1] - ends[0])
    assert sum(even) == pytest.approx(first + last)
    moved = run(job("MMMM****", **made), 5, 3)
    seconds = [predict(each, fitted()).iter_time_s for each in (apart, moved, mixed)]
    assert seconds[0] > 1.2 * seconds[1]
    assert seconds[0] > 1.3 * seconds[2]
    assert (
        predict(apart, fitted()).iter_time_s
        > predict(run(job("MMMM****", **made), 5, 3), fitted()).iter_time_s
    )


def test_a_stage_holds_what_its_letters_hold() -> None:
    """State-space layers with many weights on the first stage, attention with few on the second."""
    wide = with_pattern(job(), "MMMM****", projected_size=16_384)
    mixed = with_pattern(job(), "M*M*M*M*", projected_size=16_384)
    apart, shared = run(wide, 4, 4), run(mixed, 4, 4)
    weights = [stage.num_total for stage in weights_of_stages(apart)]
    assert weights[0] > 1.9 * weights[1]
    assert sum(weights) == pytest.approx(sum(stage.num_total for stage in weights_of_stages(shared)))
    kept, even = stage_activations(apart)[0], stage_activations(shared)[0]
    assert kept[0] > 2 * kept[1]
    assert kept.sum() == pytest.approx(even.sum())
    assert peak_memory(apart).total_bytes > 1.2 * peak_memory(shared).total_bytes


def test_experts_are_on_the_stages_of_their_letters() -> None:
    made = run(job("MM**EEMM", **EXPERTS), 4, 4)
    first, last = weights_of_stages(made)
    assert first.num_expert == 0.0 < last.num_expert
    spread = run(job("MM**EEMM", **EXPERTS), 4, 4, expert_parallel=2)
    parts = stage_parts(spread, fitted())
    assert parts[0]["ep_comm"].total_s == 0.0
    assert parts[1]["ep_comm"].total_s > 0.0


def test_block_recompute_repeats_the_first_letters_of_a_stage() -> None:
    """The letters behind them keep everything."""
    made = run(job("*---*---"), 4, 4)
    attention, mlp = (layer_activation_bytes(kind_run, experts=None) for kind_run, _ in made.runs_by_kind)
    kept = [
        stage_activations(replace(run(job(pattern), 4, 4, recompute="full"), recomputed_layers=1))[0][0]
        for pattern in ("*---*---", "---*---*")
    ]
    assert kept[1] - kept[0] == pytest.approx(attention - mlp)


def test_without_a_pattern_every_layer_is_the_mean_one() -> None:
    shape = job("MM*-M*M*").shape.without_pattern
    made = job()
    hybrid, mean = (made.run(each, layout(), (4, 4)) for each in (shape, shape.mean))
    assert hybrid == mean
    assert not hybrid.kinds
    # A run of another number of layers, too.
    pattern = job("MM*-M*M*")
    assert pattern.run(pattern.shape, layout(), (5, 5)) == made.run(shape, layout(), (5, 5))


def test_the_layers_before_each_layer_are_counted_by_kind() -> None:
    assert layers_before("M*-M", "*-M").tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1, 1, 2]]
    experts = Experts(num_experts=4, experts_per_token=2, ffn_hidden_size=64, num_dense_layers=3)
    assert sequence_of(5, experts, "") == "---EE"
    assert sequence_of(2, experts, "") == "--"
    assert sequence_of(2, None, "") == "--"
    assert sequence_of(3, experts, "M*E") == "M*E"
    made = job("MM**EEMM", **EXPERTS)
    counts = run(made, 5, 3).layer_counts
    assert np.sum(counts, axis=0).tolist() == [2, 2, 4]
    assert counts == [(2, 1, 2), (0, 1, 2)]
