"""The optimizer on the host: where Megatron has it, and what of it is read back."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quartet_plugin.megatron.execution import offloads_optimizer
from quartet_plugin.space.knobs.knob import KnobContext
from quartet_plugin.space.knobs.optimizer_cpu_offload import OPTIMIZER_CPU_OFFLOAD
from tests.space.knobs.test_expert_overlap import plans, space_of, states

NAME = OPTIMIZER_CPU_OFFLOAD.name
AWARE = ("precision_aware_optimizer",)


@pytest.mark.parametrize("command", [False, True])
def test_it_is_searched_in_dense_models_too(command: bool) -> None:
    layout = {"distributed_optimizer": True, "expert_parallel": 1}
    space = space_of(search={NAME: "auto"}, command={NAME: command}, features=AWARE, layout=layout)
    assert {plan.layout.setting(NAME) for plan in plans(space)} == {None, not command}


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"features": ()}, "needs --use-precision-aware-optimizer in the command"),
        ({"layer_impl": "local"}, "it copies between a GPU and its host; needs --transformer-impl"),
        ({"features": (*AWARE, "fp8")}, "fp8"),
        ({"features": (*AWARE, "optimizer_offload_part")}, "optimizer_offload_part"),
    ],
)
def test_what_keeps_it(job: dict[str, Any], reason: str) -> None:
    space = space_of(
        search={}, command={NAME: False}, **{"features": AWARE, "layout": {"expert_parallel": 1}, **job}
    )
    assert states(space)[NAME].startswith(f"kept: {reason}")


def test_it_needs_the_distributed_optimizer() -> None:
    space = space_of(search={}, command={NAME: False}, features=AWARE, layout={"expert_parallel": 1})
    sharded = replace(space.job.layout, distributed_optimizer=True)
    for layout, fault in (
        (sharded, None),
        (replace(sharded, distributed_optimizer=False), "needs distributed_optimizer"),
    ):
        context = KnobContext(layout=layout, shape=space.job.shape, rules=space.rules())
        assert OPTIMIZER_CPU_OFFLOAD.fault(True, context) == fault


class HybridDeviceOptimizer:
    """An optimizer of the class that Megatron makes."""


def test_what_was_built_is_read_back() -> None:
    on_host, on_device = (SimpleNamespace(optimizer=kind()) for kind in (HybridDeviceOptimizer, object))
    assert offloads_optimizer(None) is None
    assert offloads_optimizer(on_host) is True
    assert offloads_optimizer(on_device) is False
    assert offloads_optimizer(SimpleNamespace(chained_optimizers=[on_device, on_host])) is True
