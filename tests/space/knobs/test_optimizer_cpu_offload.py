"""The optimizer on the host: where Megatron has it, and what of it is read back."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.megatron.execution import offloads_optimizer, optimizer_offload_fraction
from quartet_plugin.space.knobs.knob import KnobContext, LiveJob
from quartet_plugin.space.knobs.optimizer_cpu_offload import OPTIMIZER_CPU_OFFLOAD
from quartet_plugin.space.knobs.optimizer_offload_fraction import OPTIMIZER_OFFLOAD_FRACTION as PART
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

    offload_fraction = 0.25


def test_what_was_built_is_read_back() -> None:
    on_host, on_device = (SimpleNamespace(optimizer=kind()) for kind in (HybridDeviceOptimizer, object))
    assert offloads_optimizer(None) is None
    assert offloads_optimizer(on_host) is True
    assert offloads_optimizer(on_device) is False
    chain = SimpleNamespace(chained_optimizers=[on_device, on_host])
    assert offloads_optimizer(chain) is True
    fractions = [optimizer_offload_fraction(optimizer) for optimizer in (None, on_device, on_host, chain)]
    assert fractions == [None, None, 0.25, 0.25]
    values = [PART.read_back(LiveJob(degrees={}, optimizer_offload_fraction=part)) for part in fractions]
    assert values == [None, None, "0.25", "0.25"]


def parts(search: dict[str, Any], command: dict[str, Any]) -> set[tuple[Any, Any]]:
    """The switch and the fraction of each plan; None is the command's."""
    layout = {"distributed_optimizer": True, "expert_parallel": 1}
    made = plans(space_of(search=search, command=command, features=AWARE, layout=layout))
    return {(plan.layout.setting(NAME), plan.layout.setting(PART.name)) for plan in made}


def test_a_part_of_it_is_searched_where_it_is_on() -> None:
    command = {NAME: False, PART.name: "1"}
    asked = {NAME: [False, True], PART.name: [0.25, 0.5, 1]}
    assert parts(asked, command) == {(None, None), (True, "0.25"), (True, "0.5"), (True, None)}
    on = {NAME: True, PART.name: "0.3"}
    assert parts({PART.name: "auto"}, on) == {(None, part) for part in (None, "0.25", "0.5", "0.75", "1")}
    assert parts({NAME: "auto"}, on) == {(None, None), (False, None)}
    assert parts({}, on) == {(None, None)}


def test_a_command_that_puts_no_part_of_it_on_the_host_needs_another_part() -> None:
    command = {NAME: False, PART.name: "0"}
    assert parts({NAME: "auto"}, command) == {(None, None)}
    assert parts({NAME: "auto", PART.name: [0.5]}, command) == {(None, None), (True, "0.5")}


def test_a_part_alone_is_refused_with_what_it_needs() -> None:
    reason = r"search\.optimizer_offload_fraction: 0\.5; needs optimizer_cpu_offload"
    with pytest.raises(ConfigError, match=reason):
        parts({PART.name: [0.5]}, {NAME: False, PART.name: "1"})
