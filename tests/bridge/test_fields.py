"""A configuration as Megatron's arguments, and arguments written to it."""

from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from quartet_plugin.bridge import fields
from quartet_plugin.bridge.fields import arguments_of, known_arguments, leave_out, set_argument, vocabulary_of
from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.model.megatron_arguments import (
    features_of,
    layout_of,
    precision_of,
    schedule_of,
    shape_of,
    split_of,
)
from quartet_plugin.space.knobs.offload_modules import OFFLOAD_MODULES
from quartet_plugin.space.knobs.token_dispatcher import TOKEN_DISPATCHER
from quartet_plugin.space.knobs.use_megatron_fsdp import USE_MEGATRON_FSDP
from quartet_plugin.space.needed_flags import missing_flag_features
from tests.bridge.configurations import MambaModelProvider, make_config, make_model
from tests.model.plans import LAYOUT, SHAPE
from tests.space.knobs.made_up import ROPE_FUSION


def test_a_configuration_reads_as_the_same_job_in_flags() -> None:
    args = arguments_of(make_config())
    assert shape_of(args, vocab_size=16384) == SHAPE
    assert layout_of(args, world_size=2) == LAYOUT
    assert split_of(args).transformer_layers_per_stage == (4, 4)
    assert schedule_of(args).name == "1f1b"
    assert features_of(args) == []
    assert precision_of(args) == "fp32"


def test_a_gated_layer_is_as_wide_as_megatron_core_makes_it() -> None:
    args = arguments_of(make_config(make_model(gated_linear_unit=True, num_query_groups=2)))
    shape = shape_of(args, vocab_size=16384)
    assert (shape.gated_ffn, shape.ffn_hidden_size, shape.num_query_groups) == (True, 1024, 2)


def test_a_completed_layout_gives_the_split() -> None:
    model = make_model(pipeline_model_parallel_layout="Ettt|tt|tt|tL", virtual_pipeline_model_parallel_size=2)
    args = arguments_of(make_config(model))
    assert split_of(args).transformer_layers_per_stage == (3, 2, 2, 1)
    assert layout_of(args, world_size=2).virtual_stages == 2


def test_a_layout_may_be_a_list_or_megatrons_object_of_one() -> None:
    """As recipes have it, of names or members of an enumeration; Megatron-Core makes an object of it."""
    names = [["embedding", "decoder", "decoder"], ["decoder"], ["decoder"] * 4, ["decoder", "mtp", "loss"]]
    members = [[SimpleNamespace(name=name) for name in stage] for stage in names]
    text = "Ett|t|tttt|tmL"
    for layout in (text, names, members, *(SimpleNamespace(input_data=given) for given in (text, names))):
        args = arguments_of(make_config(make_model(pipeline_model_parallel_layout=layout)))
        assert args.pipeline_model_parallel_layout == text
        assert split_of(args).transformer_layers_per_stage == (2, 1, 4, 1)
        assert layout_of(args, world_size=2).virtual_stages == 2
    unknown = make_model(pipeline_model_parallel_layout=[["embedding", "encoder"], ["loss"]])
    with pytest.raises(ConfigError, match="must be written in E, t, m"):
        split_of(arguments_of(make_config(unknown)))


@pytest.mark.parametrize(
    ("mixed", "expected"),
    [
        ("bf16_mixed", ("bf16", False)),
        ("fp16_mixed", ("fp16", False)),
        ("bf16_with_fp8_delayed_scaling_mixed", ("bf16", True)),
        (SimpleNamespace(bf16=True, fp16=False, fp8="hybrid"), ("bf16", True)),
    ],
)
def test_the_precision_is_the_one_that_will_be_set(mixed: object, expected: tuple[str, bool]) -> None:
    args = arguments_of(make_config(mixed_precision=mixed))
    assert (precision_of(args), "fp8" in features_of(args)) == expected


def test_unlike_layers_are_a_feature() -> None:
    hybrid = features_of(arguments_of(make_config(make_model(MambaModelProvider))))
    assert hybrid == ["hybrid", "hybrid_without_pattern"]
    model = make_model(vision_config=SimpleNamespace())
    assert features_of(arguments_of(make_config(model))) == ["encoder_decoder"]


def test_a_value_is_written_to_every_section_that_has_it() -> None:
    config = make_config()
    set_argument(config, "use_distributed_optimizer", True)
    assert config.ddp.use_distributed_optimizer
    assert config.optimizer.use_distributed_optimizer
    set_argument(config, "ddp_bucket_size", 1000)
    assert config.ddp.bucket_size == 1000
    leave_out(config, "use_distributed_optimizer")
    assert not arguments_of(config).use_distributed_optimizer
    with pytest.raises(PlanError, match="hidden_knob: not a field of this Megatron-Bridge"):
        set_argument(config, "hidden_knob", 1)


def test_a_layer_recompute_of_experts_is_off_without_its_flag() -> None:
    config = make_config(make_model(moe_layer_recompute=True))
    assert layout_of(arguments_of(config), world_size=2).recompute == "selective"
    leave_out(config, "moe_layer_recompute")
    assert config.model.moe_layer_recompute is False
    assert layout_of(arguments_of(config), world_size=2).recompute == "none"


def test_a_number_of_buckets_is_a_feature_by_another_name() -> None:
    buckets = SimpleNamespace(use_distributed_optimizer=False, bucket_size=None, num_buckets=4)
    assert features_of(arguments_of(make_config(ddp=buckets))) == ["ddp_num_buckets"]


def test_an_in_process_restart_is_a_feature_where_its_section_is_enabled() -> None:
    enabled, disabled = (SimpleNamespace(enabled=value) for value in (True, False))
    assert features_of(arguments_of(make_config(inprocess_restart=enabled))) == ["inprocess_restart"]
    for section in (disabled, None):
        assert features_of(arguments_of(make_config(inprocess_restart=section))) == []


def test_a_switch_that_its_flag_turns_off_is_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "SETTINGS", (ROPE_FUSION,))
    config = make_config(make_model(apply_rope_fusion=False))
    assert ROPE_FUSION.read(arguments_of(config)) is False
    leave_out(config, ROPE_FUSION.destination)
    assert config.model.apply_rope_fusion is True
    set_argument(config, ROPE_FUSION.destination, ROPE_FUSION.write(False))
    assert config.model.apply_rope_fusion is False


class Kernels(Enum):
    """An enumeration as Megatron-Core has them."""

    flash = 1
    fused = 2


@dataclass
class Section:
    """A section with a field of an enumeration that may be empty."""

    kernels: Kernels | None = None
    scope: str | Kernels | None = None


@pytest.mark.parametrize("section", [Section(), SimpleNamespace(kernels=Kernels.flash, scope=None)])
def test_a_field_of_an_enumeration_takes_the_member_that_a_flag_names(section: object) -> None:
    config = make_config(ddp=section)
    for value, member in (("fused", Kernels.fused), (Kernels.flash, Kernels.flash)):
        set_argument(config, "kernels", value)
        assert config.ddp.kernels is member
    with pytest.raises(PlanError, match="kernels: other; this release's Kernels has flash, fused"):
        set_argument(config, "kernels", "other")
    set_argument(config, "scope", "fused")
    assert config.ddp.scope == "fused"
    leave_out(config, "kernels")
    assert config.ddp.kernels is None


def test_a_field_that_the_configuration_lacks_keeps_the_axes_that_need_it() -> None:
    config = make_config()
    assert missing_flag_features(known_arguments(config)) == ()
    del config.model.pipeline_model_parallel_layout
    assert missing_flag_features(known_arguments(config)) == ("without --pipeline-model-parallel-layout",)


def test_a_model_of_parts_has_the_layers_configuration_behind_it() -> None:
    layers = make_model()
    config = make_config(make_model(transformer=layers))
    del config.model.recompute_granularity
    set_argument(config, "recompute_granularity", "full")
    assert layers.recompute_granularity == "full"


def test_the_padded_vocabulary_stays_under_another_tensor_parallel_size() -> None:
    config = make_config()
    assert vocabulary_of(config) == 16000
    config.model.tensor_model_parallel_size = 4
    set_argument(config, "padded_vocab_size", 16384)
    assert vocabulary_of(config) == 16384
    config.model.vocab_size = None
    assert vocabulary_of(config) is None


def test_a_dispatcher_is_written_with_its_back_end() -> None:
    flex: dict[str, Any] = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    config = make_config(make_model(**flex, moe_enable_deepep=False))
    assert TOKEN_DISPATCHER.read(arguments_of(config)) == "flex-hybridep"
    for value, backend in (("alltoall", "deepep"), ("flex-hybridep", "hybridep"), ("flex-deepep", "deepep")):
        for name, argument in TOKEN_DISPATCHER.arguments(value).items():
            if argument is None:
                leave_out(config, name)
            else:
                set_argument(config, name, argument)
        assert TOKEN_DISPATCHER.read(arguments_of(config)) == value
        assert config.model.moe_flex_dispatcher_backend == backend


def test_modules_on_the_host_are_two_fields() -> None:
    config = make_config(make_model(fine_grained_activation_offloading=False, offload_modules=[]))
    assert OFFLOAD_MODULES.read(arguments_of(config)) == "none"
    for name, value in OFFLOAD_MODULES.arguments("core_attn").items():
        set_argument(config, name, value)
    assert config.model.offload_modules == ["core_attn"]
    assert OFFLOAD_MODULES.read(arguments_of(config)) == "core_attn"
    for name in OFFLOAD_MODULES.arguments("none"):
        leave_out(config, name)
    assert (config.model.fine_grained_activation_offloading, config.model.offload_modules) == (False, [])


def test_no_plan_turns_sharded_parameters_on_or_off() -> None:
    """The precision of gradients is a type of PyTorch's in a configuration, and a text in a flag."""
    section = SimpleNamespace(
        use_distributed_optimizer=True,
        bucket_size=None,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
    )
    args = arguments_of(make_config(ddp=section))
    assert features_of(args) == ["fsdp"]
    assert USE_MEGATRON_FSDP.read(args) is None
