"""What runs beside experts' exchange of tokens is searched where Megatron allows it."""

import random
from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.job_description import Experts
from quartet_plugin.model.layout import Layout, Setting
from quartet_plugin.model.plan import Plan
from quartet_plugin.space.knob_table import knob_rows
from quartet_plugin.space.knobs.expert_overlap import (
    DELAYED_WEIGHT_GRADIENTS,
    EXPERT_OVERLAP,
    SHARED_EXPERT_OVERLAP,
)
from quartet_plugin.space.knobs.knob import KnobContext
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes

KNOBS = (SHARED_EXPERT_OVERLAP, EXPERT_OVERLAP, DELAYED_WEIGHT_GRADIENTS)
SHARED, OVERLAP, DELAY = (knob.name for knob in KNOBS)
EXPERTS = Experts(num_experts=8, experts_per_token=2, ffn_hidden_size=96, shared_ffn_hidden_size=96)
SCHEDULES = ("no-pipelining", "1f1b", "interleaved")


def space_of(
    *,
    search: dict[str, Any] | None = None,
    features: tuple[str, ...] = ("moe",),
    command: dict[str, Any] | None = None,
    layout: dict[str, Any] | None = None,
    schedules: tuple[str, ...] = SCHEDULES,
    **job: Any,
) -> Space:
    wanted = dict.fromkeys((SHARED, OVERLAP, DELAY), "auto") if search is None else search
    values = {
        "moe_token_dispatcher": "alltoall",
        SHARED: False,
        OVERLAP: False,
        DELAY: False,
        **(command or {}),
    }
    made = make_job(
        layout=make_layout(
            **{"data_parallel": 4, "pipeline_parallel": 1, "expert_parallel": 2, **(layout or {})}
        ),
        features=features,
        experts=EXPERTS if "moe" in features else None,
    )
    made = replace(
        made,
        **{
            "layer_impl": "transformer_engine",
            "precision": "bf16",
            "settings": tuple(Setting(name=name, value=value) for name, value in values.items()),
            **job,
        },
    )
    config = parse_config({"search": {"schedule": [*schedules], **wanted}}, where="q.yaml")
    return build_space(made, nodes=make_nodes(4), search=config.search, run="r", seed=0)


def plans(space: Space) -> list[Plan]:
    generator = random.Random(0)
    return [space.decode(RandomParams(generator), trial=1) for _ in range(300)]


def changes(layout: Layout) -> tuple[str, ...]:
    return tuple(knob.name for knob in KNOBS if layout.setting(knob.name) is True)


def states(space: Space) -> dict[str, str]:
    return {row.knob.name: row.state for row in knob_rows(space)}


def test_nothing_changes_unless_the_search_asks() -> None:
    space = space_of(search={})
    assert {plan.layout.settings for plan in plans(space)} == {None}
    assert {states(space)[knob.name] for knob in KNOBS} == {"kept unless search asks for it"}


def test_each_is_searched_where_megatron_has_it() -> None:
    made = [plan.layout for plan in plans(space_of(layout={"pipeline_parallel": 2, "data_parallel": 2}))]
    assert {changes(layout) for layout in made} == {(), (SHARED,), (OVERLAP,), (OVERLAP, DELAY)}
    beside_another = [layout for layout in made if OVERLAP in changes(layout)]
    assert all(layout.expert_parallel > 1 for layout in beside_another)
    assert all(layout.pipeline_parallel == 1 or layout.virtual_stages > 1 for layout in beside_another)
    assert any(layout.virtual_stages > 1 for layout in beside_another)
    shared = [layout for layout in made if SHARED in changes(layout)]
    assert all(layout.expert_parallel * layout.tensor_parallel > 1 for layout in shared)


def test_a_schedule_of_the_runtime_has_no_overlap_of_microbatches() -> None:
    space = space_of(
        search={OVERLAP: [True], "pipeline_parallel": 2, "virtual_stages": 2},
        schedules=("interleaved", "zb-v"),
        layout={"pipeline_parallel": 2, "data_parallel": 2, "virtual_stages": 2},
    )
    made = {
        (plan.schedule.custom is not None, OVERLAP in changes(plan.layout))
        for plan in plans(space)
        if plan.layout.expert_parallel > 1
    }
    assert made == {(True, False), (False, True)}


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"features": ()}, "the model has no experts"),
        ({"layer_impl": "local"}, "it runs on streams of a GPU; needs --transformer-impl transformer_engine"),
        ({"features": ("moe", "cuda_graphs")}, "cuda_graphs"),
        ({"features": ("moe", "cpu_offload")}, "cpu_offload"),
    ],
)
def test_what_keeps_all_of_them(job: dict[str, Any], reason: str) -> None:
    space = space_of(search={}, **job)
    for knob in KNOBS:
        assert states(space)[knob.name].startswith(f"kept: {reason}")


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"precision": "fp32"}, "not supported in fp32"),
        ({"mtp_layers": 2}, "not supported with more than one layer of multi-token prediction"),
        ({"features": ("moe", "hybrid")}, "HybridModel makes no plan of such a schedule"),
    ],
)
def test_what_keeps_the_overlap_of_microbatches(job: dict[str, Any], reason: str) -> None:
    space = space_of(search={}, **job)
    assert states(space)[OVERLAP] == states(space)[DELAY] == f"kept: {reason}"
    assert states(space)[SHARED] == "kept unless search asks for it"


def test_a_device_that_cannot_run_it_refuses_the_request_with_the_fix() -> None:
    reason = r"overlap_moe_expert_parallel_comm: on; must be the command's own off: .*--transformer-impl"
    with pytest.raises(ConfigError, match=reason):
        space_of(search={OVERLAP: [True]}, layer_impl="local")
    plain = replace(EXPERTS, shared_ffn_hidden_size=0)
    with pytest.raises(ConfigError, match=r"moe_shared_expert_overlap: on; .*the model has no shared expert"):
        space_of(search={SHARED: [True]}, experts=plain)


@pytest.mark.parametrize(
    ("knob", "settings", "layout", "fault"),
    [
        (EXPERT_OVERLAP, {}, {"expert_parallel": 1}, "needs EP above 1"),
        (
            EXPERT_OVERLAP,
            {},
            {"pipeline_parallel": 2, "data_parallel": 2},
            "needs virtual stages in a pipeline",
        ),
        (EXPERT_OVERLAP, {}, {"recompute": "full"}, "not supported with full recompute"),
        (EXPERT_OVERLAP, {"recompute_modules": "moe"}, {}, "not supported with recompute of moe"),
        (EXPERT_OVERLAP, {SHARED: True}, {}, "not supported with --moe-shared-expert-overlap"),
        (
            EXPERT_OVERLAP,
            {"moe_token_dispatcher": "allgather"},
            {},
            "needs --moe-token-dispatcher-type alltoall or flex",
        ),
        (DELAYED_WEIGHT_GRADIENTS, {}, {}, "needs --overlap-moe-expert-parallel-comm"),
        (SHARED_EXPERT_OVERLAP, {OVERLAP: True}, {}, "not supported with --overlap-moe-expert-parallel-comm"),
        (
            SHARED_EXPERT_OVERLAP,
            {"recompute_modules": "moe_act+shared_experts"},
            {"recompute": "selective"},
            "not supported with recompute of shared_experts",
        ),
        (
            SHARED_EXPERT_OVERLAP,
            {"moe_token_dispatcher": "allgather"},
            {},
            "needs --moe-token-dispatcher-type alltoall or flex",
        ),
    ],
)
def test_the_rules_are_megatrons(
    knob: Any, settings: dict[str, Any], layout: dict[str, Any], fault: str
) -> None:
    space = space_of(search={}, command=settings)
    planned = make_layout(
        **{"data_parallel": 4, "pipeline_parallel": 1, "virtual_stages": 1, "expert_parallel": 2, **layout}
    )
    context = KnobContext(layout=planned, shape=space.job.shape, rules=space.rules())
    assert knob.fault(True, context) == fault
    assert knob.fault(False, context) is None


@pytest.mark.parametrize(
    ("release", "is_refused"), [("0.17.1", True), ("0.18.2", False), ("0.20.0rc0", False)]
)
def test_multi_token_prediction_without_a_pipeline_came_with_0_18(release: str, is_refused: bool) -> None:
    space = space_of(search={}, mtp_layers=1, framework_version=release)
    planned = make_layout(data_parallel=4, pipeline_parallel=1, virtual_stages=1, expert_parallel=2)
    context = KnobContext(layout=planned, shape=space.job.shape, rules=space.rules())
    fault = EXPERT_OVERLAP.fault(True, context)
    expected = "with multi-token prediction needs PP above 1 before Megatron 0.18"
    assert fault == (expected if is_refused else None)


def test_an_overlap_that_delayed_weight_gradients_need_stays() -> None:
    space = space_of(
        search={OVERLAP: "auto", DELAY: "auto"},
        command={OVERLAP: True, DELAY: True},
        features=("moe", "overlap_moe"),
    )
    assert {plan.layout.setting(OVERLAP) for plan in plans(space)} == {None}
    assert {plan.layout.setting(DELAY) for plan in plans(space)} == {None, False}
