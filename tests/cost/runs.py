"""Runs for the cost model's tests."""

from typing import Any

from quartet_plugin.cost.rows import read_row, resolve
from quartet_plugin.cost.run import TrainingRun

# 22 billion parameters on one node, after Korthikanti et al. (2022), table 3.
ROW: dict[str, Any] = {
    "layers": 48,
    "hidden": 6144,
    "heads": 64,
    "kv_heads": 64,
    "ffn": 24576,
    "gated_ffn": False,
    "vocab": 51200,
    "seq_len": 2048,
    "gbs": 4,
    "mbs": 4,
    "gpus": 8,
    "gpu": "A100-SXM-80GB",
    "gpu_mem_gb": 80,
    "gpus_per_node": 8,
    "tp": 8,
    "pp": 1,
    "dp": 1,
    "sp": True,
    "recompute": "selective",
    "precision": "fp16",
    "zero": 0,
    "schedule": "none",
    "software": "Megatron-LM 2022",
}

# 14.6 billion parameters on 16 pipeline stages, after Qi et al. (2024), table 4.
PIPELINE: dict[str, Any] = ROW | {
    "layers": 46,
    "hidden": 5120,
    "heads": 40,
    "kv_heads": 40,
    "ffn": 20480,
    "vocab": 32000,
    "seq_len": 1024,
    "gbs": 64,
    "mbs": 1,
    "gpus": 16,
    "tp": 1,
    "pp": 16,
    "sp": False,
    "recompute": "none",
    "schedule": "1F1B",
    "software": "Megatron-LM fork (sail-sg)",
}

# Mixture of experts with latent attention, expert parallel on one node.
EXPERTS: dict[str, Any] = ROW | {
    "arch": "moe-mla",
    "layers": 4,
    "hidden": 5120,
    "heads": 128,
    "kv_heads": 128,
    "ffn": 12288,
    "gated_ffn": True,
    "vocab": 102400,
    "seq_len": 4096,
    "gbs": 32,
    "mbs": 1,
    "tp": 1,
    "dp": 8,
    "ep": 8,
    "sp": False,
    "recompute": "none",
    "precision": "bf16",
    "zero": 1,
    "gpu": "B200-SXM-180GB",
    "gpu_mem_gb": 180,
    "experts": 160,
    "topk": 6,
    "moe_ffn": 1536,
    "software": "Megatron-LM, TE, no comm overlap, TP overlap off, fused cross entropy",
}


def run(row: dict[str, Any] = ROW, **changes: Any) -> TrainingRun:
    """The resolved run of a row with some fields changed."""
    return resolve(read_row(row | changes)).run
