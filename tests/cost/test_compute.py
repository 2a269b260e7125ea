"""Compute times: FLOPs written out, and the directions that must hold."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.cost.compute import (
    FLASH_BLOCK,
    LayerTimes,
    Rates,
    _experts,
    half_rate,
    head_times,
    layer_times,
    products,
    waves,
)
from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.devices import device_named
from quartet_plugin.cost.memory import peak_memory
from quartet_plugin.cost.run import Software
from quartet_plugin.model.job_description import Experts
from quartet_plugin.model.packed_lengths import PackedLengths
from tests.cost.runs import EXPERTS, PIPELINE, ROW, run

CONSTANTS = Constants()


def layer(row: dict[str, Any] = ROW, **changes: Any) -> LayerTimes:
    found = run(row, **changes)
    return layer_times(found, CONSTANTS, Rates(found, CONSTANTS), experts=found.experts)


def test_products_hold_the_layers_weights() -> None:
    found = run(PIPELINE)
    weights = sum(n * k for n, k in products(found)) + 2 * 5120 * 20480
    assert weights == found.shape.matrix_parameters_per_layer


def test_a_large_product_runs_at_the_rate_and_a_small_one_is_slower() -> None:
    found = run(PIPELINE)
    rates = Rates(found, CONSTANTS)
    large = 2 * 16384**3 / rates.gemm_s(16384, 16384, 16384)
    small = 2 * 256**3 / rates.gemm_s(256, 256, 256)
    assert 0.93 * rates.matmul < large <= rates.matmul
    assert small < 0.2 * rates.matmul


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 300))
def test_waves_never_speed_up(m: int, n: int, units: int) -> None:
    assert waves(m, n, units) >= 1.0


def test_one_tile_too_many_costs_a_wave() -> None:
    whole = waves(256 * 10, 128 * 10, 100)
    assert whole == 1.0
    assert waves(256 * 10, 128 * 11, 100) > 1.3


def test_power_limits_half_precision_on_newer_devices_only() -> None:
    a100, h100, b200 = (device_named(name) for name in ("A100", "H100", "B200"))
    assert half_rate(a100, "bf16", CONSTANTS) == a100.ceiling_flops("bf16") * CONSTANTS.gemm_rate
    assert half_rate(b200, "bf16", CONSTANTS) == 1000 * CONSTANTS.flops_per_joule
    capped = device_named("H100-SXM-96GB HBM2e (500 W)")
    assert half_rate(capped, "bf16", CONSTANTS) < half_rate(h100, "bf16", CONSTANTS)


def test_tensor_parallel_shares_the_work() -> None:
    one, eight = layer(tp=1, dp=8, gbs=32), layer(tp=8)
    assert one.gemm.total_s == pytest.approx(8 * eight.gemm.total_s, rel=0.1)
    assert one.attention.total_s == pytest.approx(8 * eight.attention.total_s, rel=0.05)


def test_sequence_parallel_shares_norms_and_residuals() -> None:
    assert layer(sp=True).elementwise.total_s < 0.7 * layer(sp=False).elementwise.total_s


def test_recompute_repeats_what_it_says() -> None:
    none, selective, full = (layer(recompute=mode) for mode in ("none", "selective", "full"))
    assert none.recompute_s == 0
    assert selective.recompute_s == selective.attention.forward_s
    assert full.recompute_s == pytest.approx(full.total.forward_s)
    # 12 of a stage's 48 layers.
    part = layer(recompute="full", knobs={"recompute_num_layers": 12})
    assert part.recompute_s == pytest.approx(full.recompute_s / 4)
    assert layer(recompute="full", knobs={"recompute_num_layers": 50}).recompute_s == full.recompute_s


def test_modules_repeat_their_forward() -> None:
    def repeated(row: dict[str, Any], *modules: str) -> float:
        found = replace(run(row, recompute="selective"), recomputed_modules=modules)
        return layer_times(found, CONSTANTS, Rates(found, CONSTANTS), experts=found.experts).recompute_s

    forward = layer(recompute="none").total.forward_s
    assert 0.5 * forward < repeated(ROW, "mlp") < forward
    both = repeated(ROW, "core_attn", "mlp")
    assert both == pytest.approx(repeated(ROW, "core_attn") + repeated(ROW, "mlp"))
    assert 0 < repeated(EXPERTS, "moe_act") < 0.2 * repeated(EXPERTS, "moe")
    assert repeated(ROW, "moe") == repeated(EXPERTS, "mlp") == 0
    assert repeated(EXPERTS, "moe") < layer(EXPERTS).total.forward_s


def test_early_stop_spares_the_last_product() -> None:
    composer = layer(PIPELINE, recompute="full", software="MosaicML Composer FSDP")
    assert 0.6 * composer.total.forward_s < composer.recompute_s < 0.9 * composer.total.forward_s


def test_fused_attention_is_faster_and_causal() -> None:
    assert layer(software="Megatron-Core").attention.total_s < 0.5 * layer().attention.total_s
    short, long = (layer(software="Megatron-Core", seq_len=n, mbs=8192 // n) for n in (4096, 8192))
    assert long.attention.total_s == pytest.approx(2 * short.attention.total_s, rel=0.03)


def test_fp8_speeds_up_products_and_pays_for_casts() -> None:
    changes: dict[str, Any] = {"gpu": "H100-SXM-80GB", "software": "NeMo"}
    half, low = layer(precision="bf16", **changes), layer(precision="fp8", **changes)
    assert low.gemm.total_s < 0.65 * half.gemm.total_s
    assert low.elementwise.total_s > half.elementwise.total_s
    assert low.attention.total_s == half.attention.total_s


def test_a_cast_to_4_bits_moves_more_bytes_than_one_to_8() -> None:
    """7 bytes an element against 4, which is all that differs of the elementwise part."""
    half, byte, nibble = (
        layer(precision=precision, gpu="B200-SXM-180GB", software="NeMo").elementwise.total_s
        for precision in ("bf16", "mxfp8", "nvfp4")
    )
    assert (nibble - half) / (byte - half) == pytest.approx(7 / 4)


def test_experts_cost_by_what_is_routed() -> None:
    few, many = layer(EXPERTS, topk=2), layer(EXPERTS, topk=8)
    assert 1.5 < many.gemm.total_s / few.gemm.total_s < 4
    spread = layer(EXPERTS, experts=1600)
    assert spread.gemm.total_s > layer(EXPERTS).gemm.total_s


def test_permuted_tokens_have_the_layers_precision() -> None:
    experts = Experts(num_experts=8, experts_per_token=2, ffn_hidden_size=64)
    half = replace(run(), experts=experts)
    whole = replace(half, half="fp32")
    moved = [_experts(each, Rates(each, CONSTANTS), experts)[2] for each in (half, whole)]
    assert moved[1] == 2 * moved[0] > 0


def test_the_head_pays_for_the_vocabulary() -> None:
    found = run(PIPELINE)
    times = head_times(found, CONSTANTS, Rates(found, CONSTANTS))
    shape = replace(found.shape, vocab_size=4 * found.shape.vocab_size)
    larger = head_times(replace(found, shape=shape), CONSTANTS, Rates(found, CONSTANTS))
    assert larger.gemm.total_s == pytest.approx(4 * times.gemm.total_s, rel=0.1)
    assert larger.elementwise.total_s == pytest.approx(4 * times.elementwise.total_s)


def test_attention_of_packed_sequences_follows_the_squares_of_their_documents() -> None:
    """Sixteen equal documents a sequence: a sixteenth of the scores, and all diagonal blocks as before."""
    row = {**ROW, "seq_len": 16384, "mbs": 1, "tp": 1, "dp": 8, "gbs": 8, "sp": False}
    whole = replace(run(row), software=Software())
    packed = PackedLengths(tokens_per_sequence=16384.0, squares_per_sequence=16 * 1024.0**2)
    documents = replace(whole, packed=packed)
    rates = Rates(whole, CONSTANTS)
    times, usual = (layer_times(each, CONSTANTS, rates, experts=None) for each in (documents, whole))
    work = (16 * 1024**2 + FLASH_BLOCK * 16384) / (16384**2 + FLASH_BLOCK * 16384)
    assert times.attention.forward_s == pytest.approx(work * usual.attention.forward_s)
    assert times.attention.input_grad_s == pytest.approx(work * usual.attention.input_grad_s)
    assert (times.gemm, times.elementwise) == (usual.gemm, usual.elementwise)
    # One document that fills each sequence is the sequence.
    alone = PackedLengths(tokens_per_sequence=16384.0, squares_per_sequence=16384.0**2)
    same = layer_times(replace(whole, packed=alone), CONSTANTS, rates, experts=None)
    assert same.total == pytest.approx(usual.total)


def test_unfused_attention_of_packed_sequences_has_scores_of_each_document() -> None:
    whole = run(ROW, recompute="none")
    assert whole.software.attention == "unfused"
    packed = PackedLengths(tokens_per_sequence=2048.0, squares_per_sequence=2 * 1024.0**2)
    halves = replace(whole, packed=packed)
    rates = Rates(whole, CONSTANTS)
    times, usual = (layer_times(each, CONSTANTS, rates, experts=None) for each in (halves, whole))
    assert 0.4 < times.attention.forward_s / usual.attention.forward_s < 0.7
    assert peak_memory(halves).activations_bytes < peak_memory(whole).activations_bytes
