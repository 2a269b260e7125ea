"""Activations on the host: bytes that leave a device by module, and seconds of copies that nothing hides."""

from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.cost.activation_offload import LEAST_ELEMENTS, exposed, layer_bytes
from quartet_plugin.cost.compute import Rates, layer_times
from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.iteration.plan_terms import unit_arrays
from quartet_plugin.cost.iteration.terms import unit_parts
from quartet_plugin.cost.memory import layer_activation_bytes, peak_memory, stage_activations
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import ON_CPU, TrainingRun
from quartet_plugin.cost.software import with_settings
from tests.cost.runs import EXPERTS, run
from tests.cost.test_memory import LLAMA

TOKENS, HIDDEN = 4096, 8192
# Of a device: 32 heads and 4 groups of 128, in bf16.
QUERIES, KEYS = 2 * TOKENS * 32 * 128, 2 * TOKENS * 4 * 128


def dense(**changes: Any) -> TrainingRun:
    return run(LLAMA, **{"tp": 2, "dp": 4, "gbs": 16, **changes})


def offloading(modules: str, of: TrainingRun) -> TrainingRun:
    return replace(of, software=with_settings(of.software, {"offload_modules": modules}))


@pytest.mark.parametrize(
    ("modules", "freed", "copied"),
    [
        ("none", 0, 0),
        # The output of attention stays on the device for the product behind it.
        ("core_attn", QUERIES + 2 * KEYS, 2 * QUERIES + 2 * KEYS),
        ("attn_proj+core_attn", 2 * QUERIES + 2 * KEYS, 3 * QUERIES + 2 * KEYS),
        # The norm's input and output, of which a device has half.
        ("qkv_linear", 2 * TOKENS * HIDDEN, 2 * TOKENS * HIDDEN),
        ("mlp_norm+moe_act", 0, 0),
    ],
)
def test_bytes_of_a_dense_layer(modules: str, freed: int, copied: int) -> None:
    assert layer_bytes(offloading(modules, dense()), experts=None) == (freed, copied)


def test_bytes_of_experts_and_latent_attention() -> None:
    usual = run(EXPERTS, recompute="none")
    experts, latent = usual.experts, usual.latent
    assert experts is not None
    assert latent is not None

    def freed(modules: str, of: TrainingRun = usual) -> float:
        return layer_bytes(offloading(modules, of), experts=experts).freed_bytes

    tokens, hidden = usual.tokens_per_microbatch, usual.shape.hidden_size
    routed = tokens * experts.experts_per_token * usual.expert_load
    assert freed("attn_norm") == freed("mlp_norm") == 2 * tokens * hidden
    assert freed("expert_fc1") == pytest.approx(2 * routed * hidden)
    assert freed("moe_act") == pytest.approx(2 * routed * 2 * experts.ffn_hidden_size)
    assert freed("fused_group_mlp") == pytest.approx(freed("expert_fc1") + freed("moe_act"))
    wide = latent.qk_head_dim + latent.qk_pos_emb_head_dim
    heads = 2 * tokens * usual.shape.num_attention_heads
    assert freed("core_attn") == heads * (2 * wide + latent.v_head_dim)
    every = "attn_norm+attn_proj+core_attn+expert_fc1+mlp_norm+moe_act+qkv_linear"
    assert freed(every) < layer_activation_bytes(usual, experts=experts)
    # What recompute makes again is not left out twice.
    again = replace(
        usual,
        layout=replace(usual.layout, recompute="selective"),
        recomputed_modules=("mla_up_proj",),
    )
    assert freed("core_attn", again) == 0.0
    norms = replace(again, recomputed_modules=("layernorm",))
    assert freed("qkv_linear") - freed("qkv_linear", norms) == 2 * tokens * hidden


def test_a_module_that_is_recomputed_copies_nothing() -> None:
    again = dense(recompute="selective")
    assert layer_bytes(offloading("core_attn", again), experts=None) == (0.0, 0.0)
    assert layer_bytes(offloading("attn_proj+core_attn", again), experts=None) == (QUERIES, QUERIES)


def test_small_tensors_stay() -> None:
    few = dense(seq_len=LEAST_ELEMENTS // (4 * 128) // 2)
    assert few.tokens_per_microbatch * 4 * 128 < LEAST_ELEMENTS
    left = layer_bytes(offloading("core_attn", few), experts=None).freed_bytes
    assert left == 2 * few.tokens_per_microbatch * 32 * 128


def test_the_device_holds_less_but_for_the_last_layer() -> None:
    usual = dense()
    without = offloading("attn_proj+core_attn", usual)
    each = layer_bytes(without, experts=None).freed_bytes
    held, left = (stage_activations(found)[0][0] for found in (usual, without))
    assert held - left == pytest.approx(12 * each)
    before, after = peak_memory(usual), peak_memory(without)
    assert before.activations_bytes - after.activations_bytes == pytest.approx(12 * each)
    assert after.temporary_bytes - before.temporary_bytes == pytest.approx(each)


def on_link(of: TrainingRun, rate: float) -> TrainingRun:
    device = replace(of.cluster.device, host_link_bytes_per_s=rate)
    return replace(of, cluster=replace(of.cluster, device=device))


def test_copies_that_a_pass_does_not_hide_take_time() -> None:
    usual, constants = offloading("core_attn", dense()), Constants()
    copied = layer_bytes(usual, experts=None).copied_bytes
    layer = layer_times(usual, constants, Rates(usual, constants), experts=None)
    forward_s, input_grad_s, weight_grad_s = layer.total
    # As many seconds as the forward, and the half more that the backward hides.
    rate = copied / (1.5 * forward_s)
    assert 1.5 * forward_s < input_grad_s + weight_grad_s
    left = exposed(on_link(usual, rate), layer, experts=None)
    assert list(left) == pytest.approx([0.5 * forward_s, 0.0, 0.0])
    slow = exposed(on_link(usual, 1.0), layer, experts=None)
    assert slow.input_grad_s == pytest.approx(copied - input_grad_s - weight_grad_s)
    assert sum(exposed(on_link(usual, 1e15), layer, experts=None)) == 0.0


def test_a_prediction_has_the_seconds_of_copies_as_a_term() -> None:
    usual, constants = dense(gpus=2, dp=1, gbs=4, zero=0), Constants()
    slow = on_link(offloading("core_attn", usual), 1e10)
    before, after = predict(usual, constants), predict(slow, constants)
    assert "offload_s" not in before.terms
    assert after.iter_time_s - before.iter_time_s == pytest.approx(after.terms["offload_s"], rel=1e-6)
    fast = predict(on_link(slow, 1e15), constants)
    assert fast.iter_time_s == pytest.approx(before.iter_time_s)
    assert fast.terms["offload_s"] == 0.0


def test_the_iteration_model_has_them_too() -> None:
    slow = on_link(offloading("core_attn", dense()), 1e10)
    parts = unit_parts(slow, Constants())
    arrays, seconds = unit_arrays(parts), sum(sum(times) for times in parts.layers[0].values())
    assert arrays.compute[0].sum() + arrays.unslowed[0].sum() == pytest.approx(seconds)


def test_processors_have_no_host() -> None:
    assert with_settings(ON_CPU, {"offload_modules": "core_attn"}).offloaded_modules == ()
