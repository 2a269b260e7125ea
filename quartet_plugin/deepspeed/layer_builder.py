"""The layers of a model of another depth and width, made by a function that the ds_config names.

DeepSpeed is given a model as a list of layers, which only the script can make. The function takes the sizes
that it needs by name, `num_layers` and `hidden_size` at least, and returns the list for `PipelineModule`.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from quartet_plugin.deepspeed.describe import shape_of
from quartet_plugin.errors import PlanError
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.protocol.ds_config import SECTION, Settings

# Sizes that a builder may take, and those that it must.
_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    "kv_channels",
)
_NEEDED = frozenset({"num_layers", "hidden_size"})
# Sizes of the data, and what layers do not tell.
_NOT_COMPARED = frozenset({"seq_length", "max_position_embeddings", "num_query_groups", "kv_channels"})


def built_layers(settings: Settings, shape: ModelShape) -> list[Any]:
    """The layers of a model of `shape`, by the function that the section names.

    Raises PlanError where none is named, it is not there or takes other arguments, or makes another model.
    """
    name = settings.layer_builder
    key = f"{SECTION}.layer_builder"
    if name is None:
        raise PlanError(
            f"shape: {shape.label}; the script builds the layers: name the function that builds them for "
            f"another depth and width as {key} of the ds_config"
        )
    function = _function(name, key=key)
    taken = _taken_sizes(function, name=f"{key}: {name}")
    layers = list(function(**{size: getattr(shape, size) for size in taken}))
    _check_shape(layers, shape, name=f"{key}: {name}")
    return layers


def _taken_sizes(function: Callable[..., Any], *, name: str) -> tuple[str, ...]:
    """The sizes that a builder takes by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise PlanError(f"{name}; its arguments cannot be read: {error}") from error
    named = [x for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    taken = tuple(x.name for x in named if x.name in _SIZES)
    others = [x for x in parameters if x not in named and x.kind is x.POSITIONAL_ONLY]
    others += [x for x in named if x.name not in _SIZES and x.default is x.empty]
    if others or not _NEEDED.issubset(taken):
        raise PlanError(
            f"{name}({', '.join(str(x) for x in parameters)}); must take num_layers and hidden_size by name, "
            f"and besides only {', '.join(size for size in _SIZES if size not in _NEEDED)}"
        )
    return taken


def _function(name: str, *, key: str) -> Callable[..., Sequence[Any]]:
    module_name, _, attribute = name.rpartition(":")
    try:
        module = importlib.import_module(module_name) if module_name else sys.modules["__main__"]
    except ImportError as error:
        raise PlanError(f"{key}: {name}; the module cannot be imported: {error}") from error
    function: Callable[..., Sequence[Any]] | None = getattr(module, attribute, None)
    if not callable(function):
        place = f"the module {module_name}" if module_name else "the script (above the line of the model)"
        raise PlanError(f"{key}: {name}; {place} defines no such function")
    return function


def _check_shape(layers: Sequence[Any], shape: ModelShape, *, name: str) -> None:
    built = shape_of(layers, seq_length=shape.seq_length)
    for field in fields(shape):
        if field.name in _NOT_COMPARED:
            continue
        value, planned = getattr(built, field.name), getattr(shape, field.name)
        if value != planned:
            raise PlanError(f"{name} made a model of {field.name} {value}; the plan has {planned}")
