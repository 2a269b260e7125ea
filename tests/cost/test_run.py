"""Runs under limits of their experts' tokens, and with inputs of their graphs."""

from typing import Any

import pytest

from quartet_plugin.cost import communication
from quartet_plugin.cost.compute import Rates, layer_times
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.memory import layer_activation_bytes, peak_memory, stage_activations
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.cost.software import with_settings
from quartet_plugin.model.megatron_arguments import expert_capacity_of
from tests.cost.runs import EXPERTS, PIPELINE, run

TOKENS, CHOSEN, NUM_EXPERTS = 4096, 6, 160


def limited(row: dict[str, Any] = EXPERTS, **knobs: Any) -> TrainingRun:
    return run(row, knobs={f"moe_{name}": value for name, value in knobs.items()})


PADDED: dict[str, Any] = {"pad_expert_input_to_capacity": True}


@pytest.mark.parametrize(
    ("factor", "padded", "dropped"),
    [
        (1.0, 154 / 153.6, 154 / 153.6),  # each expert of a rank's tokens takes a whole number
        (1.25, 1.25, 1.1),
        (0.5, 77 / 76.8 / 2, 77 / 76.8 / 2),
        (-1.0, 1.1, 1.1),
    ],
)
def test_experts_take_what_their_capacity_pads_or_leaves(
    factor: float, padded: float, dropped: float
) -> None:
    assert limited().expert_load == 1.1
    assert limited(expert_capacity_factor=factor, **PADDED).expert_load == pytest.approx(padded)
    assert limited(expert_capacity_factor=factor).expert_load == pytest.approx(dropped)


def test_a_rank_counts_the_tokens_of_its_part_of_the_sequence() -> None:
    knobs = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    made = run(EXPERTS, tp=8, dp=1, ep=1, sp=True, gbs=32, knobs=knobs)
    # 512 tokens choose 3072 experts, 19.2 each.
    assert made.expert_load == pytest.approx(20 / 19.2)


def test_times_and_memory_follow_a_capacity() -> None:
    constants = fitted()
    usual, padded = limited(), limited(expert_capacity_factor=2.2, **PADDED)
    times = [
        layer_times(each, constants, Rates(each, constants), experts=each.experts) for each in (usual, padded)
    ]
    assert times[1].routed_experts.total_s > 1.5 * times[0].routed_experts.total_s
    assert times[1].shared_into == times[0].shared_into
    assert usual.experts is not None
    assert padded.experts is not None
    exchanges = [
        communication.expert_parallel(each, constants, experts).forward_s
        for each, experts in ((usual, usual.experts), (padded, padded.experts))
    ]
    assert exchanges[1] == pytest.approx(2 * exchanges[0], rel=0.05)
    more = layer_activation_bytes(padded, experts=padded.experts)
    more -= layer_activation_bytes(usual, experts=usual.experts)
    routed = 2 * (5120 + 3 * 1536)
    assert more == pytest.approx(TOKENS * CHOSEN * routed * (padded.expert_load - 1.1))
    assert padded.kept_share == padded.expert_load
    assert limited(expert_capacity_factor=2.2).kept_share == 1.0


def test_buffers_of_a_ranks_limit_have_its_size() -> None:
    """Its products are those of the tokens that arrive."""
    usual, made = limited(), limited(expert_rank_capacity_factor=1.5)
    assert (made.expert_load, made.held_expert_load) == (1.1, 1.5)
    assert limited(expert_rank_capacity_factor=1.05).expert_load == 1.05
    more = layer_activation_bytes(made, experts=made.experts)
    more -= layer_activation_bytes(usual, experts=usual.experts)
    assert more == pytest.approx(TOKENS * CHOSEN * 2 * (5120 + 3 * 1536) * 0.4)


@pytest.mark.parametrize(
    ("factor", "held"),
    [
        ({}, 1.1),
        ({"paged_stash_buffer_size_factor_cuda": 1.3}, 1.3),
        ({"paged_stash_buffer_size_factor_cuda": -1.2}, 1.2 * 1.1),
    ],
)
def test_a_stash_has_pages_for_its_part_of_the_mean_tokens(factor: dict[str, Any], held: float) -> None:
    narrow = EXPERTS | {"precision": "MXFP8"}
    made = limited(narrow, expert_rank_capacity_factor=1.5, paged_stash=True, **factor)
    assert made.held_expert_load == pytest.approx(held)
    assert limited(expert_rank_capacity_factor=1.5, paged_stash=True, **factor).held_expert_load == 1.5
    bare = limited(narrow, expert_rank_capacity_factor=1.5)
    more = peak_memory(made).temporary_bytes - peak_memory(bare).temporary_bytes
    assert more == pytest.approx(2 * TOKENS * CHOSEN * 1.5 * 2 * (5120 + 3 * 1536))


def test_a_stash_needs_a_ranks_limit() -> None:
    assert expert_capacity_of({"moe_paged_stash": True}) is None
    capacity = expert_capacity_of({"moe_expert_capacity_factor": 1.5, "moe_paged_stash": True})
    assert capacity is not None
    assert capacity.stash_factor is None


def test_transformer_engines_graphs_of_attention_have_a_mask_a_layer_and_microbatch() -> None:
    def kept(impl: str, *scope: str) -> list[float]:
        knobs = {"cuda_graph_impl": impl, "cuda_graph_scope": list(scope)}
        kept_bytes: list[float] = stage_activations(run(PIPELINE, knobs=knobs))[0].tolist()
        return kept_bytes

    bare = kept("none")
    with_masks = kept("transformer_engine", "attn")
    layers = run(PIPELINE).layers_per_stage
    assert with_masks == [each + num * 1024**2 for each, num in zip(bare, layers, strict=True)]
    assert kept("local", "attn") == kept("transformer_engine", "mlp") == bare
    knobs = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["mlp"]}
    software = run(PIPELINE, knobs=knobs).software
    assert with_settings(software, {"cuda_graph_modules": "attn+mlp"}).graphed_attention
    assert not with_settings(software, {"cuda_graph_modules": "mlp"}).graphed_attention
