"""A ConfigContainer of Megatron-Bridge as Megatron's arguments, and arguments written to it.

Its sections are configurations of Megatron-Core, so most fields have the names of the arguments that Megatron
makes them of. The others are listed here. Nothing of the Bridge is imported.
"""

from argparse import Namespace
from collections.abc import Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from enum import Enum, EnumType
from typing import Any, get_args

from quartet_plugin.errors import PlanError
from quartet_plugin.space.knobs.registry import SETTINGS
from quartet_plugin.space.needed_flags import NEEDED_FLAGS

# Why no layer of a plan is cut otherwise than Megatron cuts it.
NO_TENSOR_PARTITION = "Megatron-Bridge builds its models by itself"
# Sections in the order in which a name is looked for. `validation` is there in later releases.
_SECTIONS = (
    *("model", "train", "validation", "ddp", "optimizer", "dist"),
    *("checkpoint", "dataset", "logger", "profiling", "comm_overlap"),
)
# Arguments that no section has, or that one has under another name.
_ABSENT: dict[str, Any] = {
    "padded_vocab_size": None,
    "pad_vocab_size": True,
    "num_layers_per_virtual_pipeline_stage": None,
    "pipeline_model_parallel_layout": None,
    "max_position_embeddings": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "microbatch_group_size_per_vp_stage": None,
    "recompute_activations": False,
    "recompute_granularity": None,
    "global_batch_size": None,
    "overlap_p2p_comm": False,
    "dataloader_type": None,
    "make_vocab_size_divisible_by": 1,
    "moe_layer_freq": 1,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
}
_RENAMED = {
    "num_experts": "num_moe_experts",
    "swiglu": "gated_linear_unit",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "ddp_bucket_size": "bucket_size",
    "ddp_num_buckets": "num_buckets",
}
# What an argument is without its flag, where that is not None; of the switches among settings, knobs say it.
_LEFT_OUT: dict[str, Any] = {
    **dict.fromkeys(("sequence_parallel", "use_distributed_optimizer"), False),
    "moe_layer_recompute": False,
    "moe_enable_deepep": False,
    "fine_grained_activation_offloading": False,
    "offload_modules": [],
    "moe_flex_dispatcher_backend": "deepep",
    "overlap_p2p_comm_warmup_flush": False,
    **dict.fromkeys(("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), False),
    # With --no-overlap-p2p-communication left out.
    "overlap_p2p_comm": True,
}
# The layers of a layout that is a list, by the letters of one that is a text.
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
# Configurations that are no single list of like layers, by words of their classes' names.
_OTHER_MODELS = {"T5": "decoder_num_layers", "Mamba": "is_hybrid_model", "Hybrid": "is_hybrid_model"}


def arguments_of(config: Any) -> Namespace:
    """The configuration as Megatron's arguments, before or after the Bridge has completed it."""
    values = dict(_ABSENT)
    for section in reversed(sections_of(config)):
        values |= {name: value for name, value in _fields(section).items() if not name.startswith("_")}
    for name, field in _RENAMED.items():
        values[name] = values.get(field)
    # Megatron-Bridge gives dtypes, not text, so the knob stays unread: no plan turns Megatron-FSDP on or off.
    values.pop("data_parallel_sharding_strategy", None)
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    groups = values.get("num_query_groups") or heads
    values |= {
        # As Megatron-Core completes them; Megatron's own flags have another rule for gated layers.
        "ffn_hidden_size": values.get("ffn_hidden_size") or 4 * hidden,
        "kv_channels": values.get("kv_channels") or hidden // heads,
        "num_query_groups": groups,
        "group_query_attention": groups != heads,
        "untie_embeddings_and_output_weights": not values.get("share_embeddings_and_output_weights", True),
        "use_distributed_optimizer": any(
            getattr(section, "use_distributed_optimizer", False) for section in sections_of(config)
        ),
        "pipeline_model_parallel_layout": _layout_text(values["pipeline_model_parallel_layout"]),
        "transformer_impl": _layer_impl(values.get("transformer_layer_spec")),
        # The Bridge has a section that can be enabled where Megatron has a switch.
        "inprocess_restart": bool(getattr(getattr(config, "inprocess_restart", None), "enabled", False)),
        **_precision(config, values),
        **_other_model(config),
    }
    return Namespace(**values)


def sections_of(config: Any) -> list[Any]:
    """The sections that are there; a model of parts is followed by the configuration of its layers."""
    sections = []
    for name in _SECTIONS:
        section = getattr(config, name, None)
        if section is not None:
            sections.append(section)
            if name == "model" and "transformer" in _fields(section):
                sections.append(section.transformer)
    return sections


def has_argument(config: Any, name: str) -> bool:
    """Whether a section has a field for an argument."""
    field = _RENAMED.get(name, name)
    return any(field in _fields(section) for section in sections_of(config))


def known_arguments(config: Any) -> set[str]:
    """The arguments by which plans change axes, as far as the configuration has them."""
    names = {name for names in NEEDED_FLAGS.values() for name in names}
    stand_ins = {"padded_vocab_size": "make_vocab_size_divisible_by"}
    return {name for name in names if has_argument(config, stand_ins.get(name, name))}


def set_argument(config: Any, name: str, value: Any) -> None:
    """Write an argument to every section that has it; of an enumeration, the member with the value's name.

    Raises PlanError where no section has it, or the enumeration has no such member.
    """
    if name == "group_query_attention":
        return  # the number of groups says it
    if name == "padded_vocab_size":
        # The Bridge pads by itself: to a multiple of the tensor-parallel size times this.
        name, value = "make_vocab_size_divisible_by", value // config.model.tensor_model_parallel_size
    if not has_argument(config, name):
        raise PlanError(f"{name}: not a field of this Megatron-Bridge's configuration; keep its value")
    field = _RENAMED.get(name, name)
    for section in sections_of(config):
        if field in _fields(section):
            setattr(section, field, _member(section, field, value))


def leave_out(config: Any, name: str) -> None:
    """Set the field of an argument as without its flag; what no section has is left out already."""
    if name == "num_query_groups":
        set_argument(config, name, config.model.num_attention_heads)
    elif has_argument(config, name):
        set_argument(config, name, _without_flag(name))
        if name == "overlap_p2p_comm":
            set_argument(config, "batch_p2p_comm", False)


def _without_flag(name: str) -> Any:
    switches = {knob.destination: knob.without_flag for knob in SETTINGS if knob.kind == "switch"}
    return copy({**_LEFT_OUT, **switches}.get(name))


def vocabulary_of(config: Any) -> int | None:
    """The padded vocabulary; None before the tokenizer was built."""
    model = config.model
    size = getattr(model, "vocab_size", None)
    if size is None:
        return None
    if not getattr(model, "should_pad_vocab", False):
        return int(size)
    multiple = model.make_vocab_size_divisible_by * model.tensor_model_parallel_size
    return int(-(-size // multiple) * multiple)


def _fields(section: Any) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = vars(section)
    return fields


def _member(section: Any, field: str, value: Any) -> Any:
    """The value for a field: a flag takes a member's name where a configuration holds the member."""
    kind = _enumeration(section, field)
    if kind is None or not isinstance(value, str) or isinstance(value, Enum):
        return value
    if value not in kind.__members__:
        known = ", ".join(kind.__members__)
        raise PlanError(f"{field}: {value}; this release's {kind.__name__} has {known}")
    return kind[value]


def _enumeration(section: Any, field: str) -> type[Enum] | None:
    """The enumeration of a field, by its value or, where that is None, by its type; None without one."""
    present = getattr(section, field)
    if isinstance(present, Enum):
        return type(present)
    if present is not None or not is_dataclass(section):
        return None
    (declared,) = (known.type for known in fields(section) if known.name == field)
    kinds = [kind for kind in (get_args(declared) or (declared,)) if kind is not type(None)]
    is_enumeration = len(kinds) == 1 and isinstance(kinds[0], EnumType)
    return kinds[0] if is_enumeration else None


def _layout_text(layout: Any) -> str | None:
    """A layout as the flag has it: a configuration also holds lists of layers, or Megatron-Core's object."""
    written = getattr(layout, "input_data", layout)
    if written is None or isinstance(written, str):
        return written
    # A layer is a name, or the member of an enumeration with that name.
    names = [[getattr(layer, "name", layer).strip().lower() for layer in stage] for stage in written]
    return "|".join("".join(_LETTERS.get(name, f"<{name}>") for name in stage) for stage in names)


def _layer_impl(spec: Any) -> str:
    return "local" if "local" in getattr(spec, "__name__", "") else "transformer_engine"


def _precision(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The precision that the mixed-precision section is going to set, else that of the model."""
    mixed = getattr(config, "mixed_precision", None)
    if mixed is None:
        return {"bf16": bool(values.get("bf16")), "fp16": bool(values.get("fp16"))}
    if isinstance(mixed, str):
        fp8 = mixed if "fp8" in mixed else None
        return {"bf16": "bf16" in mixed, "fp16": "fp16" in mixed.replace("bf16", ""), "fp8": fp8}
    return {name: getattr(mixed, name, None) for name in ("bf16", "fp16", "fp8")}


def _other_model(config: Any) -> dict[str, Any]:
    """The feature of a model whose stages are not made of like layers."""
    names = " ".join(cls.__name__ for cls in type(config.model).__mro__)
    features = {feature: 1 for word, feature in _OTHER_MODELS.items() if word in names}
    has_vision = any(name.startswith("vision") for name in _fields(config.model))
    return features or ({"decoder_num_layers": 1} if has_vision else {})
