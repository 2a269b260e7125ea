"""Checks the keys by which a JOB.yaml describes a hybrid model: they have the names of Megatron's flags.

`launchers.hybrid_words` has the rules of the pattern itself, for commands too.
"""

from typing import Any

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.hybrid_words import num_layers_in
from quartet_plugin.model.shape import LETTERS
from quartet_plugin.planner.model_section import ModelSection

KEY = "hybrid_layer_pattern"
# Keys that say nothing without a pattern.
_OF_PATTERN = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "router_losses")
# Letters whose layers have keys: the key, and the words for what it describes.
_DESCRIBED = {
    LETTERS["experts"]: ("num_experts", "experts"),
    "+": ("latent_attention", "latent attention"),
}
# FP8 products have multiples of it.
_FP8_MULTIPLE = 16


def with_pattern_counts(model: Any) -> Any:
    """A `model` section with the numbers of layers that its pattern has, where it does not say them itself.

    Raises ConfigError for a pattern that no plan has.
    """
    pattern = model.get(KEY) if isinstance(model, dict) else None
    if not isinstance(pattern, str):
        return model
    if "|" in pattern:
        raise ConfigError(
            f"model.{KEY}: {pattern[:60]!r}; pipes fix the stages, which a plan chooses; remove the pipes, "
            "or fix the stages by search.split"
        )
    counts = {"num_layers": num_layers_in(pattern, name=f"model.{KEY}"), "mtp_layers": pattern.count("/")}
    return {**counts, **model}


def check_hybrid_keys(model: ModelSection) -> None:
    """Raises ConfigError for a key that needs a pattern, and for one that does not go with the pattern."""
    pattern = model.hybrid_layer_pattern
    if pattern is not None:
        _check_counts(model, pattern)
        _check_layers(model, pattern)
        if LETTERS["state_space"] in pattern:
            _check_state_space_layers(model)
        return
    given = next((name for name in _OF_PATTERN if name in model.model_fields_set), None)
    if given is not None:
        raise ConfigError(
            f"model.{given}: {getattr(model, given)}; needs model.{KEY}; give the pattern, or omit the key"
        )


def _check_counts(model: ModelSection, pattern: str) -> None:
    """Raises ConfigError for other numbers of layers than the pattern has."""
    counts = {
        "num_layers": (len(pattern.partition("/")[0]), "layers"),
        "mtp_layers": (pattern.count("/"), "depths behind slashes"),
    }
    for name, (count, words) in counts.items():
        stated = getattr(model, name)
        if stated != count:
            raise ConfigError(
                f"model.{name}: {stated}; must be {count}, the number of {words} in {KEY}; correct or omit it"
            )


def _check_layers(model: ModelSection, pattern: str) -> None:
    """Raises ConfigError for letters without the keys of their layers, and for such keys without letters."""
    for letter, (key, words) in _DESCRIBED.items():
        given = getattr(model, key)
        if letter in pattern and given is None:
            raise ConfigError(f"model.{key}: missing; layers of {KEY} have {words} ({letter}); give the key")
        if given is not None and letter not in pattern:
            value = given if isinstance(given, int) else "given"
            raise ConfigError(
                f"model.{key}: {value}; no layer of {KEY} has {words} ({letter}); write the letter, or omit "
                "the key"
            )
    if model.router_losses and LETTERS["experts"] not in pattern:
        raise ConfigError(
            f"model.router_losses: true; no layer of {KEY} has experts (E); write the letter, or omit the key"
        )
    if model.num_dense_layers:
        raise ConfigError(
            f"model.num_dense_layers: {model.num_dense_layers}; must be 0, because {KEY} has the letters of "
            "layers with experts (E); omit it"
        )


def _check_state_space_layers(model: ModelSection) -> None:
    """Raises ConfigError for sizes that Megatron's mixer refuses (megatron/core/ssm/mamba_mixer.py)."""
    head, groups = model.mamba_head_dim, model.mamba_num_groups
    if model.mamba_num_heads is None and 2 * model.hidden_size % head:
        raise ConfigError(
            f"model.mamba_head_dim: {head}; must divide twice the hidden_size ({2 * model.hidden_size}); "
            "change it, or give mamba_num_heads"
        )
    heads = model.mamba_num_heads or 2 * model.hidden_size // head
    if heads % groups:
        raise ConfigError(
            f"model.mamba_num_groups: {groups}; must divide the {heads} heads of a state-space layer; change "
            "it, or mamba_num_heads"
        )
    columns = 2 * heads * head + 2 * groups * model.mamba_state_dim + heads
    if model.precision == "fp8" and columns % _FP8_MULTIPLE:
        raise ConfigError(
            f"model.precision: fp8; the {columns} columns of a state-space layer's first projection must be "
            f"a multiple of {_FP8_MULTIPLE}; change mamba_num_heads, or take bf16"
        )
