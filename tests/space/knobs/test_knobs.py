"""The knobs: each is a key, a parameter and a label; what it offers is legal, what is asked for is had."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.layout import Setting
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.space.config import Forbidden, SearchConfig
from quartet_plugin.space.knob_table import NOT_ASKED, TUNED, knob_rows
from quartet_plugin.space.knobs.knob import KnobContext, SettingKnob
from quartet_plugin.space.knobs.registry import KNOBS, LAYOUT_KNOBS
from quartet_plugin.space.param_sources import FixedParams, RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.config import parse_config
from quartet_plugin.tuner.run_folder import create_run, resume_run
from tests.space.jobs import make_job, make_layout, make_nodes

COMMAND = (
    Setting(name="ddp_bucket_size", value=0),
    Setting(name="overlap_grad_reduce", value=True),
    Setting(name="overlap_param_gather", value=False),
)
EVERYTHING = {
    "sequence_parallel": "auto",
    "recompute": "auto",
    "overlap_grad_reduce": "auto",
    "overlap_param_gather": "auto",
    "ddp_bucket_size": [1000, 20_000],
    "distributed_optimizer": "auto",
}


def job_with_settings(**job: Any) -> TrainingJob:
    return replace(make_job(**job), settings=COMMAND)


def space_of(search: dict[str, Any], *, num_processes: int = 4, **job: Any) -> Space:
    layout = job.pop("layout", make_layout(data_parallel=max(1, num_processes // 2)))
    return build_space(
        job_with_settings(layout=layout, **job),
        nodes=make_nodes(num_processes),
        search=parse_config({"search": search}, where="q.yaml").search,
        run="r",
        seed=0,
    )


def sample(space: Space, *, num: int = 150) -> list[Plan]:
    generator = random.Random(0)
    return [space.decode(RandomParams(generator), trial=1) for _ in range(num)]


def test_every_knob_is_a_key_of_the_search_section_and_of_its_rules() -> None:
    names = [knob.name for knob in KNOBS]
    assert len(set(names)) == len(names)
    assert set(names) == set(Forbidden.model_fields)
    assert set(names) - {"shape"} <= set(SearchConfig.model_fields)
    for knob in KNOBS:
        assert knob.meaning
        assert knob.rule
        default = SearchConfig.model_fields.get(knob.name)
        assert default is None or (default.default == ("stock",)) == (knob.default == "stock")


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.integers(0, 2**31))
def test_every_value_of_a_plan_is_legal_by_its_knob(num_processes: int, seed: int) -> None:
    layout = make_layout(pipeline_parallel=1, data_parallel=num_processes)
    space = space_of(EVERYTHING, num_processes=num_processes, layout=layout)
    chooser = RandomParams(random.Random(seed))
    plan = space.decode(chooser, trial=1)
    context = KnobContext(layout=plan.layout, shape=plan.shape, rules=space.rules())
    for knob in LAYOUT_KNOBS:
        value = knob.in_layout(plan.layout)
        if value is not None and knob.applies(plan.layout):
            assert knob.fault(value, context) is None, knob.name
    params = space.params_of(plan)
    assert params is not None or plan.schedule.custom is not None
    if params is not None:
        assert space.decode(FixedParams(params), trial=1).key == plan.key


def test_what_is_asked_for_is_tuned() -> None:
    plans = sample(space_of(EVERYTHING))
    assert {plan.layout.recompute for plan in plans} == {"none", "selective", "full"}
    assert {plan.layout.sequence_parallel for plan in plans if plan.layout.tensor_parallel > 1} == {
        True,
        False,
    }
    copies = [plan.layout for plan in plans if plan.layout.data_parallel > 1]
    assert {layout.setting("overlap_grad_reduce") for layout in copies} == {None, False}
    assert {layout.setting("ddp_bucket_size") for layout in copies} == {None, 1000, 20_000}
    gathers = {layout.setting("overlap_param_gather") for layout in copies if layout.distributed_optimizer}
    assert gathers == {None, True}
    for layout in (plan.layout for plan in plans):
        if layout.setting("overlap_param_gather"):
            assert layout.setting("overlap_grad_reduce") is not False


def test_by_default_settings_stay_as_the_command_has_them() -> None:
    for plan in sample(space_of({})):
        assert plan.layout.settings is None
        assert plan.layout.recompute == "none"
        assert not plan.layout.sequence_parallel


def test_a_setting_that_the_command_has_is_not_named_in_a_plan() -> None:
    space = space_of({"overlap_grad_reduce": True})
    assert {plan.layout.settings for plan in sample(space)} == {None}


def test_auto_searches_the_commands_size_of_buckets_beside_the_sizes_that_are_offered() -> None:
    shape = replace(make_job().shape, vocab_size=200_000)
    plans = sample(space_of({"ddp_bucket_size": "auto"}, shape=shape))
    copies = [plan.layout for plan in plans if plan.layout.data_parallel > 1]
    assert {layout.setting("ddp_bucket_size") for layout in copies} == {None, 10_000_000, 40_000_000}


def test_full_recompute_keeps_backwards_whole() -> None:
    for plan in sample(space_of({"recompute": "full"})):
        assert plan.schedule.custom is None


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ({"context_parallel": 2}, "search.context_parallel: 2; must be the command's own 1: trials keep it"),
        ({"expert_parallel": 2}, "search.expert_parallel: 2; .* command's own 1: the model has no experts"),
        ({"overlap_grad_reduce": "maybe"}, "overlap_grad_reduce"),
        ({"recompute": "half"}, "recompute"),
    ],
)
def test_what_no_trial_can_have_is_refused(search: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        space_of(search)


def test_a_forbidden_setting_is_refused_as_a_plan() -> None:
    space = space_of({**EVERYTHING, "forbid": {"overlap_grad_reduce": True, "data_parallel": [2, 4]}})
    plans = [plan for plan in sample(space) if plan.layout.data_parallel > 1]
    refused = {plan.layout.setting("overlap_grad_reduce") for plan in plans if space.refusal_of(plan)}
    assert refused == {None}  # the command's own, which is on


def test_the_table_says_what_is_tuned_and_why_not() -> None:
    rows = {row.knob.name: row for row in knob_rows(space_of({"recompute": "auto"}, features=("moe",)))}
    assert rows["tensor_parallel"].state == "kept: moe"
    assert rows["recompute"].state == TUNED
    assert rows["recompute"].choices == ("none", "selective", "full")
    assert rows["overlap_grad_reduce"].state == NOT_ASKED
    assert rows["overlap_grad_reduce"].value == "on"
    assert "reduce_bucket_size" not in rows
    assert all(isinstance(row.record()["rule"], str) for row in rows.values())
    assert {row.state for row in knob_rows() if isinstance(row.knob, SettingKnob)} == {NOT_ASKED}
    assert rows["schedule"].left_out == ()


def test_the_table_names_the_schedules_that_the_search_leaves_out() -> None:
    rows = {row.knob.name: row for row in knob_rows(space_of({"schedule": ["1f1b", "zb-h1"]}))}
    left_out = rows["schedule"].left_out
    assert {"interleaved", "v-half", "searched"} <= set(left_out)
    assert not {"1f1b", "zb-h1"} & set(left_out)
    assert rows["schedule"].record()["left_out"] == list(left_out)
    assert knob_rows(space_of({"schedule": "stock"}))[0].left_out == ()


def test_a_knob_of_experts_is_kept_for_their_reason_and_not_because_nobody_asked() -> None:
    rows = {row.knob.name: row for row in knob_rows(space_of({}))}
    assert rows["moe_token_dispatcher"].state == "kept: the model has no experts"


@pytest.mark.parametrize(
    ("search", "job", "words"),
    [
        ({"zero_stage": 1}, {}, "search.zero_stage: 1; Megatron has no such knob"),
        ({"reduce_bucket_size": 1000}, {}, "search.reduce_bucket_size: 1000; Megatron has no such knob"),
        (
            {"sequence_parallel": True, "tensor_parallel": 1},
            {},
            "search.sequence_parallel: on; it does nothing in any layout",
        ),
        (
            {"overlap_param_gather": True, "distributed_optimizer": True, "overlap_grad_reduce": False},
            {},
            "search.overlap_param_gather: on; needs overlap_grad_reduce",
        ),
        (
            {"overlap_grad_reduce": False},
            {"settings": None},
            "search.overlap_grad_reduce: off; the framework did not report",
        ),
    ],
)
def test_a_request_that_no_layout_can_have_is_refused(
    search: dict[str, Any], job: dict[str, Any], words: str
) -> None:
    described = replace(job_with_settings(layout=make_layout(data_parallel=2)), **job)
    config = parse_config({"search": search}, where="q.yaml").search
    with pytest.raises(ConfigError, match=words):
        build_space(described, nodes=make_nodes(4), search=config, run="r", seed=0)


def test_a_switch_is_no_stage() -> None:
    with pytest.raises(ConfigError, match="zero_stage"):
        parse_config({"search": {"zero_stage": True}}, where="q.yaml")


def test_what_is_tuned_is_tuned_after_a_resume(tmp_path: Path) -> None:
    """config.json has null for `auto`, which is not the default of every knob."""
    search = {knob.name: "auto" for knob in KNOBS if knob.kind != "shape"}
    config = parse_config({"run": "r", "search": search}, where="q.yaml")
    create_run(tmp_path / "r", config=config, command=["torchrun", "none.py"])
    for given_again in (None, config):
        resumed = resume_run(tmp_path / "r", config=given_again, command=None).config.search
        assert {name: resumed.requested(name) for name in search} == dict.fromkeys(search)


SHARING = {"context_parallel": [1, 2], "tensor_parallel": "auto"}


def test_trials_change_cp_where_attention_shares_sequences() -> None:
    layouts = [
        layout for kept in space_of(SHARING, shares_sequences=True).layouts.values() for layout in kept
    ]
    assert {layout.context_parallel for layout in layouts} == {1, 2}
    assert {layout.world_size for layout in layouts} == {4}


@pytest.mark.parametrize(
    ("features", "words"),
    [(("mtp",), "mtp: the loss of further tokens"), (("packing",), "packing: the loss counts")],
)
def test_trials_keep_cp_where_a_loss_counts_the_tokens_of_a_device(
    features: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        space_of({"context_parallel": 2, "change_class": "C"}, shares_sequences=True, features=features)


@pytest.mark.parametrize("is_free", [None, True])
def test_where_cp_is_free_its_devices_may_share_layers_instead(is_free: bool | None) -> None:
    layout = make_layout(pipeline_parallel=1, context_parallel=4)
    space = space_of({"context_parallel": "auto"}, layout=layout, shares_sequences=is_free)
    sizes = {
        (layout.tensor_parallel, layout.context_parallel)
        for kept in space.layouts.values()
        for layout in kept
    }
    assert sizes == ({(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)} if is_free else {(1, 4)})
