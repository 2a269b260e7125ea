"""The rules that Megatron checks of a hybrid model's pattern, for a job that is read and not started.

They are those of `validate_args` and of megatron/core/models/hybrid/hybrid_layer_allocation.py.
"""

from collections.abc import Mapping
from typing import Any

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.shape import MAX_LAYERS

PATTERN, OLD_PATTERN = "--hybrid-layer-pattern", "--hybrid-override-pattern"

# The letters of layers that have a price, and layers without one.
_PRICED = "M*+-E"
_UNPRICED = {"G": "gated delta nets", "D": "sparse attention"}
# What says the stages of other models, by the names of its arguments.
_OTHER_STAGES = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_END_STAGES = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


def num_pattern_layers(values: Mapping[str, Any]) -> int | None:
    """The layers of the pattern among a command's arguments; None without a pattern.

    Raises ConfigError, naming the flag, for a pattern that Megatron refuses and for layers without a price.
    """
    pattern, old = values["hybrid_layer_pattern"], values["hybrid_override_pattern"]
    if pattern and old:
        raise ConfigError(f"{OLD_PATTERN}: Megatron refuses it beside {PATTERN}; omit it")
    if not (pattern or old):
        return None
    flag, text = (PATTERN, str(pattern)) if pattern else (OLD_PATTERN, str(old))
    num_layers = num_layers_in(text, name=flag, depth=str(values["mtp_hybrid_override_pattern"] or ""))
    _check_stages(f"{flag}: {text[:60]!r}", values, num_stages=len(text.partition("/")[0].split("|")))
    return num_layers


def num_layers_in(pattern: str, *, name: str, depth: str = "") -> int:
    """The number of layers before a pattern's first slash.

    `depth` is the pattern of one depth of multi-token prediction, where another flag gives it. `name` is the
    flag or key that an error names. Raises ConfigError as `num_pattern_layers` does.
    """
    named = f"{name}: {pattern[:60]!r}"
    main, *depths = pattern.split("/")
    layers = main.replace("|", "")
    for part in (layers, *depths, depth):
        _check_letters(named, part)
    if len(set(depths)) > 1 or "" in depths:
        raise ConfigError(f"{named}; all depths behind a slash must have the same layers, at least one")
    if not 0 < len(layers) <= MAX_LAYERS:
        raise ConfigError(
            f"{named}; has {len(layers)} layers, must have 1 to {MAX_LAYERS}; correct the pattern"
        )
    return len(layers)


def _check_letters(named: str, part: str) -> None:
    """Raises ConfigError for layers that Megatron does not have, or not in one model, or without a price."""
    for letter in part:
        if letter in _UNPRICED:
            raise ConfigError(
                f"{named}; `quartet plan` does not price {_UNPRICED[letter]} ({letter}); tune the command "
                "with `quartet tune`"
            )
        if letter not in _PRICED:
            raise ConfigError(f"{named}; {letter!r} is no layer: layers are {' '.join(_PRICED)}; remove it")
    if {"*", "+"} <= set(part):
        raise ConfigError(f"{named}; Megatron refuses attention (*) beside latent attention (+)")


def _check_stages(named: str, values: Mapping[str, Any], *, num_stages: int) -> None:
    """Raises ConfigError for stages that are said otherwise, or that the pipeline ranks do not divide."""
    others = _OTHER_STAGES if num_stages == 1 else (*_OTHER_STAGES, *_END_STAGES)
    other = next((name for name in others if values[name] not in (None, False)), None)
    if other is not None:
        raise ConfigError(
            f"--{other.replace('_', '-')}: Megatron refuses it beside {PATTERN}, whose pipes are the stages; "
            "omit it"
        )
    ranks = values["pipeline_model_parallel_size"]
    if num_stages > 1 and (ranks == 1 or num_stages % ranks):
        raise ConfigError(
            f"{named}; has {num_stages} stages; set --pipeline-model-parallel-size ({ranks}) to a divisor of "
            f"{num_stages} above 1, or change the pipes of the pattern"
        )
