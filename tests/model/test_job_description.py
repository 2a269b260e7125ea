"""FLOPs of models with experts and latent attention, and the mean layer of a hybrid model."""

from dataclasses import replace

import pytest

from quartet_plugin.model.job_description import (
    Experts,
    LatentAttention,
    mean_layers,
    model_flops_per_sequence,
)
from quartet_plugin.model.shape import LayerKinds, ModelShape
from tests.space.jobs import make_shape


def test_the_flops_of_a_dense_model_are_the_shapes() -> None:
    shape = make_shape(num_query_groups=2, gated_ffn=True)
    assert model_flops_per_sequence(shape) == shape.model_flops_per_sequence


def test_experts_count_as_far_as_a_token_uses_them() -> None:
    shape = make_shape()
    router = 3 * 2 * shape.seq_length * shape.num_layers * shape.hidden_size * 8
    half = shape.ffn_hidden_size // 2
    experts = Experts(num_experts=8, experts_per_token=1, ffn_hidden_size=half, shared_ffn_hidden_size=half)
    assert model_flops_per_sequence(shape, experts=experts) == shape.model_flops_per_sequence + router
    dense = Experts(
        num_experts=8, experts_per_token=8, ffn_hidden_size=9999, num_dense_layers=shape.num_layers
    )
    assert model_flops_per_sequence(shape, experts=dense) == shape.model_flops_per_sequence


def test_latent_attention_counts_its_five_products() -> None:
    """DeepSeek-V3: 37 B parameters work on a token, the vocabulary's head counted and its table not."""
    shape = make_shape(
        num_layers=61,
        hidden_size=7168,
        ffn_hidden_size=18432,
        num_attention_heads=128,
        num_query_groups=128,
        kv_channels=128,
        seq_length=4096,
        vocab_size=129280,
        gated_ffn=True,
        tied_embeddings=False,
    )
    experts = Experts(
        num_experts=256,
        experts_per_token=8,
        ffn_hidden_size=2048,
        shared_ffn_hidden_size=2048,
        num_dense_layers=3,
    )
    flops = model_flops_per_sequence(shape, experts=experts, latent_attention=LatentAttention())
    scores = 3 * 61 * 4096**2 * 128 * (128 + 64 + 128)
    active = (flops - scores) / (6 * 4096)
    assert 36e9 < active < 37.5e9


def test_layers_of_a_hybrid_model_share_its_experts() -> None:
    """Nemotron 3 Nano: 31.6 billion weights, of which a token uses 3.6 billion with embedding and head."""
    shape = ModelShape(
        num_layers=52,
        hidden_size=2688,
        ffn_hidden_size=1856,
        num_attention_heads=32,
        num_query_groups=2,
        kv_channels=128,
        seq_length=8192,
        vocab_size=131_072,
        max_position_embeddings=8192,
        gated_ffn=False,
        tied_embeddings=False,
        position_embedding="none",
        layer_kinds=LayerKinds(
            attention=6, mlp=0, experts=23, state_space=23, projected_size=3 * 64 * 64 + 2 * 8 * 128 + 64
        ),
    )
    experts = Experts(num_experts=128, experts_per_token=6, ffn_hidden_size=1856, shared_ffn_hidden_size=3712)
    mean, shared = mean_layers(shape, experts)
    assert shared is not None
    others = mean.num_parameters - mean.num_layers * 2 * mean.hidden_size * mean.ffn_hidden_size

    def weights(num_experts: int) -> int:
        width = num_experts * shared.ffn_hidden_size + shared.shared_ffn_hidden_size
        return others + mean.num_layers * 2 * mean.hidden_size * width

    assert weights(shared.num_experts) == pytest.approx(31.6e9, rel=0.01)
    assert weights(shared.experts_per_token) == pytest.approx(3.6e9, rel=0.01)
    assert mean_layers(shape, None) == (shape.mean, None)
    plain = replace(shape, layer_kinds=None)
    assert mean_layers(plain, experts) == (plain, experts)
