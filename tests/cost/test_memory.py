"""Peak memory: weights and activations written out, and published peaks."""

from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.iteration.step import clearing_s, held_layers, optimizer_s
from quartet_plugin.cost.memory import (
    Weights,
    layer_activation_bytes,
    peak_memory,
    stage_activations,
    weights_of_stages,
)
from quartet_plugin.cost.software import with_features, with_settings
from tests.cost.runs import EXPERTS, PIPELINE, ROW, run

GIB = 2**30
LLAMA: dict[str, Any] = ROW | {
    "layers": 12, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "gated_ffn": True,
    "vocab": 128256, "seq_len": 4096, "mbs": 1, "gpu": "B200-SXM-180GB", "gpu_mem_gb": 180,
    "recompute": "none", "zero": 1,
    "precision": "bf16", "software": EXPERTS["software"],
}  # fmt: skip


def test_weights_sum_to_the_shape() -> None:
    found = run(PIPELINE)
    total = sum(stage.num_dense for stage in weights_of_stages(found))
    head = found.shape.embedding_parameters
    assert total == pytest.approx(found.shape.num_parameters + head, rel=1e-3)


def test_activations_of_a_layer_are_korthikantis() -> None:
    found = run(PIPELINE, heads=40)
    s, b, h, a = 1024, 1, 5120, 40
    assert layer_activation_bytes(found, experts=None) == pytest.approx(s * b * h * (34 + 5 * a * s / h))
    split = run(recompute="none")
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    expected = s * b * h / t * (34 + 5 * a * s / h)
    assert layer_activation_bytes(split, experts=None) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "gib"),
    [
        ({}, 32),
        ({"schedule": "ZB-1p"}, 33),
        ({"schedule": "ZB-2p"}, 51),
        ({"vpp": 3, "schedule": "1F1B-I"}, 39),
        ({"mbs": 2, "gbs": 128}, 50),
    ],
)
def test_published_peaks_of_a_pipeline(changes: dict[str, Any], gib: float) -> None:
    """Qi et al. (2024), tables 4 and 10."""
    assert peak_memory(run(PIPELINE, **changes)).total_bytes / GIB == pytest.approx(gib, rel=0.05)


@pytest.mark.parametrize(("tp", "dp", "gib"), [(2, 4, 60.68), (4, 2, 39.07), (8, 1, 28.29)])
def test_published_peaks_with_gated_ffn_and_shards(tp: int, dp: int, gib: float) -> None:
    """A llama of 12 layers on one node, as allocated by Megatron-Core."""
    found = peak_memory(run(LLAMA, tp=tp, dp=dp, gbs=4 * dp))
    assert found.total_bytes / GIB == pytest.approx(gib, rel=0.03)


V3 = {"hidden": 7168, "ffn": 18432, "experts": 256, "topk": 8, "moe_ffn": 2048, "vocab": 129280}
PP2 = {"pp": 2, "dp": 4, "ep": 4, "gbs": 16}


@pytest.mark.parametrize("factor", [1, 8])
@pytest.mark.parametrize(
    ("changes", "gib"), [({}, 45.63), (PP2, 44.70), (V3, 104.30), ({**V3, **PP2}, 114.00)]
)
def test_published_peaks_with_experts(changes: dict[str, Any], gib: float, factor: int) -> None:
    """DeepSeek-V2 and V3 cut to four layers, on eight B200: what Megatron-Core allocated, with a batch and
    with eight times it (SimuMax 1.2, docs/b200/b200_release_v1.2_summary.md).
    """
    batch = factor * changes.get("gbs", EXPERTS["gbs"])
    found = peak_memory(run(EXPERTS, **{**changes, "gbs": batch}))
    assert found.total_bytes / GIB == pytest.approx(gib, rel=0.03)


def test_recompute_and_sharding_save_memory() -> None:
    none, selective, full = (
        peak_memory(run(recompute=m)).activations_bytes for m in ("none", "selective", "full")
    )
    assert none > selective > full
    part = peak_memory(run(recompute="full", knobs={"recompute_num_layers": 12})).activations_bytes
    assert full < part < none
    base: dict[str, Any] = {"tp": 1, "dp": 8, "gbs": 32, "sp": False, "recompute": "full"}
    states = [peak_memory(run(**base, zero=stage)) for stage in (0, 1, 3)]
    assert states[0].optimizer_bytes == pytest.approx(8 * states[1].optimizer_bytes)
    assert states[2].gradients_bytes < 0.3 * states[1].gradients_bytes


def test_stages_of_zero_shard_gradients_and_the_weights_of_experts() -> None:
    base: dict[str, Any] = {"tp": 1, "dp": 8, "gbs": 32, "sp": False}
    first, second = (peak_memory(run(**base, zero=stage)) for stage in (1, 2))
    assert second.gradients_bytes == pytest.approx(first.gradients_bytes / 8)
    for name in ("parameters_bytes", "optimizer_bytes"):
        assert getattr(second, name) == getattr(first, name)
    few, more = (
        peak_memory(run(EXPERTS, gpus=8, dp=8, tp=1, pp=1, ep=1, sp=False, zero=3, fsdp=8, experts=experts))
        for experts in (8, 16)
    )
    for name in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
        assert getattr(more, name) > 1.2 * getattr(few, name)


def test_megatron_fsdp_holds_shards_and_the_layers_that_it_gathers() -> None:
    """Of 22 billion parameters on 8 devices, in 48 layers of 453 million: two are ahead of the third."""
    base = replace(run(dp=8, tp=1, zero=1, sp=False, gbs=32), optimizer_group=8)
    software = with_settings(base.software, {"use_megatron_fsdp": True})
    sharded = replace(base, zero_stage=3, shard_group=8, software=software)
    (weights,) = weights_of_stages(sharded)
    usual, held = peak_memory(base), peak_memory(sharded)
    shard, layer = weights.num_total / 8, (weights.num_total - sharded.end_parameters) / 48
    assert 4e8 < layer < 5e8
    assert held.optimizer_bytes == pytest.approx(usual.optimizer_bytes)
    assert held.gradients_bytes == pytest.approx(software.main_gradient_bytes * shard)
    assert held.parameters_bytes == pytest.approx(2.0 * (shard + sharded.end_parameters + 3 * layer))
    assert held.activations_bytes == usual.activations_bytes
    # The gradients of a billion weights and of a layer wait, where activations leave no room for them.
    waiting = software.main_gradient_bytes * (1e9 + layer)
    assert 0.0 <= held.temporary_bytes - usual.temporary_bytes <= waiting
    assert held.total_bytes < usual.total_bytes - 6e10


def test_megatron_fsdp_gathers_a_small_model_whole() -> None:
    small: dict[str, Any] = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 2048}
    base = run(**small, tp=1, dp=8, sp=False, gbs=32, zero=1)
    software = with_settings(base.software, {"use_megatron_fsdp": True})
    sharded = replace(base, zero_stage=3, shard_group=8, software=software)
    (weights,) = weights_of_stages(sharded)
    assert peak_memory(sharded).parameters_bytes == pytest.approx(2.0 * weights.num_total * (1 + 1 / 8))


def test_an_optimizer_on_the_host_leaves_the_device_and_takes_longer() -> None:
    """Of ten billion parameters on 8 devices: 4 + 2 bytes over the link, 28 through the host's memory."""
    base = replace(run(dp=8, tp=1, zero=1, sp=False), optimizer_group=8)
    host = replace(base, software=with_settings(base.software, {"optimizer_cpu_offload": True}))
    usual, left = peak_memory(base), peak_memory(host)
    assert (left.optimizer_bytes, left.parameters_bytes, left.gradients_bytes) == (
        0.0,
        usual.parameters_bytes,
        usual.gradients_bytes,
    )
    held, constants = Weights(num_dense=8e10, num_expert=0.0), Constants(optimizer=1.0)
    device = replace(base.cluster.device, host_link_bytes_per_s=6e10, host_memory_bytes_per_s=7e10)
    host = replace(host, cluster=replace(host.cluster, device=device))
    counts = held_layers(host, 0)
    added_s = optimizer_s(host, constants, held, counts=counts) - clearing_s(host, constants, held)
    norms_s = 8e10 * 2.0 / (device.memory_bandwidth_bytes_per_s * 0.85)
    assert added_s - norms_s == pytest.approx(1e10 * (6 / 6e10 + 28 / 7e10))
    on_host, on_device = (optimizer_s(each, constants, held, counts=counts) for each in (host, base))
    assert on_host > 3 * on_device


def test_a_part_of_the_optimizer_on_the_host_has_a_part_of_the_price() -> None:
    base = replace(run(dp=8, tp=1, zero=1, sp=False), optimizer_group=8)
    device = replace(base.cluster.device, host_link_bytes_per_s=6e10, host_memory_bytes_per_s=7e10)
    base = replace(base, cluster=replace(base.cluster, device=device))
    runs = {
        part: replace(base, software=with_settings(base.software, {"optimizer_cpu_offload": True, **part_of}))
        for part, part_of in (
            ("all", {}),
            *((part, {"optimizer_offload_fraction": part}) for part in ("1", "0.5", "0.1", "0")),
        )
    }
    usual = peak_memory(base).optimizer_bytes
    left = {part: peak_memory(each).optimizer_bytes / usual for part, each in runs.items()}
    assert left == {"all": 0.0, "1": 0.0, "0.5": 0.5, "0.1": pytest.approx(0.9), "0": 1.0}
    held, constants = Weights(num_dense=8e10, num_expert=0.0), Constants(optimizer=1.0)
    step_s = {
        part: optimizer_s(each, constants, held, counts=held_layers(each, 0)) for part, each in runs.items()
    }
    on_device_s = optimizer_s(base, constants, held, counts=held_layers(base, 0))
    assert step_s["all"] == step_s["1"]
    assert step_s["0"] == pytest.approx(on_device_s)
    # Of ten billion parameters: the device steps the other half in less time than the host needs.
    assert step_s["1"] - step_s["0.5"] == pytest.approx(5e9 * (6 / 6e10 + 28 / 7e10))
    # What is copied beside the device's own step, which hides the host's.
    memory_rate = device.memory_bandwidth_bytes_per_s * 0.85
    host_s, copied_s = 1e9 * 28 / 7e10, 1e9 * 6 / 6e10
    stepped_s = 9e9 * 28 / memory_rate
    cleared_s = on_device_s - 1e10 * 28 / memory_rate
    assert step_s["0.1"] - cleared_s == pytest.approx(copied_s + max(host_s, stepped_s))


def test_modules_that_are_recomputed_are_not_kept() -> None:
    found = run(LLAMA, tp=2, dp=4, gbs=16, recompute="selective")
    kept = {
        modules: stage_activations(replace(found, recomputed_modules=modules))[0][0]
        for modules in (("core_attn",), ("mlp",), ("layernorm",))
    }
    # Two products of a gated FFN and their activation; a fused norm of a dense layer is part of a product.
    assert kept["core_attn",] - kept["mlp",] == pytest.approx(12 * 4096 * 2 * 3 * 28672 / 2)
    assert kept["layernorm",] == kept["core_attn",]
    experts = run(EXPERTS, recompute="selective")
    sizes = {
        modules: peak_memory(replace(experts, recomputed_modules=modules)).activations_bytes
        for modules in (("core_attn",), ("moe_act",), ("moe",), ("layernorm",))
    }
    assert sizes["moe",] < sizes["moe_act",] < sizes["core_attn",]
    assert sizes["layernorm",] < sizes["core_attn",]


def test_what_is_recomputed_is_there_for_a_while() -> None:
    """A layer with experts, or their module, is made again before its gradients."""
    small = {"seq_len": 8192, "vocab": 1024}
    spread = run(EXPERTS, **small)
    modules = {
        names: replace(run(EXPERTS, **small, recompute="selective"), recomputed_modules=names)
        for names in ((), ("moe",))
    }
    dense = replace(run(EXPERTS, **small, recompute="full"), experts=None)
    full = run(EXPERTS, **small, recompute="full")
    again = [peak_memory(found).temporary_bytes for found in (*modules.values(), dense, full)]
    assert again[1] > again[0]
    assert again[3] > again[2]
    assert again[3] >= layer_activation_bytes(spread, experts=spread.experts)


def test_devices_that_share_an_expert_keep_its_tokens_whole() -> None:
    """Of 4 sharing devices each keeps the inputs of all tokens, of whole experts those of its own."""
    shared = run(EXPERTS, tp=4, dp=2, ep=2, sp=True, forced_balance=True)
    whole = replace(shared, has_whole_experts=True)
    assert shared.experts is not None
    kept = [layer_activation_bytes(found, experts=found.experts) for found in (shared, whole)]
    tokens = 4096 * shared.experts.experts_per_token * shared.imbalance
    assert kept[0] - kept[1] == pytest.approx(tokens * 2 * 5120 * 3 / 4)


def test_block_recompute_keeps_the_other_layers_and_groups_keep_an_input() -> None:
    whole = run(LLAMA, tp=2, dp=4, gbs=16, recompute="full")
    layer = layer_activation_bytes(whole, experts=None)
    boundary = 2 * 4096 * 8192 / (2 if whole.layout.sequence_parallel else 1)
    every, block, groups = (
        stage_activations(each)[0][0]
        for each in (whole, replace(whole, recomputed_layers=5), replace(whole, recomputed_together=5))
    )
    assert block - every == pytest.approx(7 * (layer - boundary))
    # Twelve layers in three groups.
    assert every - groups == pytest.approx(9 * boundary)
    assert (
        peak_memory(replace(whole, recomputed_together=5)).temporary_bytes
        > peak_memory(whole).temporary_bytes
    )


def test_what_does_not_fit_says_so() -> None:
    assert peak_memory(run()).fits
    assert not peak_memory(run(tp=1, dp=8, gbs=32, sp=False)).fits
    assert not peak_memory(run(gpu_mem_gb=20)).fits


def test_terms_sum_to_the_total() -> None:
    found = peak_memory(run(EXPERTS))
    assert sum(found.terms.values()) == pytest.approx(found.total_bytes)


@pytest.mark.parametrize(("features", "is_whole"), [((), True), (("meta_init",), False)])
def test_a_rank_has_all_weights_when_megatron_fsdp_starts(features: tuple[str, ...], is_whole: bool) -> None:
    """Of 22 billion weights on 512 devices the shards are small, and so are one sequence's activations."""
    base = run(tp=1, dp=512, gpus=512, mbs=1, gbs=512, recompute="full", zero=1, sp=False)
    software = with_settings(with_features(base.software, features), {"use_megatron_fsdp": True})
    sharded = replace(base, zero_stage=3, shard_group=512, software=software)
    (weights,) = weights_of_stages(sharded)
    assert (peak_memory(sharded).total_bytes >= 2.0 * weights.num_total) == is_whole
