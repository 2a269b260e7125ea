"""DeepSpeed's ZeRO stage: tuned where DeepSpeed takes both stages and clips alike with them."""

from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.space.knob_table import TUNED, knob_rows
from quartet_plugin.space.knobs.zero_stage import ZERO_STAGE
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes

REFUSED = "DeepSpeed refuses the other stage with this optimizer, or these settings of the ds_config"
CLIPPED = "in fp32 DeepSpeed clips several stages by another norm with ZeRO 0 than with 1"


def space_of(*features: str, stage: int = 1, **search: Any) -> Space:
    """The space of a job with two copies of the model on two devices."""
    layout = make_layout(pipeline_parallel=1, data_parallel=2, distributed_optimizer=bool(stage))
    job = replace(make_job(layout=layout, features=features), framework="deepspeed")
    asked = {"virtual_stages": 1, "schedule": ["no-pipelining", "1f1b"], "mapping": "stock", **search}
    config = parse_config({"search": asked}, where="q.yaml").search
    return build_space(job, nodes=make_nodes(2), search=config, run="r", seed=0)


def stages(space: Space) -> set[Any]:
    (layouts,) = space.layouts.values()
    return {ZERO_STAGE.in_layout(layout) for layout in layouts}


def state(space: Space) -> str:
    return next(row.state for row in knob_rows(space) if row.knob is ZERO_STAGE)


def test_both_stages_are_tried() -> None:
    space = space_of()
    assert stages(space) == {0, 1}
    assert state(space) == TUNED


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("feature", "reason"), [("zero_bound", REFUSED), ("clips_in_fp32", CLIPPED)])
def test_the_commands_stage_is_kept_with_the_reason(feature: str, reason: str, stage: int) -> None:
    space = space_of(feature, stage=stage)
    assert stages(space) == {stage}
    assert {layout.data_parallel for layouts in space.layouts.values() for layout in layouts} == {1, 2}
    assert state(space) == f"kept: {reason}"
    assert not space.locked


def test_another_stage_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=f"zero_stage: 0; must be the command's own 1: {REFUSED}"):
        space_of("zero_bound", zero_stage=0)
