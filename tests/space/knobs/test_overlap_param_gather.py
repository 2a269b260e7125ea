"""Overlap of the parameters' gathering, and what of it other flags of the command keep."""

from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.space.knobs.overlap_param_gather import OVERLAP_PARAM_GATHER
from quartet_plugin.space.plan_space import Space
from tests.space.knobs.test_expert_overlap import plans, space_of, states

NAME = OVERLAP_PARAM_GATHER.name


def space(*features: str, is_on: bool, asked: object = "auto", **layout: Any) -> Space:
    """The space of a dense command that gathers parameters during the forward, or does not."""
    return space_of(
        search={NAME: asked},
        command={NAME: is_on, "overlap_grad_reduce": True},
        features=features,
        layout={"distributed_optimizer": True, "expert_parallel": 1, **layout},
    )


@pytest.mark.parametrize("is_on", [False, True])
def test_it_is_searched_where_parameters_are_sharded(is_on: bool) -> None:
    assert {plan.layout.setting(NAME) for plan in plans(space(is_on=is_on))} == {None, not is_on}


def test_parameters_that_are_saved_at_intervals_keep_it_off() -> None:
    """Megatron asserts it, of the training alone: trials save nothing."""
    saving = space("saved_params", is_on=False)
    assert {plan.layout.setting(NAME) for plan in plans(saving)} == {None}
    assert states(saving)[NAME] == "kept: --save-params-interval needs it off"
    with pytest.raises(ConfigError, match=f"search.{NAME}: on; must be the command's own off: --save-params"):
        space("saved_params", is_on=False, asked=True)


def test_a_gather_in_the_optimizers_step_keeps_it_on_and_needs_virtual_stages() -> None:
    """What Megatron asserts (megatron/training/arguments.py)."""
    interleaved = {"pipeline_parallel": 2, "data_parallel": 2, "virtual_stages": 2}
    gathering = space("step_param_gather", is_on=True, **interleaved)
    layouts = [plan.layout for plan in plans(gathering)]
    assert {layout.setting(NAME) for layout in layouts} == {None}
    reason = "--overlap-param-gather-with-optimizer-step needs it on"
    assert states(gathering)[NAME] == f"kept: {reason}"
    assert all(layout.pipeline_parallel > 1 and layout.virtual_stages > 1 for layout in layouts)
    assert len({layout.pipeline_parallel for layout in layouts}) > 1
    without = [plan.layout for plan in plans(space(is_on=True, **interleaved))]
    assert any(layout.virtual_stages == 1 for layout in without)
