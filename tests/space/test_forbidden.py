"""What the user forbids is never proposed where that can be known early, and never launched at all."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.calibration.machine_prior import KnownMachine
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.plan import Plan
from quartet_plugin.planner.candidate_plans import PlanCandidates
from quartet_plugin.planner.space_request import request_of_space
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.split.layers import even_split
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes
from tests.tuner.fakes import FakeMachine, resume, tune
from tests.tuner.fakes import begin_with_journal as begin

LAYOUT_AXES = {
    "tensor_parallel": [1, 2, 4],
    "pipeline_parallel": [1, 2, 4],
    "data_parallel": [1, 2, 4],
    "virtual_stages": [1, 2],
    "micro_batch_size": [1, 2, 4],
}
OTHER_AXES: dict[str, list[Any]] = {
    "schedule": ["stock", "1f1b", "no-pipelining", "interleaved", "zb-h1", "zb-v", "searched"],
    "group": [2, 4],
    "split": ["stock", "even", "4+4", "5+3", "6+2", "7+1"],
    "mapping": ["stock", "1,0", "0,2,1,3"],
    "shape": ["8x256", "4x256"],
}


def forbidding(rules: Any, *, num_processes: int = 2, **search: Any) -> Space:
    config = parse_config({"search": {**search, "forbid": rules}}, where="q.yaml").search
    layout = make_layout(data_parallel=num_processes // 2)
    job, nodes = make_job(layout=layout), make_nodes(num_processes)
    return build_space(job, nodes=nodes, search=config, run="r", seed=0)


def or_none(rules: Any, **options: Any) -> Space | None:
    """None where the rules leave nothing, which is said."""
    try:
        return forbidding(rules, **options)
    except ConfigError as error:
        if "forbid less" not in str(error):
            raise
        return None


def sampled(space: Space, *, num: int = 200) -> list[Plan]:
    generator = random.Random(0)
    return [space.decode(RandomParams(generator), trial=at) for at in range(num)]


def is_met(plan: Plan, rule: dict[str, Any]) -> bool:
    """The rule read afresh, for what is told apart by the plan's own words."""
    job = make_job(layout=plan.made_for.baseline.layout)
    custom = plan.schedule.custom
    words = {name: {getattr(plan.layout, name)} for name in LAYOUT_AXES}
    name = plan.schedule.name if custom is None else custom.named or "searched"
    words["schedule"] = {name, *(["stock"] if name == job.schedule.name else [])}
    words["group"] = {plan.schedule.group}
    counts = plan.split.transformer_layers_per_stage
    even = even_split(plan.shape.num_layers, num_stages=len(counts))
    words["split"] = {plan.split.label, *(["even"] if counts == even else [])}
    words["split"] |= {"stock"} if plan.split == job.split else set()
    words["mapping"] = {plan.mapping.label}
    words["shape"] = {plan.shape.label}
    asked = {axis: values if isinstance(values, list) else [values] for axis, values in rule.items()}
    return all(words[axis] & set(values) for axis, values in asked.items())


@st.composite
def rules(draw: st.DrawFn, axes: dict[str, list[Any]]) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(axes)), min_size=1, max_size=3, unique=True))
    found = {}
    for name in names:
        values = draw(st.lists(st.sampled_from(axes[name]), min_size=1, max_size=2, unique=True))
        found[name] = values[0] if len(values) == 1 else values
    return found


@settings(max_examples=40, deadline=None)
@given(st.lists(rules(LAYOUT_AXES), min_size=1, max_size=3))
def test_forbidden_layouts_are_not_in_the_space(found: list[dict[str, Any]]) -> None:
    space = or_none(found, num_processes=4, schedule=["stock", "1f1b", "interleaved", "no-pipelining"])
    if space is None:
        return
    for plan in sampled(space, num=30):
        assert not any(is_met(plan, rule) for rule in found)
        assert space.refusal_of(plan) is None


@settings(max_examples=40, deadline=None)
@given(st.lists(rules({**LAYOUT_AXES, **OTHER_AXES}), min_size=1, max_size=3), st.integers(0, 2**31))
def test_a_plan_is_refused_where_a_rule_is_met_and_nowhere_else(
    found: list[dict[str, Any]], seed: int
) -> None:
    quick = ["1f1b", "interleaved", "no-pipelining", "zb-h1"]
    plan = forbidding([], schedule=quick).decode(RandomParams(random.Random(seed)), trial=1)
    space = or_none(found)
    if space is None:
        return
    assert (space.refusal_of(plan) is not None) == any(is_met(plan, rule) for rule in found)


def test_a_forbidden_schedule_is_no_choice() -> None:
    space = forbidding([{"schedule": ["zb-v", "v-half"]}, {"schedule": "1f1b", "micro_batch_size": 1}])
    for layouts in space.layouts.values():
        for layout in layouts:
            offered = space.schedules_of(layout, shape=space.job.shape)
            assert offered
            assert not {"zb-v", "v-half"} & set(offered)
            assert ("1f1b" in offered) == (
                layout.pipeline_parallel == 2 and layout.virtual_stages == 1 and layout.micro_batch_size != 1
            )


def test_the_cost_models_candidates_leave_out_what_is_forbidden() -> None:
    space = forbidding([{"mapping": "1,0"}, {"split": "even", "schedule": "1f1b"}])
    candidates = PlanCandidates(
        space,
        is_predictable=lambda plan: plan.schedule.custom is None,
        request=request_of_space(space, machine=KnownMachine()),
    )
    found = candidates.best(
        costs_of=lambda plans: [0.0] * len(plans), splits_of=lambda _: None, order_of=lambda _: None
    )
    plans = [one.plan for one in found]
    assert plans
    assert all(plan.mapping.is_stock for plan in plans)
    assert not any(plan.schedule.name == "1f1b" and plan.split.label == "4+4" for plan in plans)


@pytest.mark.parametrize("starts", ["auto", "none"])
def test_what_is_forbidden_is_never_launched_and_costs_no_trial(tmp_path: Path, starts: str) -> None:
    machine = FakeMachine()
    run = begin(
        tmp_path / "r",
        search={"forbid": [{"mapping": "1,0"}, {"virtual_stages": 2}, {"schedule": ["zb-h1", "zb-h2"]}]},
        study={"trials": 10, "starts": starts},
    )
    result = tune(run, machine)
    tried = [one for one in result.trials[1:] if one.record.repeats is None]
    assert len(tried) == 10
    for one in tried:
        assert one.plan.mapping.is_stock
        assert one.plan.layout.virtual_stages != 2
        assert one.plan.schedule.custom is None or one.plan.schedule.custom.named not in ("zb-h1", "zb-h2")
    refused = [one for one in result.trials if one.record.outcome == "FORBIDDEN"]
    assert all("search.forbid" in one.record.reason for one in refused)
    assert starts == "auto" or refused  # the sampler does not know it before
    launched = {key for _, key in machine.launched if key is not None}
    assert not launched & {one.plan.key for one in refused}
    assert resume(tmp_path / "r").config.search.forbid == run.config.search.forbid


def test_the_own_command_is_measured_whatever_is_forbidden(tmp_path: Path) -> None:
    run = begin(tmp_path / "r", search={"forbid": {"pipeline_parallel": 2}}, study={"trials": 3})
    result = tune(run, FakeMachine())
    assert result.baseline.layout.pipeline_parallel == 2
    assert all(one.plan.layout.pipeline_parallel == 1 for one in result.trials[1:])


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({}, "must name at least one axis"),
        ([{"tensor_parallel": "auto"}], "must be a value or a list; auto is not allowed in search.forbid"),
        ([{"schedule": "auto", "data_parallel": 2}], "must be a value or a list"),
        ([{"tensor": 2}], "tensor"),
        ([{"split": "half"}], "counts like 6+2"),
        ([{"shape": "wide"}], "layers x hidden size"),
        ([{"schedule": "zb-v9"}], "zb-v9"),
        ([{"schedule": "zb-v"}] * 65, "64"),
        ("zb-v", "zb-v"),
        ([{"pipeline_parallel": [1, 2]}], "forbid less"),
    ],
)
def test_what_cannot_be_meant_is_one_line(rules: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        forbidding(rules)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
