"""What waits for weight gradients, against the products written out."""

import pytest

from quartet_plugin.cost import held_bytes
from quartet_plugin.cost.run import TrainingRun
from tests.cost.runs import EXPERTS, ROW, run

# 70 billion parameters, one sequence of 8192 tokens, eight tensor parallel ranks with split sequences.
LARGE = ROW | {
    "layers": 80,
    "hidden": 8192,
    "heads": 64,
    "kv_heads": 8,
    "ffn": 28672,
    "gated_ffn": True,
    "seq_len": 8192,
    "mbs": 1,
    "gbs": 8,
    "recompute": "none",
    "precision": "bf16",
}


def large(software: str) -> TrainingRun:
    return run(LARGE, software=software)


@pytest.mark.parametrize(
    ("software", "column_input"), [("Megatron-Core", 8192), ("Megatron-LM 2022", 8192 / 8)]
)
def test_gathered_tensors_are_whole(software: str, column_input: float) -> None:
    kept = {
        product.name: (product.input_bytes / 2 / 8192, product.gradient_bytes / 2 / 8192)
        for product in held_bytes.layer_products(large(software), experts=None)
    }
    assert kept == {
        "qkv": (column_input, (64 + 2 * 8) * 128 / 8),
        "proj": (1024, 8192),
        "fc1": (column_input, 2 * 28672 / 8),
        "fc2": (28672 / 8, 8192),
    }


def test_megabytes_of_a_large_layer() -> None:
    assert held_bytes.layer_bytes(large("Megatron-Core"), experts=None) == pytest.approx(751e6, rel=1e-3)
    assert held_bytes.layer_bytes(large("Megatron-LM 2022"), experts=None) == pytest.approx(516e6, rel=1e-3)


def test_experts_keep_every_copy_of_a_token() -> None:
    found = run(EXPERTS)
    kept = {product.name: product for product in held_bytes.layer_products(found, experts=found.experts)}
    # Of the fullest device of its group.
    arriving, fcs = 6 * 4096 * found.imbalance, ("routed_fc1", "routed_fc2", "shared_fc1", "shared_fc2")
    assert list(kept) == ["q_down", "q_up", "kv_down", "kv_up", "proj", *fcs]
    assert kept["routed_fc1"].input_bytes == kept["routed_fc2"].gradient_bytes
    assert kept["routed_fc1"].input_bytes == pytest.approx(arriving * 2 * 5120)
    assert kept["routed_fc1"].gradient_bytes == 2 * kept["routed_fc2"].input_bytes
    assert kept["routed_fc2"].input_bytes == pytest.approx(arriving * 2 * 1536)
