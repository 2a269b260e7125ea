"""Plans have multi-token prediction on the last stage, or before it where command or search has it."""

import random
from dataclasses import replace
from typing import Any

import optuna
import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.report.tables import Change, changes, plan_lines
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knob_table import KnobRow, knob_rows
from quartet_plugin.space.knobs.mtp_stage import BEFORE_LAST, LAST, MTP_STAGE, fault_of_before_last
from quartet_plugin.space.moved_plans import moved
from quartet_plugin.space.param_sources import FixedParams, RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.study.plan_sampler import suggest_plan
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes

BEFORE = Split.of((4, 4, 0, 0), is_mtp_before_last=True)


def space_of(
    *features: str,
    split: Split | None = BEFORE,
    mtp_layers: int | None = 1,
    splits: str | None = None,
    **search: Any,
) -> Space:
    """The space of a command on four stages, with multi-token prediction where `split` has it.

    `splits` are those that the search asks for.
    """
    search |= {} if splits is None else {"split": splits}
    layout = make_layout(pipeline_parallel=4, data_parallel=1)
    of_split = ("mtp_before_last",) if split is not None and split.mtp_before_last else ()
    of_mtp = ("mtp",) if mtp_layers else ()
    job = make_job(layout=layout, features=(*of_mtp, *of_split, *features))
    job = replace(job, mtp_layers=mtp_layers, split=split or job.split)
    config = parse_config({"search": search}, where="q.yaml").search
    return build_space(job, nodes=make_nodes(4), search=config, run="r", seed=0)


def plans_of(space: Space, *, num: int = 150) -> list[Plan]:
    generator = random.Random(0)
    return [space.decode(RandomParams(generator), trial=number) for number in range(1, num + 1)]


def stages_in(plans: list[Plan]) -> set[str]:
    return {str(MTP_STAGE.value_of(plan)) for plan in plans if plan.layout.num_stages > 1}


def row_of(space: Space) -> KnobRow:
    return next(row for row in knob_rows(space) if row.knob is MTP_STAGE)


def test_a_command_that_has_it_before_the_last_stage_is_tuned_with_both() -> None:
    space = space_of()
    assert not space.locked.keys() & {Axis.SPLIT, Axis.SCHEDULE, Axis.DEGREES}
    plans = plans_of(space)
    assert stages_in(plans) == {LAST, BEFORE_LAST}
    before = [plan for plan in plans if plan.split.mtp_before_last]
    assert len({plan.layout.pipeline_parallel for plan in before}) > 1
    assert len({plan.split for plan in before}) > 3
    assert len({plan.layout.virtual_stages for plan in before}) > 1
    for plan in before:
        layout = plan.layout
        assert plan.schedule.custom is None
        assert layout.virtual_stages == 1 or layout.pipeline_parallel > 2
        assert plan.split.layout_text(mtp_layers=1).endswith("m|L")
    assert any(plan.schedule.custom is not None for plan in plans)
    row = row_of(space)
    assert (row.value, set(row.choices), row.state) == (BEFORE_LAST, {BEFORE_LAST, LAST}, "tuned")


def test_before_last_is_tried_for_other_commands_only_where_the_search_names_it() -> None:
    assert stages_in(plans_of(space_of(split=None))) == {LAST}
    assert stages_in(plans_of(space_of(split=None, mtp_stage=["last", "before_last"]))) == {LAST, BEFORE_LAST}
    alone = plans_of(space_of(split=None, mtp_stage="before_last"))
    assert {plan.split.mtp_before_last for plan in alone} == {True}
    assert all(plan.schedule.custom is None for plan in alone)
    assert stages_in(plans_of(space_of(mtp_stage="last"))) == {LAST}
    state = "kept: the command has it on the last stage, and its script may give no other stage tokens"
    assert row_of(space_of(split=None)).state == state


def test_a_model_without_such_layers_has_no_such_choice() -> None:
    space = space_of(split=None, mtp_layers=None)
    assert {plan.split.mtp_before_last for plan in plans_of(space)} == {None}
    names: set[str] = set()
    for seed in range(40):
        source = RandomParams(random.Random(seed))
        space.decode(source, trial=1)
        names |= set(source.params)
    assert not any(name.startswith("mtp_stage") or name == "split.mtp" for name in names)
    assert row_of(space).state == "kept: the model has no multi-token prediction"
    with pytest.raises(ConfigError, match=r"search\.mtp_stage: before_last; the model has no multi-token"):
        space_of(split=None, mtp_layers=None, mtp_stage="before_last")


def test_every_plan_is_read_off_its_parameters() -> None:
    space = space_of(mtp_stage="before_last", schedule=["1f1b", "interleaved"])
    for plan in plans_of(space, num=60):
        params = space.params_of(plan)
        assert params is not None, plan.split
        assert space.decode(FixedParams(params), trial=1).split == plan.split
        counts = plan.split.transformer_layers_per_stage
        for giver in range(len(counts) - 1):
            taker = (giver + 1) % (len(counts) - 1)
            if counts[giver] > 1 and taker != giver:
                other = tuple(n - (s == giver) + (s == taker) for s, n in enumerate(counts))
                made = moved(space, params, plan, split=other, mapping=plan.mapping)
                assert made is not None
                assert made[1].split == Split.of(other, is_mtp_before_last=True)
        # The head has the last stage alone.
        beside = (*counts[:-2], counts[-2] - 1, 1)
        assert moved(space, params, plan, split=beside, mapping=plan.mapping) is None


def test_an_optuna_study_has_both_mtp_stages() -> None:
    space = space_of(schedule=["1f1b", "interleaved", "zb-h1"])
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, multivariate=True, group=True))
    study.optimize(lambda trial: float(len(suggest_plan(trial, space).key)), n_trials=60)
    seen: dict[str, object] = {}
    for trial in study.trials:
        for name, distribution in trial.distributions.items():
            assert seen.setdefault(name, distribution) == distribution
        is_before = trial.params.get("mtp_stage[before_last,last]") == BEFORE_LAST
        assert is_before or "split.mtp" not in trial.params
    assert {"mtp_stage[before_last,last]", "split.mtp"} <= set(seen)


def test_fixed_splits_go_with_the_stage() -> None:
    space = space_of(schedule="1f1b", virtual_stages=1, splits="even")
    counts = {
        (plan.layout.num_stages, MTP_STAGE.value_of(plan)): plan.split.label
        for plan in plans_of(space)
        if plan.layout.num_stages in (2, 4)
    }
    assert counts[2, LAST] == "4+4"
    assert counts[2, BEFORE_LAST] == "8+0"
    assert counts[4, BEFORE_LAST] == "2+3+3+0"


def test_a_written_split_may_leave_it_alone_on_its_stage() -> None:
    space = space_of(schedule="1f1b", virtual_stages=1, splits="4+4+0+0")
    assert {plan.split for plan in plans_of(space, num=30)} == {BEFORE}
    with pytest.raises(ConfigError, match=r"every stage between the first and the last needs a layer"):
        space_of(split=None, splits="4+4+0+0")


@pytest.mark.parametrize(
    ("changes", "layout", "fault"),
    [
        ({}, {"pipeline_parallel": 4}, None),
        ({}, {"pipeline_parallel": 2}, None),
        ({}, {"pipeline_parallel": 4, "virtual_stages": 2}, None),
        ({}, {"pipeline_parallel": 1}, "needs a pipeline"),
        ({}, {"pipeline_parallel": 2, "virtual_stages": 2}, "needs more than two pipeline ranks"),
        ({"mtp_layers": None}, {"pipeline_parallel": 4}, "the model has no multi-token prediction"),
        ({"features": ("mtp", "overlap_moe")}, {"pipeline_parallel": 4}, "was not tried with overlap"),
        ({"features": ("mtp", "mtp_before_last", "overlap_moe")}, {"pipeline_parallel": 4}, None),
    ],
)
def test_faults_of_before_last(changes: dict[str, Any], layout: dict[str, int], fault: str | None) -> None:
    space = space_of(split=None)
    rules = replace(space.rules(), job=replace(space.job, **changes))
    found = fault_of_before_last(make_layout(**layout), rules)
    assert found is None if fault is None else str(found).startswith(fault)


@pytest.mark.parametrize("asked", ["auto", [False, True]])
def test_it_is_not_tried_where_expert_communication_may_be_overlapped(asked: Any) -> None:
    space, overlap = space_of(split=None), "overlap_moe_expert_parallel_comm"
    config = parse_config({"search": {overlap: asked}}, where="q.yaml")
    job = replace(space.job, features=("mtp", "moe"), precision="bf16", layer_impl="transformer_engine")
    rules = replace(space.rules(), job=job, search=config.search)
    layout = make_layout(pipeline_parallel=4)
    assert str(fault_of_before_last(layout, rules)).startswith("was not tried with overlap")
    assert fault_of_before_last(layout, replace(rules, search=space.search)) is None
    # A dense model has none to overlap.
    dense = replace(rules, job=replace(job, features=("mtp",)))
    assert fault_of_before_last(layout, dense) is None


def test_a_hybrid_model_has_it_on_the_last_stage() -> None:
    space = space_of(split=None)
    kinds = LayerKinds(attention=4, mlp=4, experts=0, state_space=0)
    job = replace(space.job, shape=replace(space.job.shape, layer_kinds=kinds))
    rules = replace(space.rules(), job=job)
    assert fault_of_before_last(make_layout(pipeline_parallel=4), rules) is not None


def test_a_kept_split_keeps_the_stage() -> None:
    space = space_of("mtp_tied_head")
    assert space.locked[Axis.SPLIT] == "mtp_tied_head"
    assert {plan.split for plan in plans_of(space)} == {BEFORE}
    words = "split     4+4+0+0 transformer layers, embedding first, multi-token prediction (1) on the stage"
    assert f"{words} before the last one, head last" in plan_lines(space.baseline)
    last = space_of("mtp_tied_head", split=None, mtp_stage=["last", "before_last"])
    assert stages_in(plans_of(last)) == {LAST}


def test_a_plan_that_moves_only_the_mtp_stage_has_a_change() -> None:
    space = space_of(split=None, mtp_stage=["last", "before_last"])
    split = Split.of((3, 3, 2, 0))
    baseline = replace(space.baseline.made_for.baseline, split=split)
    made_for = replace(space.baseline.made_for, mtp_layers=1, baseline=baseline)
    last = replace(space.baseline, made_for=made_for, split=split)
    assert changes(last) == ()
    assert changes(replace(last, split=Split.of((3, 3, 2, 0), is_mtp_before_last=True))) == (
        Change(part="MTP", before="last", after="before_last", change_class="A"),
    )


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ({"schedule": ["zb-h1"]}, "needs a schedule of the framework"),
        (
            {"pipeline_parallel": 2, "virtual_stages": 2},
            "needs more than two pipeline ranks with virtual stages",
        ),
        ({"schedule": ["zb-h1", "1f1b"]}, None),
    ],
)
def test_an_mtp_stage_that_no_layout_can_have_is_refused(words: dict[str, Any], fault: str | None) -> None:
    if fault is None:
        assert stages_in(plans_of(space_of(split=None, mtp_stage=["last", "before_last"], **words))) == {
            LAST,
            BEFORE_LAST,
        }
        return
    with pytest.raises(ConfigError, match=rf"^search\.mtp_stage: before_last; {fault}$"):
        space_of(split=None, mtp_stage=["last", "before_last"], **words)


def test_with_dense_layers_the_mtp_stage_needs_one() -> None:
    space = space_of("moe", "bare_last_stage")
    bare = replace(space.baseline, split=BEFORE)
    words = "split: 4+4+0+0 leaves a stage without any layer (bare_last_stage)"
    assert space.refusal_of(bare) == words
    assert space.refusal_of(replace(bare, split=Split.of((4, 3, 1, 0), is_mtp_before_last=True))) is None


def test_a_rule_forbids_the_stage() -> None:
    space = space_of(forbid={"mtp_stage": "last", "pipeline_parallel": 4})
    last = replace(space.baseline, split=Split.of((2, 2, 2, 2)))
    assert space.refusal_of(last) == "search.forbid has {pipeline_parallel: 4, mtp_stage: last}"
    assert space.refusal_of(space.baseline) is None
