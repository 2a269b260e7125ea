"""Megatron-FSDP on or off: where Megatron has it, the flags that go with it, and what is read back."""

from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.megatron.execution import shards_parameters
from quartet_plugin.model.layout import Layout
from quartet_plugin.space.knobs.knob import KnobContext, LiveJob
from quartet_plugin.space.knobs.use_megatron_fsdp import BOUND, USE_MEGATRON_FSDP, saved_weights_refusal
from quartet_plugin.space.plan_space import Space
from tests.space.jobs import make_layout
from tests.space.knobs.test_expert_overlap import plans, space_of, states

NAME = USE_MEGATRON_FSDP.name
BOTH: dict[str, Any] = {NAME: [False, True]}


def dense_space(search: dict[str, Any], *, command: bool | None = False, **job: Any) -> Space:
    """The space of a dense model in bf16 on four devices, with or without Megatron-FSDP."""
    layout = {"distributed_optimizer": True, "expert_parallel": 1, **job.pop("layout", {})}
    settings = {"overlap_grad_reduce": True} | ({} if command is None else {NAME: command})
    features = ("fsdp",) if command is not False else ()
    return space_of(search=search, command=settings, layout=layout, **{"features": features, **job})


def test_it_stays_as_the_command_has_it_unless_the_search_names_it() -> None:
    for command in (False, True):
        space = dense_space({}, command=command)
        assert {plan.layout.setting(NAME) for plan in plans(space)} == {None}
        assert states(space)[NAME] == "kept unless search asks for it"


def test_plans_of_one_stage_turn_it_on() -> None:
    made = {
        (plan.layout.pipeline_parallel > 1, plan.layout.setting(NAME)) for plan in plans(dense_space(BOTH))
    }
    assert made == {(False, None), (False, True), (True, None)}


def test_plans_turn_a_commands_off_and_keep_its_stages() -> None:
    made = [plan.layout for plan in plans(dense_space(BOTH, command=True))]
    assert {layout.setting(NAME) for layout in made} == {None, False}
    assert {layout.pipeline_parallel for layout in made} == {1}
    assert {layout.distributed_optimizer for layout in made} == {True}


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"layer_impl": "local"}, "it gathers on streams of a GPU; needs --transformer-impl"),
        ({"precision": "fp32"}, "not tried in fp32"),
        ({"precision": "fp16"}, "not tried in fp16"),
        ({"framework_version": "0.18.2"}, "needs Megatron 0.19; older releases were not tried"),
        ({"command": None}, "the command did not report --data-parallel-sharding-strategy optim_"),
        *(({"features": (name,)}, name) for name in BOUND),
    ],
)
def test_features_that_keep_megatron_fsdp(job: dict[str, Any], reason: str) -> None:
    assert states(dense_space({}, **job))[NAME].startswith(f"kept: {reason}")


def test_experts_and_fp8_products_do_not_keep_it() -> None:
    for features in (("moe",), ("fp8",), ("mtp",)):
        space = dense_space({}, features=features)
        assert states(space)[NAME] == "kept unless search asks for it"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"pipeline_parallel": 2, "data_parallel": 2}, "needs PP 1"),
        ({"distributed_optimizer": False}, "needs distributed_optimizer"),
    ],
)
def test_megatron_fsdp_needs_pp_1_and_the_distributed_optimizer(
    changes: dict[str, Any], fault: str | None
) -> None:
    space = dense_space(BOTH)
    layout = replace(space.job.layout, **changes)
    context = KnobContext(layout=layout, shape=space.job.shape, rules=space.rules())
    assert USE_MEGATRON_FSDP.fault(True, context) == fault
    assert USE_MEGATRON_FSDP.fault(False, context) is None


def test_megatron_fsdp_keeps_the_commands_overlaps() -> None:
    space = dense_space({**BOTH, "overlap_grad_reduce": [True, False]})
    made = {(plan.layout.setting("overlap_grad_reduce"), plan.layout.setting(NAME)) for plan in plans(space)}
    assert made == {(None, None), (None, True), (False, None)}
    layout = space.job.layout.with_setting("overlap_grad_reduce", False)
    context = KnobContext(layout=layout, shape=space.job.shape, rules=space.rules())
    assert USE_MEGATRON_FSDP.fault(True, context) == "needs the command's own overlap_grad_reduce"


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ({"pipeline_parallel": 2}, "needs PP 1"),
        ({"tensor_partition": ["stock", "rings"]}, "not beside a search of tensor_partition"),
    ],
)
def test_a_request_that_no_layout_can_have_is_refused_in_one_line(search: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^search\.{NAME}: on; {words}") as refused:
        dense_space({NAME: [True], **search})
    assert "\n" not in str(refused.value)


def test_a_value_is_all_the_flags_that_go_with_it() -> None:
    assert USE_MEGATRON_FSDP.arguments(True) == {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "ckpt_format": "fsdp_dtensor",
        "megatron_fsdp_main_grads_dtype": "fp32",
    }
    off = USE_MEGATRON_FSDP.arguments(False)
    assert {name for name, value in off.items() if value is None} == {"use_megatron_fsdp", "ckpt_format"}
    assert off["use_distributed_optimizer"] is True
    assert [USE_MEGATRON_FSDP.is_for_gpus(value) for value in (False, True)] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ({}, None),
        ({"use_megatron_fsdp": True}, None),
        ({"use_megatron_fsdp": False, "data_parallel_sharding_strategy": "no_shard"}, False),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"}, None),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}, True),
    ],
)
def test_it_is_read_with_its_strategy(arguments: dict[str, Any], value: bool | None) -> None:
    assert USE_MEGATRON_FSDP.read(Namespace(**arguments)) is value


class FullyShardedDataParallel:
    """A wrapper of the class that Megatron makes."""

    def __init__(self, strategy: str) -> None:
        self.ddp_config = SimpleNamespace(data_parallel_sharding_strategy=strategy)


@pytest.mark.parametrize(
    ("chunk", "value"),
    [
        (FullyShardedDataParallel("optim_grads_params"), True),
        (FullyShardedDataParallel("optim_grads"), None),
        (SimpleNamespace(ddp_config=SimpleNamespace(data_parallel_sharding_strategy="no_shard")), False),
        (object(), False),
    ],
)
def test_what_holds_the_model_is_read_back(chunk: object, value: bool | None) -> None:
    live = LiveJob(degrees={}, shards_parameters=shards_parameters([chunk]))
    assert USE_MEGATRON_FSDP.read_back(live) is value


def test_a_plan_that_turns_megatron_fsdp_on_or_off_loads_no_saved_weights() -> None:
    layout: Layout = make_layout()
    assert saved_weights_refusal(layout) is None
    for value in (True, False):
        assert "fsdp_dtensor" in str(saved_weights_refusal(layout.with_setting(NAME, value)))
