"""Megatron's arguments as our own types, held against Megatron's own rules."""

import runpy
import shlex
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core.models.hybrid.hybrid_layer_allocation import select_pipeline_segment

from quartet_plugin.errors import ConfigError, InfeasibleError
from quartet_plugin.megatron.describe import as_user_wrote, knows_further_tokens
from quartet_plugin.megatron.execution import _unwrapped
from quartet_plugin.model.megatron_arguments import (
    experts_of,
    features_of,
    layout_of,
    logged_expert_layers_of,
    mtp_kinds_of,
    num_mtp_layers_of,
    precision_of,
    schedule_of,
    shape_of,
    shards_whole_layers,
    split_of,
    stages_of_layout,
)
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.space.knobs.registry import settings_of
from tests.megatron.entry_launch import MEGATRON_FLAGS, SHAPE
from tests.megatron.native import native_flags


def values(*extra: str) -> Namespace:
    return native_flags().values([*MEGATRON_FLAGS, *extra])


def layers_by_megatron(args: Namespace, chunks: int) -> tuple[int, ...]:
    """Layers of each stage as Megatron's own function counts them."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    config: Any = SimpleNamespace(
        pipeline_model_parallel_layout=None,
        num_layers=args.num_layers,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=args.decoder_last_pipeline_num_layers,
        account_for_embedding_in_pipeline_split=args.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=args.account_for_loss_in_pipeline_split,
    )
    devices = args.pipeline_model_parallel_size
    return tuple(
        get_num_layers_to_build(config, vp_stage=stage // devices, pp_rank=stage % devices)
        for stage in range(devices * chunks)
    )


ENDS = st.sampled_from([None, 1, 2, 4])


@settings(deadline=None, max_examples=150)
@given(
    pipeline=st.sampled_from([2, 3, 4]),
    chunks=st.sampled_from([1, 2, 3]),
    per_stage=st.integers(1, 4),
    how=st.one_of(
        st.tuples(st.tuples(ENDS, ENDS), st.just((False, False))),
        st.tuples(st.just((None, None)), st.tuples(st.booleans(), st.booleans())),
    ),
)
def test_split_is_what_megatron_builds(
    pipeline: int,
    chunks: int,
    per_stage: int,
    how: tuple[tuple[int | None, int | None], tuple[bool, bool]],
) -> None:
    ends, counted = how
    ends = (ends[0] and ends[0] * chunks, ends[1] and ends[1] * chunks)
    at_ends = [count for count in ends if count is not None]
    inner = (pipeline - len(at_ends)) * chunks * per_stage
    num_layers = sum(at_ends) + inner - sum(counted)
    assume(num_layers > 0)
    words = ["--num-layers", str(num_layers), "--pipeline-model-parallel-size", str(pipeline)]
    for flag, count in zip(("first", "last"), ends, strict=True):
        words += [] if count is None else [f"--decoder-{flag}-pipeline-num-layers", str(count)]
    for flag, is_counted in zip(("embedding", "loss"), counted, strict=True):
        words += [f"--account-for-{flag}-in-pipeline-split"] * is_counted
    if chunks > 1:
        words += ["--num-virtual-stages-per-pipeline-rank", str(chunks)]
    args = native_flags().values(words)
    try:
        expected = layers_by_megatron(args, chunks)
    except AssertionError:
        expected = ()
    # Megatron finds negative and left-over layers only later; such jobs fail before they train.
    assume(expected and min(expected) >= 0 and sum(expected) == num_layers)
    assert split_of(args).transformer_layers_per_stage == expected


def test_layers_that_cannot_be_divided() -> None:
    with pytest.raises(InfeasibleError, match="6 layers"):
        split_of(values("--pipeline-model-parallel-size", "4"))


@pytest.mark.parametrize(
    ("pattern", "pipeline", "words"),
    [
        ("M-M*M-M*", 1, ()),
        ("M-M*M-M*", 4, ()),
        ("M-M*M-M*/*-/*-", 2, ()),
        ("M-M*M-M*", 2, ("--decoder-first-pipeline-num-layers", "3")),
        ("M-M*M|-M*", 2, ()),
        ("M-|M*|M-M|*/*-", 2, ()),
        ("|M-M*|M-M*|", 4, ()),
    ],
)
def test_split_of_a_pattern_is_what_megatron_builds(
    pattern: str, pipeline: int, words: tuple[str, ...]
) -> None:
    args = values("--pipeline-model-parallel-size", str(pipeline), "--hybrid-layer-pattern", pattern, *words)
    chunks = layout_of(args, world_size=pipeline).virtual_stages
    built = [0] * pipeline * chunks
    for stage in range(len(built)):
        with (
            mock.patch("torch.distributed.get_rank", return_value=stage % pipeline),
            mock.patch("torch.distributed.get_world_size", return_value=pipeline),
            mock.patch("megatron.core.models.hybrid.hybrid_layer_allocation.log_on_each_pipeline_stage"),
        ):
            layers, _ = select_pipeline_segment(
                pattern.partition("/")[0],
                mock.sentinel.group,
                stage // pipeline if chunks > 1 else None,
                first_stage_layers=args.decoder_first_pipeline_num_layers,
            )
        built[stage] = len(layers)
    assert split_of(args).transformer_layers_per_stage == tuple(built)
    assert num_mtp_layers_of(args) == pattern.count("/")
    assert ("mtp" in features_of(args)) == ("/" in pattern)


def test_a_pattern_says_the_layers_and_their_kinds() -> None:
    """Whatever --num-layers says; sizes of a state space are Megatron's defaults where none are given."""
    kinds = shape_of(values("--hybrid-layer-pattern", "MEM*|E-ME"), vocab_size=128).layer_kinds
    assert kinds == LayerKinds(
        attention=1,
        mlp=1,
        experts=3,
        state_space=3,
        state_space_heads=1,
        state_space_groups=8,
        projected_size=3 * 64 + 2 * 8 * 128 + 1,
        pattern="MEM*E-ME",
    )
    # Several of Megatron's letters are of one kind.
    others = shape_of(values("--hybrid-layer-pattern", "GD|E-"), vocab_size=128)
    assert others.pattern == "M*E-"
    assert others.layer_kinds is not None
    assert others.layer_kinds.framework_pattern == "GDE-"
    sized = values(
        *("--hybrid-override-pattern", "M*", "--mamba-num-heads", "4", "--mamba-head-dim", "16"),
        *("--mamba-num-groups", "2", "--mamba-state-dim", "32"),
    )
    shape = shape_of(sized, vocab_size=128)
    assert shape.num_layers == 2
    assert shape.layer_kinds is not None
    assert shape.layer_kinds.projected_size == 3 * 64 + 2 * 2 * 32 + 4
    assert (kinds.state_size, shape.layer_kinds.state_size) == (None, 32)


def test_a_depth_of_multi_token_prediction_has_the_kinds_of_its_pattern() -> None:
    kinds = mtp_kinds_of(values("--hybrid-layer-pattern", "M-M*M-M*/*E-/*E-"))
    assert kinds == LayerKinds(attention=1, mlp=1, experts=1, state_space=0)
    assert kinds.num_layers == 3
    for words in (("--hybrid-layer-pattern", "M-M*"), ("--mtp-num-layers", "1")):
        assert mtp_kinds_of(values(*words)) is None


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (["--hybrid-layer-pattern", "M-|M*"], None),
        (["--hybrid-layer-pattern", "M-|M*/*-/*-"], "M-M*/*-/*-"),
        (["--hybrid-layer-pattern", "M-M*", "--mtp-hybrid-override-pattern", "*-"], None),
        (
            shlex.split("--hybrid-layer-pattern M-M* --mtp-hybrid-override-pattern *- --mtp-num-layers 2"),
            "M-M*/*-/*-",
        ),
    ],
)
def test_a_shape_has_the_patterns_of_further_tokens(words: list[str], written: str | None) -> None:
    kinds = shape_of(values(*words), vocab_size=128).layer_kinds
    assert kinds is not None
    assert (kinds.pattern, kinds.framework_pattern) == ("M-M*", written)


def test_experts_of_a_hybrid_model_are_its_letters() -> None:
    """Whatever the frequency of another model's layers with experts, and without --num-layers."""
    args = native_flags().values(
        [*MEGATRON_FLAGS[2:], "--num-experts", "4", "--moe-layer-freq", "2", "--hybrid-layer-pattern", "M*E-"]
    )
    experts = experts_of(args)
    assert experts is not None
    assert experts.num_dense_layers == 0


def test_shape_and_defaults() -> None:
    assert shape_of(values(), vocab_size=128) == SHAPE
    gated = shape_of(values("--swiglu", "--position-embedding-type", "rope"), vocab_size=128)
    assert (gated.ffn_hidden_size, gated.gated_ffn, gated.position_embedding) == (64, True, "rope")
    quick = shape_of(values("--quick-geglu"), vocab_size=128)
    # Megatron makes the FFN of --swiglu narrower, and that of no other gate.
    assert (quick.ffn_hidden_size, quick.gated_ffn) == (128, True)
    grouped = shape_of(
        values("--group-query-attention", "--num-query-groups", "2", "--kv-channels", "16"), vocab_size=128
    )
    assert (grouped.num_query_groups, grouped.kv_channels) == (2, 16)
    untied = shape_of(values("--untie-embeddings-and-output-weights"), vocab_size=128)
    assert not untied.tied_embeddings


def test_layout_and_schedule() -> None:
    words = ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"]
    args = values(
        *words, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--recompute-activations"
    )
    layout = layout_of(args, world_size=8)
    assert (layout.tensor_parallel, layout.pipeline_parallel, layout.data_parallel) == (2, 2, 2)
    assert (layout.virtual_stages, layout.sequence_parallel, layout.recompute) == (3, True, "selective")
    assert schedule_of(args).label == "interleaved g2"
    assert schedule_of(values()).name == "no-pipelining"
    assert schedule_of(values("--pipeline-model-parallel-size", "2")).name == "1f1b"
    with pytest.raises(ConfigError, match="world size 6"):
        layout_of(args, world_size=6)


def test_literal_layout_is_read_by_megatron() -> None:
    args = values("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "Et*2|(t|)*2,tL")
    assert split_of(args).transformer_layers_per_stage == (2, 1, 1, 1)
    assert layout_of(args, world_size=2).virtual_stages == 2


@pytest.mark.parametrize(("shards", "is_kept"), [(1, False), (2, False), (4, True)])
def test_whole_experts_spread_over_tensor_parallel_ranks_keep_no_axis(shards: int, is_kept: bool) -> None:
    """Of the copies that Megatron resolves EP divides those of all tensor-parallel ranks together."""
    words = ["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", str(shards)]
    args = values(*EXPERTS, "none", *words, "--expert-model-parallel-size", "4")
    resolved = Namespace(**{**vars(args), "data_parallel_size": 2})
    assert ("expert_tensor_parallel" in features_of(resolved)) == is_kept


UNTIED = "--untie-embeddings-and-output-weights"
EXPERTS = ("--num-experts", "4", "--moe-router-load-balancing-type")


@pytest.mark.parametrize(
    ("words", "features"),
    [
        (["aux_loss"], []),  # the coefficient is 0
        (["aux_loss", "--moe-aux-loss-coeff", "0.01"], ["moe_microbatch_loss"]),
        (["seq_aux_loss", "--moe-aux-loss-coeff", "0.01"], []),
        (["global_aux_loss", "--moe-aux-loss-coeff", "0.01"], ["moe_global_loss"]),
        (["seq_aux_loss", "aux_loss", "--moe-aux-loss-coeff", "0.01", "0.0"], []),
        (["seq_aux_loss", "global_aux_loss", "--moe-aux-loss-coeff", "0", "0.1"], ["moe_global_loss"]),
        (["sinkhorn"], ["moe_sinkhorn"]),
        (["none"], []),
        (["none", "--moe-expert-capacity-factor", "1.5"], ["moe_capacity"]),
        (["none", "--moe-expert-rank-capacity-factor", "1.5"], ["moe_capacity"]),
        (["none", "--moe-token-dispatcher-type", "flex"], ["moe_deepep", "moe_flex_dispatcher"]),
        (
            ["none", "--moe-token-dispatcher-type", "flex", "--moe-enable-deepep"],
            ["moe_deepep", "moe_flex_dispatcher"],
        ),
        (["none", "--moe-router-dtype", "fp64"], ["moe_router_fp64"]),
        (["none", "--moe-router-dtype", "fp32"], []),
        (["none", "--expert-tensor-parallel-size", "2"], ["expert_tensor_parallel"]),
        (["none", "--no-bias-dropout-fusion"], ["moe_unfused_bias"]),
        (["none", "--moe-router-padding-for-quantization"], ["moe_router_padding"]),
        (["none", "--moe-router-padding-for-fp8"], ["moe_router_padding"]),
    ],
)
def test_what_the_router_binds(words: list[str], features: list[str]) -> None:
    assert features_of(values(*EXPERTS, *words)) == sorted(["moe", "moe_linear_bias", *features])
    bare = [name for name in features if name != "moe_unfused_bias"]
    without = features_of(values(*EXPERTS, *words, "--disable-bias-linear"))
    assert without == sorted(["moe", "no_linear_bias", *bare])


@pytest.mark.parametrize(
    ("words", "features"),
    [
        (["--hybrid-layer-pattern", "M*M*"], ["bare_first_stage", "bare_last_stage"]),
        (["--hybrid-override-pattern", "M*M*"], ["hybrid_without_pattern"]),
        (["--is-hybrid-model"], ["hybrid_without_pattern"]),
        (["--hybrid-layer-pattern", "MDMD"], ["attention_variant", "bare_first_stage", "bare_last_stage"]),
    ],
)
def test_what_the_pattern_of_a_hybrid_model_leaves(words: list[str], features: list[str]) -> None:
    assert features_of(values(*words)) == sorted(["hybrid", *features])


@pytest.mark.parametrize(
    ("pattern", "words", "layers"),
    [
        ("M*ME-E", ["seq_aux_loss", "--moe-aux-loss-coeff", "0.01"], (3, 5)),
        ("M*M|E-E", ["aux_loss", "--moe-aux-loss-coeff", "0.01"], (3, 5)),
        ("M*ME-E", ["none", "--moe-z-loss-coeff", "0.001"], (3, 5)),
        ("M*ME-E", ["seq_aux_loss"], ()),  # the coefficient is 0
        ("M*ME-E", ["sinkhorn"], ()),
        ("M*M*--", ["seq_aux_loss", "--moe-aux-loss-coeff", "0.01"], ()),
        ("ME-M/ME", ["seq_aux_loss", "--moe-aux-loss-coeff", "0.01"], (1, 4)),
    ],
)
def test_which_layers_of_a_hybrid_model_record_a_loss(
    pattern: str, words: list[str], layers: tuple[int, ...]
) -> None:
    args = values(*EXPERTS, *words, "--hybrid-layer-pattern", pattern)
    assert logged_expert_layers_of(args) == layers
    assert logged_expert_layers_of(values(*EXPERTS, *words)) == ()


@pytest.mark.parametrize(
    ("words", "feature"),
    [
        (["--use-torch-fsdp2"], "torch_fsdp"),
        (["--use-megatron-fsdp"], "fsdp"),
        (["--init-model-with-meta-device"], "meta_init"),
        (["--use-nccl-ub"], "fsdp_bound"),
        (["--check-weight-hash-across-dp-replicas-interval", "10"], "fsdp_bound"),
        (["--fp8-format", "hybrid"], "fp8"),
        (["--calculate-per-token-loss"], "per_token_loss"),
        (["--context-parallel-size", "2"], "context_parallel"),
        (["--rampup-batch-size", "2", "2", "100"], "rampup_batch_size"),
        (["--sft"], "packing"),
        (["--eod-mask-loss"], "masked_tokens"),
        (["--dataloader-type", "cyclic"], "cyclic_data"),
        (["--dataloader-type", "external"], "external_data"),
        (["--num-distributed-optimizer-instances", "2"], "distributed_optimizer_instances"),
        (["--use-precision-aware-optimizer"], "precision_aware_optimizer"),
        (["--cpu-offloading-num-layers", "1"], "cpu_offload"),
        (["--fine-grained-activation-offloading"], "activation_offload"),
        (["--window-size", "5,0"], "sliding_window"),
        (["--softmax-type", "learnable"], "attention_sink"),
        (["--cp-comm-type", "p2p", "a2a"], "cp_comm_by_layer"),
        (["--hierarchical-context-parallel-sizes", "2", "2"], "hierarchical_context_parallel"),
        (["--hybrid-context-parallel"], "hybrid_context_parallel"),
        (["--overlap-param-gather-with-optimizer-step"], "step_param_gather"),
        (["--ddp-num-buckets", "4"], "ddp_num_buckets"),
        (["--save-params-interval", "10"], "saved_params"),
        (["--eval-micro-batch-size", "1"], "eval_micro_batch"),
        (["--eval-micro-batch-size", "1", "--eval-global-batch-size", "12"], "eval_micro_batch"),
        (["--eval-global-batch-size", "12"], "eval_batch"),
        (["--no-rope-freq", "2"], "no_rope_pattern"),
        (["--no-rope-freq", "([0]*2+[1]*1)*2"], "no_rope_pattern"),
        (["--window-attn-skip-freq", "([1]*2+[0]*1)*2"], "window_by_layer"),
        (["--optimizer", "lion"], "emerging_optimizer"),
    ],
)
def test_features_that_limit_plans(words: list[str], feature: str) -> None:
    assert features_of(values()) == []
    assert features_of(values(*words)) == [feature]


@pytest.mark.parametrize(
    "words",
    [
        ["--optimizer", "sgd"],
        ["--no-rope-freq", "1"],
        ["--window-attn-skip-freq", "2"],
        ["--first-last-layers-bf16"],
        # The global batch is 8.
        ["--eval-global-batch-size", "16"],
    ],
)
def test_what_limits_no_plan_is_no_feature(words: list[str]) -> None:
    assert features_of(values(*words)) == []


@pytest.mark.parametrize(("precision", "features"), [("fp32", []), ("bf16", ["fsdp_bound"])])
def test_main_weights_of_another_precision_keep_their_sharding(precision: str, features: list[str]) -> None:
    words = ["--megatron-fsdp-main-params-dtype", precision]
    assert features_of(values("--use-megatron-fsdp", *words)) == ["fsdp", *features]
    assert features_of(values(*words)) == features


@pytest.mark.parametrize(
    ("words", "features"),
    [
        (["muon"], ["muon_blockwise"]),
        (["adaptive_muon", "--muon-tp-mode", "blockwise"], ["muon_blockwise"]),
        (["dist_muon"], ["muon_blockwise"]),
        (["muon", "--muon-tp-mode", "duplicated"], []),
        (["muon", "--muon-tp-mode", "distributed"], []),
        (["soap"], ["soap_optimizer"]),
    ],
)
def test_an_optimizer_may_update_each_ranks_part_of_a_matrix(words: list[str], features: list[str]) -> None:
    args = values("--optimizer", *words)
    assert features_of(args) == ["emerging_optimizer", *features]
    # Releases without the flag of a mode have blockwise updates.
    without_mode = Namespace(**{name: value for name, value in vars(args).items() if name != "muon_tp_mode"})
    is_muon = "muon" in words[0]
    assert features_of(without_mode) == ["emerging_optimizer", *(["muon_blockwise"] if is_muon else features)]


@pytest.mark.parametrize(
    ("words", "features"),
    [
        ([], ["bf16_end_layer"]),
        (["--num-layers-at-start-in-bf16", "0"], ["bf16_end_layer"]),
        (["--num-layers-at-end-in-bf16", "2"], ["bf16_end_layers"]),
        (["--num-layers-at-start-in-bf16", "0", "--num-layers-at-end-in-bf16", "0"], []),
    ],
)
def test_layers_at_the_ends_of_an_fp8_model_may_stay_in_bf16(words: list[str], features: list[str]) -> None:
    args = values("--fp8-format", "hybrid", "--first-last-layers-bf16", *words)
    assert features_of(args) == sorted(["fp8", *features])


@pytest.mark.parametrize(
    ("words", "is_sharded"),
    [
        (["--use-distributed-optimizer"], True),
        (["--use-distributed-optimizer", "--optimizer", "muon"], True),
        (["--optimizer", "dist_muon"], True),
        (["--optimizer", "muon"], False),
        ([], False),
    ],
)
def test_an_optimizer_is_sharded_where_the_command_says_it(words: list[str], is_sharded: bool) -> None:
    assert layout_of(values(*words), world_size=2).distributed_optimizer == is_sharded


def test_megatron_takes_the_switch_of_an_optimizer_that_it_shards_by_layers() -> None:
    """As validate_args leaves the arguments of the command above."""
    args = values("--optimizer", "muon")
    resolved = Namespace(**vars(args), use_layer_wise_distributed_optimizer=True)
    assert not resolved.use_distributed_optimizer
    assert shards_whole_layers(resolved)
    assert not shards_whole_layers(args)
    assert layout_of(resolved, world_size=2).distributed_optimizer


def test_the_evaluations_batch_is_that_of_the_users_words() -> None:
    """Megatron completes it from the training's."""
    resolved = values("--eval-micro-batch-size", "2", "--eval-global-batch-size", "8")
    without, stated = values(), values("--eval-micro-batch-size", "2")
    assert features_of(as_user_wrote(resolved, without)) == []
    assert features_of(as_user_wrote(resolved, Namespace())) == []
    assert features_of(as_user_wrote(resolved, stated)) == ["eval_micro_batch"]


def test_a_layer_recompute_of_experts_is_selective_recompute_of_the_module() -> None:
    for words, modules in (([], "core_attn+moe"), (["--recompute-modules", "moe", "mlp"], "mlp+moe")):
        args = values("--moe-layer-recompute", *words)
        assert layout_of(args, world_size=1).recompute == "selective"
        assert {setting.name: setting.value for setting in settings_of(args)}["recompute_modules"] == modules


@pytest.mark.parametrize(
    ("words", "is_part"),
    [
        ([], False),
        (["--activation-offload-fraction", "0.25"], True),
        (["--min-offloaded-tensor-size", "4096"], True),
        (["--delta-offload-bytes-across-pp-ranks", "1000"], True),
    ],
)
def test_a_part_of_what_modules_save_is_named(words: list[str], is_part: bool) -> None:
    args = values("--fine-grained-activation-offloading", "--offload-modules", "core_attn", *words)
    assert ("activation_offload_part" in features_of(args)) == is_part


def test_gated_delta_nets_have_heads_of_keys_and_of_values() -> None:
    heads = ("--linear-num-key-heads", "16", "--linear-num-value-heads", "48")
    variant = ("--experimental-attention-variant", "gated_delta_net")

    def heads_in(*words: str) -> object:
        settings = settings_of(values(*heads, *words))
        return {setting.name: setting.value for setting in settings}.get("linear_attention_heads")

    assert heads_in(*variant) == 16
    assert heads_in(*variant, "--linear-num-value-heads", "24") == 8
    assert heads_in("--hybrid-layer-pattern", "G*G*") == 16
    assert heads_in() is None


@pytest.mark.parametrize(
    ("words", "features"),
    [
        (["--cuda-graph-impl", "local"], ["cuda_graphs", "graphed_layer"]),
        (["--cuda-graph-impl", "full_iteration"], ["cuda_graphs", "graphed_iteration"]),
        (
            [
                "--cuda-graph-impl",
                "transformer_engine",
                "--cuda-graph-modules",
                "attn",
                "moe_router",
                "mamba",
            ],
            ["cuda_graphs", "graphed_attn", "graphed_by_te", "graphed_moe_router"],
        ),
        (["--cuda-graph-impl", "local", "--cuda-graph-scope", "mamba"], ["cuda_graphs"]),
        (
            [
                *EXPERTS,
                "none",
                "--moe-token-dispatcher-type",
                "flex",
                "--moe-flex-dispatcher-backend",
                "hybridep",
            ],
            ["moe", "moe_flex_dispatcher", "moe_hybridep", "moe_linear_bias"],
        ),
        (
            [*EXPERTS, "none", "--moe-router-force-load-balancing"],
            ["moe", "moe_forced_balance", "moe_linear_bias"],
        ),
        (
            ["--use-precision-aware-optimizer", "--optimizer-offload-fraction", "0.5"],
            ["precision_aware_optimizer"],
        ),
    ],
)
def test_features_that_predictions_read(words: list[str], features: list[str]) -> None:
    assert features_of(values(*words)) == features


MTP = ("--mtp-num-layers", "1")


def test_dense_layers_of_multi_token_prediction_need_one_beside_them() -> None:
    experts = ["--num-experts", "4", "--moe-router-load-balancing-type", "none", UNTIED]
    for pattern, features in ((["2"], ["bare_last_stage"]), (["1"], []), (["([0]*1+[1]*5)"], [])):
        args = values(*MTP, *experts, "--moe-layer-freq", *pattern)
        assert features_of(args) == [*features, "moe", "moe_linear_bias", "mtp"]


@pytest.mark.parametrize(
    ("words", "features"),
    [
        ([UNTIED], []),
        ([], ["mtp_tied_head"]),
        ([UNTIED, "--pipeline-model-parallel-layout", "E(t|)*2,tmL"], []),
        ([UNTIED, "--pipeline-model-parallel-layout", "Ettm|L"], ["mtp_before_last"]),
        ([UNTIED, "--pipeline-model-parallel-layout", "E(t|)*2,m|L"], ["mtp_before_last"]),
        ([UNTIED, "--pipeline-model-parallel-layout", "Et|m|tL"], ["mtp_on_inner_stage"]),
        ([UNTIED, "--pipeline-model-parallel-layout", "Ettm||L"], ["mtp_on_inner_stage"]),
    ],
)
def test_where_layers_of_multi_token_prediction_lie(words: list[str], features: list[str]) -> None:
    args = values(*MTP, *words)
    assert features_of(args) == ["mtp", *features]
    if "--pipeline-model-parallel-layout" in words:
        assert split_of(args).mtp_before_last == (True if "mtp_before_last" in features else None)


def test_the_embedding_and_its_copy_for_further_tokens_are_on_two_ranks() -> None:
    """Megatron sums no gradients of two chunks of a rank, as on two ranks with two stages each."""
    layout = ("--pipeline-model-parallel-layout", "Et|t|tm|L")
    for size, feature in (("2", "mtp_on_inner_stage"), ("4", "mtp_before_last")):
        args = values(*MTP, UNTIED, *layout, "--pipeline-model-parallel-size", size)
        assert features_of(args) == ["mtp", feature]


def test_dense_layers_of_multi_token_prediction_lie_beside_one_before_the_last_stage() -> None:
    experts = ("--num-experts", "4", "--moe-router-load-balancing-type", "none", UNTIED)
    dense = ("--moe-layer-freq", "([1]*1+[0]*1)", "--num-layers", "2")
    args = values(*MTP, *experts, *dense, "--pipeline-model-parallel-layout", "Et|tm|L")
    assert features_of(args) == ["bare_last_stage", "moe", "moe_linear_bias", "mtp", "mtp_before_last"]


def test_a_script_that_speaks_of_further_tokens_is_known(tmp_path: Path) -> None:
    answers = []
    for name, text in (
        ("with", "mtp_on_this_rank"),
        ("without", "tokens"),
        ("off", "mtp_on_this_rank=False"),
    ):
        path = tmp_path / f"{name}.py"
        path.write_text(f"def forward_step():\n    return {text!r}\n")
        answers.append(knows_further_tokens(partial(runpy.run_path(str(path))["forward_step"])))
    assert answers == [True, False, False]
    assert not knows_further_tokens(print)


def test_masked_tokens_do_not_matter_where_the_loss_is_per_token() -> None:
    assert features_of(values("--eod-mask-loss", "--calculate-per-token-loss")) == ["per_token_loss"]
    # But the loss of further tokens is one of a microbatch.
    words = ("--eod-mask-loss", "--calculate-per-token-loss", *MTP, UNTIED)
    assert features_of(values(*words)) == ["masked_tokens", "mtp", "per_token_loss"]


def test_precision() -> None:
    assert [precision_of(values(*words)) for words in ([], ["--bf16"], ["--fp16"])] == [
        "fp32",
        "bf16",
        "fp16",
    ]


def test_missing_size_is_named() -> None:
    with pytest.raises(ConfigError, match="--num-layers"):
        shape_of(native_flags().values([]), vocab_size=8)


@given(st.lists(st.sampled_from(["E", "t", "m", "L", "|", "t*3", "(tt|)*2", "(t|t)*3", ","]), max_size=12))
@settings(max_examples=200, deadline=None)
def test_a_layout_is_read_as_megatron_reads_it(parts: list[str]) -> None:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    text = "".join(parts)
    stages = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert stages_of_layout(text) == [stage.count(LayerType.decoder) for stage in stages]


@pytest.mark.parametrize("text", ["Ettx|L", "E(t|)*99999999999L", "Et*131073L"])
def test_a_layout_that_no_model_has_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--pipeline-model-parallel-layout"):
        stages_of_layout(text)


def test_a_runner_of_whole_iterations_is_seen_through() -> None:
    """Megatron wraps its schedule in an object without a name for CUDA graphs and for a paged stash."""

    class Runner:
        def __init__(self, held: Any) -> None:
            self.forward_backward_func = held

    def schedule() -> None: ...

    assert _unwrapped(Runner(Runner(schedule))) is schedule
    assert _unwrapped(schedule) is schedule
