"""Models with fewer layers: which are made, what they decide, and that nothing is lost by them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.launch import DEPTH_PROXY
from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.space.plan_space import baseline_plan
from quartet_plugin.study.view import read_study
from quartet_plugin.trial.request import TrialRequest, TrialResult
from quartet_plugin.tuner.config import parse_config
from quartet_plugin.tuner.depth_proxy import reduced_depth
from quartet_plugin.tuner.history import read_history
from quartet_plugin.tuner.tune_result import TuneResult
from tests.space.jobs import make_job, make_nodes
from tests.tuner.fakes import FakeMachine, Killed, Watching, by_formula, outcome, resume, tune
from tests.tuner.fakes import begin_with_journal as begin

WHOLE = make_job().shape
DRIFTS_AFTER = 3


def own_plan() -> Plan:
    return baseline_plan(make_job(), nodes=make_nodes(2), run="r", seed=0)


def with_split(counts: tuple[int, ...]) -> Plan:
    plan = own_plan()
    layout = replace(plan.layout, pipeline_parallel=2, data_parallel=1, tensor_parallel=1)
    return replace(
        plan,
        shape=replace(plan.shape, num_layers=sum(counts)),
        layout=layout,
        split=Split(transformer_layers_per_stage=counts),
    )


@given(counts=st.tuples(st.integers(1, 60), st.integers(1, 60)), layers=st.integers(1, 60))
def test_a_cropped_plan_keeps_everything_but_layers(counts: tuple[int, int], layers: int) -> None:
    plan = with_split(counts)
    small = reduced_depth(plan, layers=layers)
    if max(counts) <= layers:
        assert small is None
        return
    assert small is not None
    kept = small.split.transformer_layers_per_stage
    assert max(kept) == layers
    assert min(kept) >= 1
    assert small.shape == replace(plan.shape, num_layers=sum(kept))
    for count, left in zip(counts, kept, strict=True):
        assert abs(left - count * layers / max(counts)) < 1.0
    assert replace(small, shape=plan.shape, split=plan.split) == replace(plan, measurement=None)


def test_a_stage_without_layers_stays_without() -> None:
    small = reduced_depth(with_split((8, 0)), layers=2)
    assert small is not None
    assert small.split.transformer_layers_per_stage == (2, 0)


class Steep(FakeMachine):
    """Where plans differ much, so that few layers show it."""


def steep(plan: Plan) -> float:
    penalty = 1.0 + 0.6 * (plan.layout.micro_batch_size - 1) + 0.5 * (not plan.mapping.is_stock)
    return by_formula(plan) * penalty


def whole_launches(machine: FakeMachine) -> int:
    return sum(folder.parent.name == "trials" for folder in machine.disk)


def crop_launches(machine: FakeMachine) -> int:
    return sum(folder.parent.name == "cropped" for folder in machine.disk)


def ended_cropped(result: TuneResult) -> list[int]:
    return [trial.number for trial in result.trials if trial.record.outcome == DEPTH_PROXY]


def test_plans_that_are_behind_end_at_their_cropped_model(tmp_path: Path) -> None:
    study = {"trials": 12, "explore": 2}
    machine, watching = FakeMachine(seconds=steep), Watching()
    run = begin(tmp_path / "a", study=study, trial={"crop": 2})
    result = tune(run, machine, observer=watching)
    behind = ended_cropped(result)
    assert behind, "the sampler's own plans are far off"
    assert any("depth proxies: 2 of 4 layers per stage" in text for text in watching.messages)
    assert whole_launches(machine) == 13 - len(behind), "their whole models were not launched"
    assert crop_launches(machine) > len(behind), "the baseline is cropped too"
    by_number = {trial.number: trial for trial in result.trials}
    best_s = min(one.record.iteration_s or 9e9 for one in result.trials if one.record.outcome == "OK")
    for number in behind:
        trial = by_number[number]
        truth_s = steep(trial.plan)
        assert truth_s > best_s
        assert trial.record.iteration_s == pytest.approx(truth_s, rel=0.25)
        assert trial.record.num_iterations == 0
    assert not set(behind) & {ranking.trial.number for ranking in result.rankings}
    assert result.winner is not None
    record = read_study(run.storage)
    assert read_history(run.folder.path, study=record).num_spent == 12, "they are trials of the study"
    for view in (record, None):
        history = read_history(run.folder.path, study=view)
        rows = [row for row in history.trials if row.outcome == DEPTH_PROXY]
        assert [row.number for row in rows] == behind
        assert not any(row.is_measured or row.iteration_s for row in rows), "only predicted"


def test_a_cropped_model_is_compared_with_nothing(tmp_path: Path) -> None:
    """It does less work: its tokens a second would look like a win."""
    watching = Watching()
    tune(
        begin(tmp_path / "a", study={"trials": 4}, trial={"crop": 2}),
        FakeMachine(seconds=steep),
        observer=watching,
    )
    lines = [text for text in watching.messages if " depth proxy: " in text and "s/iteration" in text]
    assert len(lines) == 5
    assert not any("baseline" in text or "tokens/s" in text for text in lines)


class Slowing(FakeMachine):
    """Slower by a half from the first control on."""

    def _result(self, request: TrialRequest) -> TrialResult:
        result = super()._result(request)
        is_trial = request.folder.parent.name in ("trials", "cropped")
        if is_trial and int(request.folder.name) <= DRIFTS_AFTER:
            return result
        return replace(result, iteration_s=tuple(1.5 * seconds for seconds in result.iteration_s))


def test_cropped_models_of_a_machine_that_has_slowed_down_say_the_same(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "study": {"trials": 10, "explore": 2, "control": DRIFTS_AFTER},
        "trial": {"crop": 2},
    }
    steady = tune(begin(tmp_path / "a", **config), FakeMachine(seconds=steep, noise=0.0))
    slowing = tune(begin(tmp_path / "b", **config), Slowing(seconds=steep, noise=0.0))
    assert [number for number in ended_cropped(slowing) if number > DRIFTS_AFTER]
    assert slowing.trials[-1].record.drift == pytest.approx(1.0 / 1.5)
    for one, other in zip(steady.trials, slowing.trials, strict=True):
        assert (one.plan.key, one.record.outcome) == (other.plan.key, other.record.outcome)
        assert other.record.value == pytest.approx(one.record.value)


@pytest.mark.nightly
def test_a_tuner_killed_after_a_drift_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "study": {"trials": 5, "explore": 2, "control": DRIFTS_AFTER, "rounds": 3, "top_k": 2},
        "trial": {"crop": 2},
    }
    whole = Slowing(seconds=steep)
    expected = outcome(tune(begin(tmp_path / "whole", **config), whole))
    num_searched = sum("round" not in folder for folder, _ in whole.launched)
    for at in range(num_searched // 2, len(whole.launched)):
        machine = Slowing(seconds=steep, dies_at=at, dies_before_result=False)
        with pytest.raises(Killed):
            tune(begin(tmp_path / f"{at}", **config), machine)
        assert outcome(tune(resume(tmp_path / f"{at}"), machine)) == expected


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(True, id="before its result", marks=pytest.mark.slow),
        pytest.param(False, id="after its result", marks=pytest.mark.nightly),
    ],
)
def test_a_tuner_killed_at_any_launch_ends_as_an_undisturbed_one(tmp_path: Path, before: bool) -> None:
    config: dict[str, Any] = {"study": {"trials": 3, "explore": 2}, "trial": {"crop": 2}}
    whole = FakeMachine(seconds=steep)
    expected = outcome(tune(begin(tmp_path / "whole", **config), whole))
    num_searched = sum("round" not in folder for folder, _ in whole.launched)
    for at in range(num_searched):
        machine = FakeMachine(seconds=steep, dies_at=at, dies_before_result=before)
        with pytest.raises(Killed):
            tune(begin(tmp_path / f"{at}", **config), machine)
        assert outcome(tune(resume(tmp_path / f"{at}"), machine)) == expected


def test_nothing_is_cropped_where_it_saves_little(tmp_path: Path) -> None:
    machine = FakeMachine(wall_s=10.0)
    tune(begin(tmp_path / "a", study={"trials": 3}), machine)
    assert crop_launches(machine) == 0


def test_long_trials_are_cropped_without_being_asked(tmp_path: Path) -> None:
    machine = FakeMachine(wall_s=400.0)
    tune(begin(tmp_path / "a", study={"trials": 3}), machine)
    assert crop_launches(machine) > 1


def test_nothing_is_cropped_where_that_is_asked_for(tmp_path: Path) -> None:
    machine = FakeMachine(wall_s=400.0)
    tune(begin(tmp_path / "a", study={"trials": 3}, trial={"crop": "none"}), machine)
    assert crop_launches(machine) == 0


@pytest.mark.parametrize(
    ("features", "crop", "word"),
    [
        (("moe",), 2, "moe keeps the number of layers"),
        (("cp_comm_by_layer",), 2, "cp_comm_by_layer keeps the number of layers"),
        (("no_rope_pattern",), 2, "no_rope_pattern keeps the number of layers"),
        ((), 4, "the largest stage has 4 layers"),
    ],
)
def test_what_was_asked_for_in_vain_is_said(
    tmp_path: Path, features: tuple[str, ...], crop: int, word: str
) -> None:
    machine, watching = FakeMachine(job=make_job(features=features)), Watching()
    tune(begin(tmp_path / "a", study={"trials": 2}, trial={"crop": crop}), machine, observer=watching)
    assert crop_launches(machine) == 0
    assert any(word in text for text in watching.messages)


def test_a_baseline_that_cannot_be_cropped_ends_it(tmp_path: Path) -> None:
    def outcome_of(plan: Plan) -> Any:
        from quartet_plugin.trial.request import Outcome

        return Outcome.OK if plan.shape == own_plan().shape else Outcome.INFEASIBLE

    machine, watching = FakeMachine(outcome=outcome_of), Watching()
    result = tune(begin(tmp_path / "a", study={"trials": 3}, trial={"crop": 2}), machine, observer=watching)
    assert crop_launches(machine) == 1
    assert any("plans are measured with all layers" in text for text in watching.messages)
    assert not ended_cropped(result)


@pytest.mark.parametrize("crop", [0, "soon", 1.5, True])
def test_what_is_no_number_of_layers_is_refused(crop: Any) -> None:
    with pytest.raises(ConfigError, match=r"trial\.crop"):
        parse_config({"trial": {"crop": crop}}, where="q.yaml")
