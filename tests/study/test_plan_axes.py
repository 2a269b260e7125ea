"""The user attributes of a study's trials: every axis of a plan under its standard name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.model.layout import Setting
from quartet_plugin.model.plan import ScheduleChoice, Split
from quartet_plugin.model.plan_axes import plan_axes
from tests.model.plans import LAYOUT, PLAN, plan_with
from tests.space.jobs import make_job, make_nodes
from tests.tuner.fakes import FakeMachine, Killed, begin, resume, tune

CONFIG: dict[str, Any] = {
    "search": {"schedule": ["1f1b", "interleaved", "zb-h1"]},
    "study": {"trials": 6, "rounds": 3, "top_k": 1, "explore": 2},
}
COPIES = replace(LAYOUT, data_parallel=2)
NAMES = {
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_stages",
    "data_parallel",
    "context_parallel",
    "expert_parallel",
    "micro_batch_size",
    "num_microbatches",
    "sequence_parallel",
    "distributed_optimizer",
    "recompute",
    "schedule",
    "split",
    "mapping",
    "shape",
    "num_layers",
    "hidden_size",
}


def open_study(run: Any) -> Any:
    import optuna

    return optuna.load_study(study_name="r", storage=f"sqlite:///{run.storage.file}")


def test_the_axes_of_a_plan_have_standard_names() -> None:
    axes = plan_axes(PLAN)
    assert axes.keys() == NAMES
    assert (axes["pipeline_parallel"], axes["micro_batch_size"], axes["split"]) == (2, 4, "6+2")
    assert axes["distributed_optimizer"] is False


def test_the_schedule_is_named_apart_from_its_group() -> None:
    layout = replace(LAYOUT, virtual_stages=2)
    split = replace(PLAN.split, transformer_layers_per_stage=(2, 2, 2, 2))
    made = plan_with(layout=layout, split=split, schedule=ScheduleChoice(name="interleaved", group=4))
    assert (plan_axes(made)["schedule"], plan_axes(made)["group"]) == ("interleaved", 4)


def test_the_stage_of_multi_token_prediction_is_an_axis_where_a_pipeline_has_it() -> None:
    last = replace(PLAN, made_for=replace(PLAN.made_for, mtp_layers=1))
    before = replace(last, split=Split.of((8, 0), is_mtp_before_last=True))
    assert plan_axes(last) == plan_axes(PLAN) | {"mtp_stage": "last"}
    assert plan_axes(before) == plan_axes(PLAN) | {"mtp_stage": "before_last", "split": "8+0"}
    whole = ScheduleChoice(name="no-pipelining")
    layout = replace(LAYOUT, pipeline_parallel=1, data_parallel=2)
    assert plan_axes(replace(last, layout=layout, split=Split.of((8,)), schedule=whole)).keys() == NAMES


def test_a_changed_setting_stands_under_the_name_of_its_knob() -> None:
    layout = LAYOUT.with_setting("overlap_grad_reduce", True).with_setting("ddp_bucket_size", 40_000_000)
    axes = plan_axes(plan_with(layout=layout))
    assert axes.keys() == NAMES | {"overlap_grad_reduce", "ddp_bucket_size"}
    assert (axes["overlap_grad_reduce"], axes["ddp_bucket_size"]) == (True, 40_000_000)


def test_a_plan_with_a_changed_setting_can_be_enqueued_and_told(tmp_path: Path) -> None:
    config = {**CONFIG, "search": {**CONFIG["search"], "overlap_grad_reduce": True}}
    run = begin(tmp_path / "r", **config)
    kept = (Setting(name="overlap_grad_reduce", value=False),)
    result = tune(
        run, FakeMachine(job=replace(make_job(layout=COPIES), settings=kept), cluster=make_nodes(4))
    )
    study = open_study(run)
    changed = [trial for trial in result.trials if trial.plan.layout.settings]
    assert changed
    for trial in changed:
        attributes = study.trials[trial.number].user_attrs
        assert {name: attributes[name] for name in plan_axes(trial.plan)} == plan_axes(trial.plan)


@pytest.mark.parametrize("starts", ["auto", "none"])
def test_every_trial_has_the_axes_of_its_plan_as_user_attributes(tmp_path: Path, starts: str) -> None:
    run = begin(tmp_path / "r", **{**CONFIG, "study": {**CONFIG["study"], "starts": starts}})
    result = tune(run, FakeMachine())
    study = open_study(run)
    for trial in result.trials:
        attributes = study.trials[trial.number].user_attrs
        assert {name: attributes[name] for name in plan_axes(trial.plan)} == plan_axes(trial.plan)


def test_a_trial_that_was_killed_has_them_as_well(tmp_path: Path) -> None:
    machine = FakeMachine(dies_at=2, dies_before_result=False)
    with pytest.raises(Killed):
        tune(begin(tmp_path / "r", **CONFIG), machine)
    run = resume(tmp_path / "r")
    result = tune(run, machine)
    trials = open_study(run).trials
    for trial in result.trials:
        attributes = trials[trial.number].user_attrs
        assert {name: attributes[name] for name in plan_axes(trial.plan)} == plan_axes(trial.plan)
