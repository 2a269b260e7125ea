"""The features of a job that are read off DeepSpeed's engine and its ds_config."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine

from quartet_plugin.deepspeed.describe import features_of

SGD = torch.optim.SGD
SHARDED: dict[str, Any] = {"zero_optimization": {"stage": 1}}
FP32_SUMS: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}


class ConfiguredEngine:
    """What DeepSpeed's engine reads in a ds_config, with its own methods and without anything built."""

    def __init__(self, config: dict[str, Any], optimizer: Any) -> None:
        self._config = DeepSpeedConfig({"train_batch_size": 1, **config})
        self.basic_optimizer = optimizer([torch.nn.Parameter(torch.zeros(1))])
        layers = [torch.nn.Linear(2, 2) for _ in range(4)]
        self.module = SimpleNamespace(_layer_specs=layers, dynamic_shape=False)
        self.grid = SimpleNamespace(model_parallel_size=1)
        self.num_stages = 2

    def __getattr__(self, name: str) -> Any:
        return getattr(DeepSpeedEngine, name).__get__(self)


def features(config: dict[str, Any], optimizer: Any = torch.optim.Adam) -> list[str]:
    return features_of(ConfiguredEngine(config, optimizer), config, has_own_iterator=False)


@pytest.mark.parametrize(
    ("config", "optimizer", "is_bound"),
    [
        ({}, torch.optim.Adam, False),
        ({**SHARDED, "bf16": {"enabled": True}}, torch.optim.Adam, False),
        ({**SHARDED, **FP32_SUMS}, torch.optim.Adam, False),
        ({**SHARDED, **FP32_SUMS, "bf16": {"enabled": True}}, torch.optim.Adam, True),
        ({**SHARDED, **FP32_SUMS, "fp16": {"enabled": True}}, torch.optim.Adam, True),
        (
            {**SHARDED, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            torch.optim.Adam,
            True,
        ),
        (
            {**SHARDED, "fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
            torch.optim.Adam,
            True,
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            torch.optim.Adam,
            True,
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}},
            torch.optim.Adam,
            False,
        ),
        ({"zero_optimization": {"stage": 1, "compute_grad_norm": False}}, torch.optim.Adam, True),
        ({}, SGD, True),
        ({"zero_allow_untested_optimizer": True}, SGD, False),
    ],
)
def test_a_stage_that_deepspeed_would_refuse_is_known(
    config: dict[str, Any], optimizer: Any, is_bound: bool
) -> None:
    assert ("zero_bound" in features(config, optimizer)) == is_bound


@pytest.mark.parametrize(
    ("config", "is_summed"),
    [
        ({}, False),
        ({"gradient_allreduce_op": "mean"}, False),
        ({"gradient_allreduce_op": "sum"}, True),
        ({"gradient_allreduce_op": "SUM"}, True),
    ],
)
def test_gradients_that_are_summed_over_copies_are_known(config: dict[str, Any], is_summed: bool) -> None:
    assert ConfiguredEngine(config, SGD)._config.gradient_allreduce_op == ("sum" if is_summed else "mean")
    assert ("summed_gradients" in features(config)) == is_summed
