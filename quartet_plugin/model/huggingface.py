"""A model's `config.json` as HuggingFace repositories have it, read as the `model` section of a job.

Only sizes are read. What such a file leaves open stays open: precision is the job's, and the sequence length
is what the file says the model was pretrained with, at most `MAX_ASSUMED_SEQ_LENGTH`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import read_json, shown

CONFIG_NAME = "config.json"
# Context windows are longer than the sequences that models are pretrained with.
MAX_ASSUMED_SEQ_LENGTH = 8192
MAX_CONFIG_BYTES = 2**20
_LARGEST = 2**31
_GATED = ("silu", "swish", "swiglu", "gelu", "gelu_pytorch_tanh", "gelu_new")


class ModelConfig:
    """The fields of one config.json; every refusal names the file, the field, the value and the rule."""

    def __init__(self, fields: Mapping[str, Any], *, where: str) -> None:
        self.fields = fields
        self.where = where

    def has(self, name: str) -> bool:
        """Whether the file gives the field a value."""
        return self.fields.get(name) is not None

    def size(self, *names: str, least: int = 1) -> int:
        """The whole number under the first of `names` that the file has. Raises ConfigError."""
        name = next((name for name in names if self.has(name)), names[0])
        if not self.has(name):
            raise self.error(name, "a whole number is needed")
        value = self.fields[name]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
            raise self.error(name, f"must be a whole number from {least} to {_LARGEST}")
        return int(value)

    def optional_size(self, *names: str) -> int | None:
        """The number that `size` reads; None where the file has none of the fields."""
        return self.size(*names) if any(self.has(name) for name in names) else None

    def flag(self, name: str, *, default: bool) -> bool:
        """A truth value. Raises ConfigError for something else."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return default if value is None else value

    def require(self, name: str, expected: Any, rule: str) -> None:
        """Raise ConfigError where the field has another value than `expected`."""
        if self.has(name) and self.fields[name] != expected:
            raise self.error(name, rule)

    def error(self, name: str, rule: str) -> ConfigError:
        """The refusal of one field."""
        value = shown(self.fields[name]) if name in self.fields else "missing"
        return ConfigError(f"{self.where}: {name}: {value}: {rule}")


Section = dict[str, Any]


def model_section(path: Path) -> Section:
    """The `model` section of a job that a config.json, or the folder of one, describes.

    Raises ConfigError, naming the field, for an architecture or a setting that no section can hold.
    """
    file = path / CONFIG_NAME if path.is_dir() else path
    fields = read_json(file, max_bytes=MAX_CONFIG_BYTES)
    if not isinstance(fields, dict):
        raise ConfigError(f"{file}: must be a JSON object, not {type(fields).__name__}")
    config = ModelConfig(fields, where=str(file))
    name = fields.get("model_type")
    read = _FAMILIES.get(name) if isinstance(name, str) else None
    if read is None:
        raise config.error("model_type", f"unknown architecture; known are {', '.join(_FAMILIES)}")
    return {**_common(config), **read(config)}


def is_config(text: str) -> bool:
    """Whether a model's name is rather the path of a config.json, or of its folder."""
    return text.endswith(".json") or (Path(text) / CONFIG_NAME).is_file()


def _common(config: ModelConfig) -> Section:
    heads = config.size("num_attention_heads")
    section: Section = {
        "num_layers": config.size("num_hidden_layers"),
        "hidden_size": config.size("hidden_size"),
        "num_attention_heads": heads,
        "num_query_groups": config.optional_size("num_key_value_heads") or heads,
        "vocab_size": config.size("vocab_size"),
        "seq_length": _seq_length(config),
        "max_position_embeddings": config.size("max_position_embeddings"),
        "position_embedding": "rope",
        "tied_embeddings": config.flag("tie_word_embeddings", default=False),
    }
    if config.has("head_dim"):
        section["kv_channels"] = config.size("head_dim")
    return section


def _seq_length(config: ModelConfig) -> int:
    """The pretraining length where the positions were stretched later; else the context window, capped."""
    scaling = config.fields.get("rope_scaling") or config.fields.get("rope_parameters")
    if isinstance(scaling, dict) and "original_max_position_embeddings" in scaling:
        inner = ModelConfig(scaling, where=f"{config.where}: rope_scaling")
        return inner.size("original_max_position_embeddings")
    return min(config.size("max_position_embeddings"), MAX_ASSUMED_SEQ_LENGTH)


def _gated(config: ModelConfig) -> Section:
    activation = config.fields.get("hidden_act", "silu")
    if activation not in _GATED:
        raise config.error("hidden_act", f"must be one of {', '.join(_GATED)} in this family")
    return {"gated_ffn": True, "ffn_hidden_size": config.size("intermediate_size")}


def _squared_relu(config: ModelConfig) -> Section:
    config.require("hidden_act", "relu2", "must be relu2 in this family")
    return {"gated_ffn": False, "ffn_hidden_size": config.size("intermediate_size")}


def _experts(config: ModelConfig, *, count: tuple[str, ...], width: str) -> Section:
    section = {
        **_gated(config),
        "num_experts": config.size(*count, least=2),
        "experts_per_token": config.size("num_experts_per_tok", "experts_per_token"),
        "expert_ffn_hidden_size": config.size(width),
    }
    if section["experts_per_token"] > section["num_experts"]:
        raise config.error("num_experts_per_tok", f"must be at most {count[0]}")
    return section


def _mixtral(config: ModelConfig) -> Section:
    return _experts(config, count=("num_local_experts",), width="intermediate_size")


def _qwen_experts(config: ModelConfig) -> Section:
    config.require("decoder_sparse_step", 1, "must be 1: every layer has experts")
    section = _experts(config, count=("num_experts", "num_local_experts"), width="moe_intermediate_size")
    dense = config.fields.get("mlp_only_layers") or []
    if dense != list(range(len(dense))):
        raise config.error("mlp_only_layers", "must be empty or the first layers")
    section["num_dense_layers"] = len(dense)
    shared = config.optional_size("shared_expert_intermediate_size")
    return section if shared is None else {**section, "shared_expert_ffn_hidden_size": shared}


def _deepseek(config: ModelConfig) -> Section:
    config.require("moe_layer_freq", 1, "must be 1: every layer after the first ones has experts")
    section = _experts(config, count=("n_routed_experts",), width="moe_intermediate_size")
    num_shared = config.size("n_shared_experts", least=0) if config.has("n_shared_experts") else 0
    dense = config.size("first_k_dense_replace", least=0) if config.has("first_k_dense_replace") else 0
    latent = {
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_head_dim": "qk_nope_head_dim",
        "qk_pos_emb_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
    }
    return {
        **section,
        "shared_expert_ffn_hidden_size": num_shared * section["expert_ffn_hidden_size"],
        "num_dense_layers": dense,
        "latent_attention": {name: config.size(field) for name, field in latent.items()},
        # Latent attention has head sizes of its own.
        "num_query_groups": None,
        "kv_channels": None,
    }


_FAMILIES: dict[str, Callable[[ModelConfig], Section]] = {
    "llama": _gated,
    "mistral": _gated,
    "qwen2": _gated,
    "qwen3": _gated,
    "qwen2_moe": _qwen_experts,
    "qwen3_moe": _qwen_experts,
    "mixtral": _mixtral,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "gpt_oss": _mixtral,
    "nemotron": _squared_relu,
}
