"""Samplers by name: each runs a study, proposes the same after a resume, and learns what it can."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import create_trial

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.canonical import derived_seed
from quartet_plugin.study import samplers
from quartet_plugin.study.grouped_sampler import groups_of
from quartet_plugin.study.samplers import NAMES, SamplerName, check_installed, make
from quartet_plugin.trial.request import Outcome, TrialRequest
from quartet_plugin.tuner.config import parse_config
from quartet_plugin.tuner.tune_result import TuneResult
from tests.tuner.fakes import FakeMachine, Killed, begin, outcome, resume, tune
from tests.tuner.test_crash_points import watched

SEARCH: dict[str, Any] = {"mapping": "stock", "schedule": ["no-pipelining", "1f1b", "zb-h1"]}


def config(name: SamplerName, **study: Any) -> dict[str, Any]:
    wanted = {"trials": 10, "rounds": 3, "top_k": 1, "starts": "none", "sampler": name, "storage": "journal"}
    return {"search": SEARCH, "study": {**wanted, **study}}


def a_machine(**options: Any) -> FakeMachine:
    def outcome(plan: Any) -> Outcome:
        return Outcome.INFEASIBLE if plan.layout.micro_batch_size == 8 else Outcome.OK

    return FakeMachine(outcome=outcome, **options)


@functools.cache
def undisturbed(name: SamplerName) -> TuneResult:
    """A study of ten trials with a sampler, which each test process runs once."""
    with tempfile.TemporaryDirectory() as folder:
        return tune(begin(Path(folder) / "r", **config(name)), a_machine())


def outcomes(result: TuneResult) -> list[tuple[Any, ...]]:
    return [(r.number, r.plan.key, r.record.verdict, r.record.value, r.record.repeats) for r in result.trials]


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name not in ("gp", "nsga2")),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gp", "nsga2")),
    ],
)
def test_each_sampler_proposes_the_same_after_a_resume(tmp_path: Path, name: SamplerName) -> None:
    whole = undisturbed(name)
    assert len({trial.plan.key for trial in whole.trials}) == 11
    machine, folder = a_machine(dies_at=9), tmp_path / "killed" / "r"
    with pytest.raises(Killed):
        tune(begin(folder, **config(name)), machine)
    machine.dies_at = None
    assert outcomes(tune(resume(folder), machine)) == outcomes(whole)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qmc", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gp", "nsga2")),
    ],
)
def test_killed_between_any_two_writes_of_a_proposal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: SamplerName
) -> None:
    """A proposal is several writes: what the earlier ones left does not change the later ones."""
    # A quasi-random point follows from the number of those before it alone, others from their values.
    wanted, marks = config(name, trials=5 if name == "qmc" else 10, storage="sqlite"), []
    with watched(monkeypatch) as writes:

        def mark(request: TrialRequest) -> None:
            if "round" not in request.folder.name:
                marks.append(writes.count)

        expected = outcome(tune(begin(tmp_path / "whole" / "r", **wanted), a_machine(on_launch=mark)))
    # Most writes are attributes, one like the other: eight points lie before and between the kinds.
    for dies_before in range(marks[-2], marks[-1], max(2, (marks[-1] - marks[-2]) // 8)):
        machine, folder = a_machine(), tmp_path / f"{dies_before}" / "r"
        with pytest.raises(Killed), watched(monkeypatch, dies_before=dies_before):
            tune(begin(folder, **wanted), machine)
        assert outcome(tune(resume(folder), machine)) == expected, dies_before


@pytest.mark.slow
def test_samplers_propose_differently() -> None:
    found = {name: tuple(trial.plan.key for trial in undisturbed(name).trials) for name in NAMES}
    assert len(set(found.values())) == len(NAMES)


def objective(trial: optuna.Trial) -> float:
    """Conditional, as a plan is: what `depth` is worth hangs on the kind. Best: "b" with depth 0.7."""
    kind = trial.suggest_categorical("kind", ["a", "b", "c"])
    if kind == "c":
        return 0.0
    best = {"a": -0.5, "b": 0.7}[kind]
    depth: float = trial.suggest_float(f"depth[{kind}]", -1.0, 1.0)
    return {"a": 1.0, "b": 2.0}[kind] - abs(depth - best)


def optimized(name: SamplerName, *, seed: int, num_trials: int) -> list[float]:
    study = optuna.create_study(direction="maximize")
    for number in range(num_trials):
        study.sampler = make(name, seed=derived_seed(seed, number, "t"), study_seed=seed)
        trial = study.ask()
        study.tell(trial, objective(trial))
    return [trial.value or 0.0 for trial in study.trials]


@pytest.mark.parametrize("name", ["tpe", "nsga2"])
def test_those_with_a_model_learn_where_parameters_are_conditional(name: SamplerName) -> None:
    def late(one: SamplerName) -> float:
        values = [value for seed in range(3) for value in optimized(one, seed=seed, num_trials=48)[-16:]]
        return sum(values) / len(values)

    assert late(name) > late("random") + 0.2


def test_a_gaussian_process_finds_the_best_of_a_conditional_space() -> None:
    values = optimized("gp", seed=0, num_trials=24)
    assert max(values) > 1.95
    assert sum(values[-6:]) > sum(values[:6]) + 2.0


def test_quasi_random_points_fill_the_range_evenly() -> None:
    study = optuna.create_study(direction="maximize")
    for number in range(17):
        study.sampler = make("qmc", seed=derived_seed(7, number, "t"), study_seed=7)
        trial = study.ask()
        study.tell(trial, trial.suggest_float("x", 0.0, 1.0))
    values = [trial.params["x"] for trial in study.trials[1:]]
    assert {int(16 * value) for value in values} == set(range(16))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sets(st.sampled_from("abcd")), max_size=8))
def test_groups_hold_what_always_occurs_together(names: list[set[str]]) -> None:
    trials = [
        create_trial(
            value=1.0,
            params=dict.fromkeys(sorted(some), 0.5),
            distributions={name: FloatDistribution(0.0, 1.0) for name in sorted(some)},
        )
        for some in names
    ]
    groups = groups_of(trials)
    found = [name for space, _ in groups for name in space]
    assert sorted(found) == sorted(set().union(*names)) if names else not found
    for space, members in groups:
        assert members == [trial for trial in trials if space.keys() <= trial.params.keys()]
        assert not any(space.keys() & trial.params.keys() for trial in trials if trial not in members)


def test_a_name_with_two_meanings_is_in_no_group() -> None:
    def one(choices: tuple[str, ...]) -> Any:
        return create_trial(
            value=1.0, params={"x": choices[0]}, distributions={"x": CategoricalDistribution(choices)}
        )

    assert groups_of([one(("a", "b")), one(("a", "c"))]) == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("nope", "'nope': must be tpe, gp, qmc, nsga2 or random"),
        ("cmaes", "pickled code"),
        ("CmaEsSampler", "pickled code"),
        ("grid", "depend on each other"),
        (3, "'3': must be tpe"),
    ],
)
def test_other_names_are_refused_in_one_line(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=r"study\.sampler") as caught:
        parse_config({"study": {"sampler": value}}, where="q.yaml")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "find_spec", lambda name: None if name == "torch" else object())
    check_installed("tpe")
    check_installed("qmc")
    with pytest.raises(ConfigError, match=r"'gp': needs torch.*pip install torch, or take tpe"):
        check_installed("gp")
