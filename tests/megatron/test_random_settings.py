"""Dropout and router jitter of a built model are set aside, and are afterwards what they were."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch

from quartet_plugin.megatron.random_settings import ROUTER, RandomSettings


class Attention(torch.nn.Module):  # type: ignore[misc]
    """As Megatron's own: the probability in a layer; as Transformer Engine's: in a number."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.core = torch.nn.Dropout(config.attention_dropout)
        self.attention_dropout = config.attention_dropout


class Layer(torch.nn.Module):  # type: ignore[misc]
    """A transformer layer: its own copy of the probability, and the configuration that all layers share."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.hidden_dropout = config.hidden_dropout
        self.attention = Attention(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Dropout by each of the ways in which a layer draws."""
        x = torch.nn.functional.dropout(x, self.hidden_dropout, training=self.training)
        x = torch.nn.functional.dropout(x, self.config.hidden_dropout, training=self.training)
        return self.attention.core(x)


def make_model(**config: Any) -> list[torch.nn.Module]:
    values = {"hidden_dropout": 0.2, "attention_dropout": 0.3, "moe_input_jitter_eps": 0.01, **config}
    shared = SimpleNamespace(**values)
    return [torch.nn.Sequential(Layer(shared), Layer(shared)), torch.nn.Sequential(Layer(shared))]


def values_of(model: list[torch.nn.Module]) -> list[Any]:
    layers = [layer for chunk in model for layer in chunk]
    return [
        (
            layer.hidden_dropout,
            layer.attention.core.p,
            layer.attention.attention_dropout,
            vars(layer.config),
        )
        for layer in layers
    ]


def test_nothing_is_random_while_the_settings_are_set_aside() -> None:
    model = make_model()
    before = [(*row[:3], dict(row[3])) for row in values_of(model)]
    settings, x = RandomSettings.of(model), torch.ones(64)
    assert settings.names == ("attention_dropout", "hidden_dropout", "moe_input_jitter_eps", "p")
    settings.set_aside()
    state = torch.get_rng_state()
    assert torch.equal(model[0](x), x)
    assert torch.equal(torch.get_rng_state(), state)
    assert model[0][0].config.moe_input_jitter_eps is None
    settings.restore()
    assert [(*row[:3], dict(row[3])) for row in values_of(model)] == before
    assert not torch.equal(model[0](x), x)


def test_routing_by_chance_is_set_aside_and_restored() -> None:
    routing = {"moe_router_force_load_balancing": True, "moe_router_force_biased": 0.0}
    model = make_model(**routing)
    config, settings = model[0][0].config, RandomSettings.of(model)
    assert {"moe_router_force_load_balancing", "moe_router_force_biased"} <= set(settings.names)
    settings.set_aside()
    assert {name: getattr(config, name) for name in ROUTER} == ROUTER
    settings.restore()
    assert {name: getattr(config, name) for name in routing} == routing


def test_a_setting_of_the_router_is_off_as_megatron_leaves_it() -> None:
    from megatron.core.transformer import TransformerConfig

    defaults = {field.name: field.default for field in fields(TransformerConfig)}
    assert {name: defaults[name] for name in ROUTER if name in defaults} == {
        name: off for name, off in ROUTER.items() if name in defaults
    }


def test_a_model_that_draws_nothing_has_no_settings() -> None:
    model = make_model(hidden_dropout=0.0, attention_dropout=0.0, moe_input_jitter_eps=None)
    assert RandomSettings.of(model).names == ()
