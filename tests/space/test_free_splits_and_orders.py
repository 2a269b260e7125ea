"""Every split and every order of slots is a point of the space, in an ordinary Optuna study."""

import random
from dataclasses import replace
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.mapping.orders import is_legal, slots_of
from quartet_plugin.model.plan import Mapping, Plan, Split
from quartet_plugin.space.moved_plans import moved
from quartet_plugin.space.param_sources import FixedParams, RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.study.plan_sampler import suggest_plan
from quartet_plugin.study.trial_params import parted
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape
from tests.split.test_shifts import splits


def space_of(*nodes: int, num_layers: int = 13, **search: Any) -> Space:
    config = parse_config({"search": {"schedule": ["1f1b", "zb-h1"], **search}}, where="test").search
    job = make_job(
        layout=make_layout(pipeline_parallel=sum(nodes), micro_batch_size=2),
        shape=make_shape(num_layers=num_layers),
        global_batch_size=16,
    )
    return build_space(job, nodes=make_nodes(*nodes), search=config, run="r", seed=0)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([2, 3, 5, 8]), st.integers(0, 40))
def test_any_split_is_read_off_exactly(data: st.DataObject, num_stages: int, more: int) -> None:
    num_layers = num_stages + more
    space = space_of(num_stages, num_layers=num_layers, pipeline_parallel=num_stages)
    split = data.draw(splits(num_layers=num_layers, num_stages=num_stages))
    assert_in(space, replace(space.baseline, split=Split(transformer_layers_per_stage=split)))


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(1, 8)), st.sampled_from([1, 2]))
def test_any_legal_order_of_slots_is_read_off_exactly(rest: list[int], tensor: int) -> None:
    order = [0, *rest]
    if tensor == 2:  # groups of two neighbours in any order, each turned round
        pairs = dict.fromkeys(index // 2 for index in order)
        order = [slot for pair in pairs for slot in (2 * pair + 1, 2 * pair)]
    space = space_of(4, 4, tensor_parallel=tensor, pipeline_parallel=8 // tensor)
    slots = slots_of(space.nodes)
    mapping = Mapping(slots=tuple(slots[index] for index in order))
    plan = drawn(space)
    if is_legal(mapping.slots, layout=plan.layout):
        assert_in(space, replace(plan, mapping=mapping))


def drawn(space: Space) -> Plan:
    """Any plan with a stock schedule."""
    generator = random.Random(0)
    plans = (space.decode(RandomParams(generator), trial=0) for _ in range(100))
    return next(plan for plan in plans if plan.schedule.custom is None)


def assert_in(space: Space, plan: Plan) -> None:
    params = space.params_of(plan)
    assert params is not None
    assert space.decode(FixedParams(params), trial=0).key == plan.key


@pytest.mark.parametrize("first", [1, 5, 8])
@pytest.mark.parametrize("nodes", [(2,), (4,), (2, 3), (3, 3)])
def test_a_custom_schedule_has_any_split(nodes: tuple[int, ...], first: int) -> None:
    num_stages = sum(nodes)
    space = space_of(*nodes, pipeline_parallel=num_stages, schedule="zb-h1", mapping="stock")
    chooser = RandomParams(random.Random(1))
    plan = space.decode(chooser, trial=0)
    split = (first, *[1] * (num_stages - 2), 13 - first - (num_stages - 2))
    made = moved(space, chooser.params, plan, split=split, mapping=plan.mapping)
    assert made is not None
    assert made[1].split.transformer_layers_per_stage == split
    assert made[1].schedule.custom is not None
    assert made[1].schedule.custom.named == "zb-h1"
    assert_in(space, made[1])
    sampled, texts = parted(made[0])
    trial = optuna.trial.FixedTrial(sampled)
    for name, text in texts.items():
        trial.set_user_attr(name, text)
    assert suggest_plan(trial, space).key == made[1].key
    # The parameters of two stages are those of every study: the split is beside them.
    assert (set(sampled) == set(chooser.params)) == (num_stages == 2)


def test_an_optuna_study_holds_them() -> None:
    """Names keep their distributions, so that every sampler reads every trial."""
    space = space_of(6, pipeline_parallel=6, schedule="1f1b")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, multivariate=True, group=True))
    study.optimize(lambda trial: float(len(suggest_plan(trial, space).key)), n_trials=40)
    seen: dict[str, object] = {}
    for trial in study.trials:
        for name, distribution in trial.distributions.items():
            assert seen.setdefault(name, distribution) == distribution
    assert any(name.startswith("split.shift") for name in seen)
    assert any(name.startswith("mapping.0.first") for name in seen)


@pytest.mark.parametrize("feature", ["moe_flex_dispatcher", "tp_comm_overlap", "expert_tensor_parallel"])
@pytest.mark.parametrize("mapping", [None, ["stock", "0,1,3,2,4,5,6,7,8,9,10,11", "pipeline-reversed"]])
def test_every_order_keeps_the_rule_of_a_feature(feature: str, mapping: list[str] | None) -> None:
    layout = make_layout(pipeline_parallel=3, data_parallel=4, expert_parallel=2)
    search = {"schedule": ["1f1b", "interleaved"], **({} if mapping is None else {"mapping": mapping})}
    space = build_space(
        make_job(layout=layout, features=("moe", feature)),
        nodes=make_nodes(4, 4, 4),
        search=parse_config({"search": search}, where="test").search,
        run="r",
        seed=0,
    )
    generator = random.Random(0)
    plans = [space.decode(RandomParams(generator), trial=0) for _ in range(300)]
    moved_plans = [plan for plan in plans if not plan.mapping.is_stock]
    assert bool(moved_plans) == (mapping is None or feature == "moe_flex_dispatcher")
    for plan in plans:
        assert is_legal(plan.mapping.slots, layout=plan.layout, rules=space.order_rules)
    for plan in moved_plans[:10]:
        assert_in(space, plan)


def test_a_search_that_names_its_orders_has_no_other() -> None:
    space = space_of(6, pipeline_parallel=6, schedule="1f1b", mapping=["stock", "pipeline-reversed"])
    chooser = RandomParams(random.Random(0))
    for _ in range(40):
        space.decode(chooser, trial=0)
    assert not any(name.startswith("mapping.") for name in chooser.params)
