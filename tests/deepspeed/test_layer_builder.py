"""Layers of another depth and width, by a function that the ds_config names."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec

from quartet_plugin.deepspeed.layer_builder import built_layers
from quartet_plugin.errors import PlanError
from quartet_plugin.protocol.ds_config import Settings
from tests.deepspeed.support import shape

SHAPE = replace(shape(3), hidden_size=64, ffn_hidden_size=256, kv_channels=32)


class Embedding(torch.nn.Module):  # type: ignore[misc]
    """Tokens and positions."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(96, hidden_size), torch.nn.Embedding(16, hidden_size)


class Block(torch.nn.Module):  # type: ignore[misc]
    """The matrices of a transformer layer."""

    def __init__(self, hidden_size: int, num_attention_heads: int) -> None:
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention = torch.nn.Linear(hidden_size, 4 * hidden_size)
        self.feed_forward = torch.nn.Linear(hidden_size, 8 * hidden_size)


def layers_of(num_layers: int, hidden_size: int, *, num_attention_heads: int = 2) -> list[Any]:
    """Layers as DeepSpeed takes them."""
    blocks = [LayerSpec(Block, hidden_size, num_attention_heads) for _ in range(num_layers)]
    return [LayerSpec(Embedding, hidden_size), *blocks, LayerSpec(torch.nn.Linear, hidden_size, 96)]


def settings_of(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any] | None) -> Settings:
    """The settings of a script that defines `function`."""
    monkeypatch.setattr(sys.modules["__main__"], "make_layers", function, raising=False)
    return Settings(layer_builder="make_layers")


@pytest.mark.parametrize(
    "function",
    [
        layers_of,
        lambda num_layers, hidden_size: layers_of(num_layers, hidden_size),
        lambda *, hidden_size, num_layers, tied=False, **more: layers_of(num_layers, hidden_size),
    ],
)
def test_a_function_makes_the_layers_of_the_plans_shape(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]
) -> None:
    layers = built_layers(settings_of(monkeypatch, function), SHAPE)
    assert [layer.typename for layer in layers] == [Embedding, *[Block] * 3, torch.nn.Linear]
    assert layers[1].module_args == (64, 2)


def test_a_function_of_a_module() -> None:
    name = f"{__name__}:layers_of"
    assert len(built_layers(Settings(layer_builder=name), SHAPE)) == 5


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (None, "defines no such function"),
        (list, "must take num_layers and hidden_size by name"),
        (lambda num_layers, hidden_size, vocab_size: [], "must take num_layers and hidden_size by name"),
        (lambda num_layers, hidden_size, /: [], "must take num_layers and hidden_size by name"),
        (lambda num_layers, hidden_size: layers_of(4, hidden_size), "num_layers 4; the plan has 3"),
        (lambda num_layers, hidden_size: layers_of(3, 32), "hidden_size 32; the plan has 64"),
    ],
)
def test_a_function_that_makes_another_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any] | None, words: str
) -> None:
    with pytest.raises(PlanError, match=words) as raised:
        built_layers(settings_of(monkeypatch, function), SHAPE)
    assert str(raised.value).startswith("quartet.layer_builder: make_layers")


def test_without_a_function_the_layers_are_the_scripts_own() -> None:
    with pytest.raises(PlanError, match=r"shape: 3x64; .* as quartet\.layer_builder of the ds_config"):
        built_layers(Settings(), SHAPE)
    with pytest.raises(PlanError, match="cannot be imported"):
        built_layers(Settings(layer_builder="no.such.module:f"), SHAPE)
