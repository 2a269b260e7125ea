"""The planner as an Optuna sampler: the documented script, far fewer trials than TPE's, an ordinary study."""

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.schema import dump
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord
from quartet_plugin.planner.plan_scorer import PlanScorer
from quartet_plugin.space.param_sources import FixedParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.space.searched_orders import ORDER
from quartet_plugin.study.plan_sampler import PlanSampler, suggest_plan
from quartet_plugin.study.trial_params import recorded_params
from quartet_plugin.tuner.config import parse_config
from tests.calibration.truth import Truth
from tests.space.jobs import make_job, make_layout, make_nodes

FULL_SEARCHES = True  # read by `short_searches`

ROOT = Path(__file__).parents[2]
JOB = make_job(layout=make_layout(pipeline_parallel=4))
NODES = make_nodes(4)
NUM_TPE_TRIALS, NUM_TRIALS, NEAR = 80, 12, 1.002
# What a trial's plan takes without noise: of many measured values the smallest is a lucky one.
TRUE_S = "true_s"


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def space_of(**search: Any) -> Space:
    search = {"pipeline_parallel": 4, "schedule": ["1f1b", "interleaved"], **search}
    config = parse_config({"search": search}, where="test").search
    return build_space(JOB, nodes=NODES, search=config, run="r", seed=0)


def objective_of(space: Space, *, seed: int = 0, noise: float = 0.01) -> Callable[[Any], float]:
    truth = Truth(NODES, head=3.0, transfer=10.0, residual=0.01)
    generator = random.Random(seed)

    def objective(trial: Any) -> float:
        true_s = truth(suggest_plan(trial, space))
        trial.set_user_attr(TRUE_S, true_s)
        return true_s * math.exp(generator.gauss(0.0, noise))

    return objective


def study_of(sampler: Any, **options: Any) -> Any:
    return optuna.create_study(**{"sampler": sampler, **options})


def tpe(seed: int = 0) -> optuna.samplers.BaseSampler:
    return optuna.samplers.TPESampler(seed=seed)


def num_until(study: Any, value: float) -> int:
    """Trials until one's plan took at most `value`, one more than all where none did."""
    numbers = [trial.number for trial in study.trials if trial.user_attrs[TRUE_S] <= value]
    return min(numbers, default=len(study.trials)) + 1


def test_the_documented_script_runs_and_leaves_an_ordinary_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    attempt = Path("runs/NAME/trials/000000/attempt-1")
    attempt.mkdir(parents=True)
    (attempt / "rank-0.json").write_text(json.dumps({"job": dump(JOB)}))
    text = (ROOT / "docs" / "search.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in script.splitlines() if line.strip()]) <= 30
    exec(compile(script, "docs/search.md", "exec"), {})
    assert "pp4" in capsys.readouterr().out
    study = optuna.load_study(study_name="plans", storage="sqlite:///plans.sqlite3")
    assert len(study.trials) == 12
    assert all("fixed_params" not in trial.system_attrs for trial in study.trials)
    assert all(trial.params.keys() == trial.distributions.keys() for trial in study.trials)
    # Another sampler goes on with it.
    optuna.load_study(study_name="plans", storage="sqlite:///plans.sqlite3", sampler=tpe()).ask()


@pytest.mark.nightly
def test_the_best_plan_is_found_in_far_fewer_trials_than_by_tpe_alone() -> None:
    space = space_of()
    planned, alone = [], []
    for seed in range(3):
        ours, theirs = study_of(PlanSampler(space, explorer=tpe(seed))), study_of(tpe(seed))
        ours.optimize(objective_of(space, seed=seed), n_trials=NUM_TRIALS)
        theirs.optimize(objective_of(space, seed=seed), n_trials=NUM_TPE_TRIALS)
        near = NEAR * min(trial.user_attrs[TRUE_S] for trial in (*ours.trials, *theirs.trials))
        planned.append(num_until(ours, near))
        alone.append(num_until(theirs, near))
    assert 4 * sum(planned) <= sum(alone), (planned, alone)


@pytest.mark.usefixtures("brief_searches")
def test_a_proposal_follows_from_the_finished_trials_alone(tmp_path: Path) -> None:
    space = space_of()
    storage = f"sqlite:///{tmp_path / 'study.sqlite3'}"
    options = {"storage": storage, "study_name": "s", "load_if_exists": True}
    undisturbed = study_of(PlanSampler(space, explorer=tpe()))
    undisturbed.optimize(objective_of(space, noise=0.0), n_trials=4)
    for _ in range(4):
        study_of(PlanSampler(space, explorer=tpe()), **options).optimize(
            objective_of(space, noise=0.0), n_trials=1
        )
    resumed = study_of(None, **options)
    assert [trial.params for trial in resumed.trials] == [trial.params for trial in undisturbed.trials]


def test_the_point_is_the_tuners() -> None:
    """The plan that the scorer of the tuner's proposer puts first, after the baseline."""
    space = space_of()
    sampler = PlanSampler(space, explorer=tpe())
    study = study_of(sampler)
    study.optimize(objective_of(space), n_trials=1)
    assert suggest_plan(study.best_trial, space).key == space.baseline.key
    (baseline,) = study.trials
    scorer: PlanScorer = sampler._state_of(study).scorer
    record = TrialRecord(
        verdict="measured", outcome="OK", reason="", attempt_id="", iteration_s=baseline.value
    )
    scorer.predictor.learn([FinishedTrial(number=0, plan=space.baseline, record=record)])
    expected = next(
        scored.candidate.plan
        for scored in scorer.scored_plans()
        if scored.candidate.plan.key != space.baseline.key
    )
    assert suggest_plan(study.ask(), space).key == expected.key


def test_the_explorer_has_its_turns_and_the_parameters_that_are_not_of_the_space() -> None:
    space = space_of()

    class Recording(optuna.samplers.RandomSampler):  # type: ignore[misc]  # Optuna is read as untyped here
        names: dict[int, set[str]] = {}  # noqa: RUF012

        def sample_independent(self, study: Any, trial: Any, param_name: str, distribution: Any) -> Any:
            self.names.setdefault(trial.number, set()).add(param_name)
            return super().sample_independent(study, trial, param_name, distribution)

    explorer = Recording(seed=0)
    measure = objective_of(space)

    def objective(trial: Any) -> float:
        trial.suggest_float("lr", 1e-5, 1e-3, log=True)
        return measure(trial)

    study_of(PlanSampler(space, explorer=explorer, explore=3)).optimize(objective, n_trials=7)
    assert {number for number, names in explorer.names.items() if names != {"lr"}} == {3, 6}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("TPESampler", {"n_startup_trials": 2, "multivariate": True, "group": True}),
        ("GPSampler", {"n_startup_trials": 2}),
        ("QMCSampler", {}),
        ("NSGAIISampler", {"population_size": 2}),
        ("RandomSampler", {}),
    ],
)
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_any_of_optunas_own_explores(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    explorer = getattr(optuna.samplers, name)(seed=0, **options)
    space, asked = space_of(), set()

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        def ask(study: Any, trial: Any, *words: Any) -> Any:
            asked.add(trial.number)
            return method(study, trial, *words)

        return ask

    for method in ("sample_relative", "sample_independent"):
        monkeypatch.setattr(explorer, method, noted(getattr(explorer, method)))
    study = study_of(PlanSampler(space, explorer=explorer, explore=2))
    study.optimize(objective_of(space), n_trials=7)
    assert asked == {2, 4, 6}
    assert all(math.isfinite(trial.value) for trial in study.trials)


def test_plans_that_were_pruned_or_failed_or_are_fixed_are_no_proposals_again() -> None:
    space = space_of()
    study = study_of(PlanSampler(space, explorer=tpe(), explore=0), direction="maximize")
    study.sampler = PlanSampler(space, explorer=tpe(), explore=0, objective="tokens_per_s")
    measure = objective_of(space)
    seen = []

    def objective(trial: Any) -> float:
        seen.append(suggest_plan(trial, space).key)
        if trial.number == 1:
            raise optuna.TrialPruned
        if trial.number == 2:
            raise RuntimeError("a node was lost")
        return 1.0 / measure(trial)

    study.optimize(objective, n_trials=5, catch=RuntimeError)
    assert [trial.state.name for trial in study.trials][1:3] == ["PRUNED", "FAIL"]
    assert len(set(seen)) == 5
    study.enqueue_trial(dict(study.trials[0].params))
    assert suggest_plan(study.ask(), space).key == space.baseline.key


def test_a_plan_with_infinite_seconds_does_not_fit_and_is_no_proposal_again() -> None:
    space = space_of()
    study = study_of(PlanSampler(space, explorer=tpe(), explore=0))
    measure = objective_of(space)
    seen = []

    def objective(trial: Any) -> float:
        seen.append(suggest_plan(trial, space).key)
        return math.inf if trial.number == 1 else measure(trial)

    study.optimize(objective, n_trials=4)
    assert len(set(seen)) == 4


def test_trials_that_are_asked_for_at_once_have_different_plans() -> None:
    """Before a trial's parameters are in the study, another thread may ask: both states are seen here."""
    space = space_of()
    sampler = PlanSampler(space, explorer=tpe(), explore=0)
    study = study_of(sampler)
    study.optimize(objective_of(space), n_trials=1)
    # Optuna draws a trial's relative parameters at once, and stores each when it is suggested.
    trials = [study.ask() for _ in range(3)]
    for trial in trials:
        _ = trial.relative_params
    assert len({suggest_plan(trial, space).key for trial in trials}) == 3


def test_a_sampler_has_a_state_for_each_study() -> None:
    """In-memory studies all have the same number in their storages."""
    sampler = PlanSampler(space_of(), explorer=tpe(), explore=0)
    first, second = study_of(sampler), study_of(sampler)
    assert first._study_id == second._study_id
    measure = objective_of(space_of())
    first.optimize(measure, n_trials=3)
    second.optimize(measure, n_trials=1)
    alone = study_of(PlanSampler(space_of(), explorer=tpe(), explore=0))
    alone.optimize(objective_of(space_of()), n_trials=1)
    assert second.trials[0].params == alone.trials[0].params
    assert len(sampler._state_of(second).plans) <= 1


def test_a_pruner_that_wraps_the_study_leaves_the_sampler_its_state() -> None:
    space = space_of()
    sampler = PlanSampler(space, explorer=tpe(), explore=0)
    study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.HyperbandPruner(max_resource=9))
    study.optimize(objective_of(space), n_trials=3)
    assert list(sampler._states[study._storage]) == [study._study_id]


def test_a_study_that_optimizes_the_other_way_is_refused() -> None:
    study = study_of(PlanSampler(space_of()), direction="maximize")
    with pytest.raises(ConfigError, match="iteration_s needs direction='minimize'"):
        study.ask()


def test_the_study_keeps_the_orders_that_are_searched_for_its_measurements() -> None:
    space = space_of(schedule=["zb-v", "searched"], virtual_stages=2, mapping="stock")
    study = study_of(PlanSampler(space, explorer=tpe(), explore=0))
    plans: list[Plan] = []
    truth = Truth(NODES, head=3.0, transfer=10.0)

    def objective(trial: Any) -> float:
        plans.append(suggest_plan(trial, space))
        return truth(plans[-1])

    study.optimize(objective, n_trials=5)
    assert any(ORDER in trial.user_attrs for trial in study.trials)
    for trial, plan in zip(study.trials, plans, strict=True):
        params = recorded_params(trial)
        if trial.number > 0:
            assert space.decode(FixedParams(params), trial=trial.number).key == plan.key
            assert suggest_plan(trial, space).key == plan.key
