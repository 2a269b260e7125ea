"""FLOPs of models with experts and latent attention."""

from quartet_plugin.model.job_description import Experts, LatentAttention, model_flops_per_sequence
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
