"""What keeps a job's layers as Megatron cuts them is named; everything else is taken."""

from argparse import Namespace
from typing import Any

import pytest

from quartet_plugin.megatron.partition.refusals import argument_refusal, config_refusal, size_refusal


@pytest.mark.parametrize(
    ("argument", "value", "flag"),
    [
        ("num_experts", 8, "--num-experts"),
        ("multi_latent_attention", True, "--multi-latent-attention"),
        ("fp8", "hybrid", "--fp8-format"),
        ("enable_cuda_graph", True, "--enable-cuda-graph"),
        ("cuda_graph_impl", "local", "--cuda-graph-impl"),
        ("tp_comm_overlap", True, "--tp-comm-overlap"),
        ("context_parallel_size", 2, "--context-parallel-size"),
        ("mtp_num_layers", 1, "--mtp-num-layers"),
        ("use_megatron_fsdp", True, "--use-megatron-fsdp"),
        ("optimizer", "muon", "--optimizer"),
    ],
)
def test_a_feature_is_refused_by_name(argument: str, value: Any, flag: str) -> None:
    reason = argument_refusal(Namespace(**{argument: value}))
    assert reason is not None
    assert reason.startswith(f"{flag}: ")


def test_what_is_off_is_not_refused() -> None:
    off = Namespace(
        num_experts=None, fp8=None, cuda_graph_impl="none", context_parallel_size=1, optimizer="adam"
    )
    assert argument_refusal(off) is None


@pytest.mark.parametrize("other", [{"save": "weights"}, {"load": "weights"}])
def test_checkpoints_of_local_shapes_are_refused(other: dict[str, str]) -> None:
    assert "torch_dist" in (argument_refusal(Namespace(ckpt_format="torch", **other)) or "")
    assert argument_refusal(Namespace(ckpt_format="torch_dist", **other)) is None
    assert argument_refusal(Namespace(ckpt_format="torch", save=None, load=None)) is None


def test_a_configuration_needs_sequence_parallelism() -> None:
    assert config_refusal(Namespace(sequence_parallel=True)) is None
    assert "--sequence-parallel" in (config_refusal(Namespace(sequence_parallel=False)) or "")
    assert "--num-moe-experts" in (config_refusal(Namespace(sequence_parallel=True, num_moe_experts=4)) or "")


def test_heads_that_the_devices_do_not_divide_are_refused() -> None:
    config = Namespace(num_attention_heads=8, num_query_groups=2)
    assert size_refusal(config, 4) == (
        "num_query_groups: 2; must be a multiple of the 4 tensor-parallel devices"
    )
    assert size_refusal(config, 2) is None
