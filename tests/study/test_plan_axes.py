"""The user attributes of a study's trials: every axis of a plan under its standard name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.model.plan import ScheduleChoice
from quartet_plugin.model.plan_axes import plan_axes
from tests.model.plans import LAYOUT, PLAN, plan_with
from tests.tuner.fakes import FakeMachine, Killed, begin, resume, tune

CONFIG: dict[str, Any] = {
    "search": {"schedule": ["1f1b", "interleaved", "zb-h1"]},
    "study": {"trials": 6, "rounds": 3, "top_k": 1, "explore": 2},
}
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
