"""A whole run on a machine made of arithmetic."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import (
    InfeasibleError,
    InfrastructureError,
    InterruptedByUserError,
    SeamError,
    StorageError,
)
from quartet_plugin.model.history import DriftMeasurement
from quartet_plugin.model.plan import Plan
from quartet_plugin.scaling.shapes import BudgetRule, equal_shapes
from quartet_plugin.schedule.search.effort import stop_check
from quartet_plugin.space.plan_space import Space
from quartet_plugin.study.trial_params import TrialParams
from quartet_plugin.trial.request import Outcome, Progress, TrialRequest, TrialResult
from quartet_plugin.tuner.drift import chance_limit
from quartet_plugin.tuner.finalists import order_of_round
from quartet_plugin.tuner.history import read_history
from quartet_plugin.tuner.history_rows import read_events
from quartet_plugin.tuner.proposer import Proposer
from quartet_plugin.tuner.tune_result import TuneResult
from tests.space.jobs import make_job
from tests.tuner.fakes import FakeMachine, Killed, Watching, resume, tune
from tests.tuner.fakes import begin_with_journal as begin

SCALING = {"scaling": {"tolerance": 0.05}}


def finished(study: Any) -> list[Any]:
    return [trial for trial in study.trials if trial.state.is_finished()]


def outcomes(result: TuneResult) -> list[tuple[Any, ...]]:
    return [
        (trial.number, trial.plan.key, trial.record.verdict, trial.record.value, trial.record.repeats)
        for trial in result.trials
    ]


@pytest.mark.usefixtures("full_searches")
def test_a_study_tries_every_axis_early_and_finds_a_faster_plan(tmp_path: Path) -> None:
    machine = FakeMachine()
    result = tune(begin(tmp_path / "r", search=SCALING, study={"trials": 14}), machine)
    plans = [trial.plan for trial in result.trials]
    assert plans[0].key == result.baseline.key
    early = plans[:9]
    assert len({plan.shape for plan in early}) > 1
    assert len({plan.split for plan in early}) > 2
    assert len({plan.schedule.name for plan in early}) > 1
    assert len({plan.mapping for plan in early}) > 1
    assert result.winner is not None
    assert result.winner.comparison.speedup.low > 1
    assert result.objective == "model_flops_per_s_per_device"
    tried = [trial for trial in result.trials[1:] if trial.record.repeats is None]
    assert len(tried) == 14


def test_one_other_shape_is_compared_with_the_own_one_by_model_flops(tmp_path: Path) -> None:
    other = equal_shapes(make_job().shape, rule=BudgetRule(tolerance=0.05))[1]
    search = {"scaling": {"tolerance": 0.05, "shapes": other.label}}
    result = tune(begin(tmp_path / "r", search=search, study={"trials": 5}), FakeMachine())
    assert result.objective == "model_flops_per_s_per_device"
    assert {trial.plan.shape for trial in result.trials[1:]} == {other}


def test_the_sampler_can_be_left_alone(tmp_path: Path) -> None:
    planned = tune(begin(tmp_path / "a", study={"trials": 4}), FakeMachine())
    alone = tune(begin(tmp_path / "b", study={"trials": 4, "starts": "none"}), FakeMachine())
    first = planned.trials[1].plan
    assert first.key not in {trial.plan.key for trial in alone.trials}
    assert len(alone.trials) >= len(planned.trials)


def test_no_plan_is_launched_twice_in_the_search(tmp_path: Path) -> None:
    machine = FakeMachine()
    tune(begin(tmp_path / "r", study={"trials": 14}), machine)
    searched = [key for folder, key in machine.launched if "round" not in folder and key is not None]
    assert len(searched) == len(set(searched)) == 14


def test_a_small_space_ends_when_nothing_new_is_left(tmp_path: Path) -> None:
    machine, watching = FakeMachine(), Watching()
    fixed = {
        "pipeline_parallel": 2,
        "virtual_stages": 1,
        "micro_batch_size": 4,
        "split": ["6+2", "7+1"],
        "schedule": "1f1b",
    }
    result = tune(begin(tmp_path / "r", search=fixed), machine, observer=watching)
    assert len({trial.plan.key for trial in result.trials}) == 5  # two splits, two mappings, the baseline
    assert any("no untried plan is left" in text for text in watching.messages)


def test_the_finalists_are_said_and_logged_before_the_final_rounds(tmp_path: Path) -> None:
    watching = Watching()
    study = {"trials": 10, "top_k": 2}
    result = tune(begin(tmp_path / "r", study=study), FakeMachine(), observer=watching)
    (line,) = [line for line in watching.messages if "ranked by the speedup" in line]
    numbers = {ranking.trial.number for ranking in result.rankings}
    events = read_events(tmp_path / "r" / "events.jsonl")
    (event,) = [event for event in events if event["kind"] == "finalists"]
    assert set(event["trials"]) == numbers
    assert line.startswith(
        f"2 finalists (at most study.top_k) of {len(event['ranked'])} plans that are not clearly slower than "
        "your command, ranked by the speedup"
    )
    assert all(f"trial {row['trial']} {row['speedup']:.2f}x" in line for row in event["ranked"][:3])
    assert "; first plan not included: trial " in line


def test_a_second_attempt_of_a_launch_is_said(tmp_path: Path) -> None:
    class Repeating(FakeMachine):
        def run(self, request: TrialRequest, **others: Any) -> TrialResult:
            for attempt in (1, 1, 2):
                others["on_progress"](
                    Progress(attempt=attempt, phase="init", iteration=0, num_iterations=9, elapsed_s=1.0)
                )
            return super().run(request, **{**others, "on_progress": lambda _: None})

    watching = Watching()
    tune(begin(tmp_path / "r", study={"trials": 2, "rounds": 3}), Repeating(), observer=watching)
    assert watching.messages.count("trial 1 is launched once more") == 1


def test_nothing_better_is_said_plainly(tmp_path: Path) -> None:
    machine = FakeMachine(seconds=lambda plan: 1.0, noise=0.05)
    result = tune(begin(tmp_path / "r", study={"trials": 10}), machine)
    assert result.winner is None
    assert all(ranking.comparison.speedup.low <= 1.0 for ranking in result.rankings)


@pytest.mark.parametrize(("slower", "noise"), [(1.5, 0.01), (1.05, 0.005)])
def test_a_lead_far_beyond_the_noise_is_proven_in_three_rounds(
    tmp_path: Path, slower: float, noise: float
) -> None:
    machine = FakeMachine(seconds=lambda plan: 1.0 if plan.layout.data_parallel == 2 else slower, noise=noise)
    watching = Watching()
    result = tune(begin(tmp_path / "r", study={"trials": 8, "rounds": 5}), machine, observer=watching)
    assert result.winner is not None
    assert result.winner.proven_after == result.winner.comparison.plan.num_launches == 3
    assert any("decided after 3 final rounds" in text for text in watching.messages)


class Rounds(FakeMachine):
    """Final rounds in which plans are faster than the baseline by the ratios given, one after the other."""

    ratios: tuple[float, ...] = ()

    def run(self, request: TrialRequest, **others: Any) -> TrialResult:
        result = super().run(request, **others)
        if "round" not in request.folder.name:
            return result
        at = int(request.folder.name.rpartition("-")[2]) - 1
        seconds = 1.0 if request.plan is None else 1.0 / self.ratios[at % len(self.ratios)]
        self.disk[request.folder] = replace(result, iteration_s=(seconds,) * 3)
        return self.disk[request.folder]


def test_a_lead_that_one_launch_hides_is_measured_until_it_is_certain(tmp_path: Path) -> None:
    machine, watching = Rounds(), Watching()
    machine.ratios = (1.4, 1.5, 0.9, 1.3, 1.4, 1.4, 1.2, 1.5, 1.3, 1.4)
    result = tune(begin(tmp_path / "r", study={"trials": 6, "top_k": 1}), machine, observer=watching)
    winner = result.winner
    assert winner is not None
    assert winner.proven_after is not None
    assert 5 < winner.proven_after < 10
    assert winner.comparison.round_ratios == pytest.approx(machine.ratios[: winner.proven_after])
    assert winner.comparison.speedup.low > 1.0
    events = read_events(tmp_path / "r" / "events.jsonl")
    last = [event for event in events if event["kind"] == "final-round"][-1]
    assert last["is_over"]
    assert last["round"] == winner.proven_after
    assert last["proven"] == [winner.trial.number]


def test_what_is_never_certain_is_given_up(tmp_path: Path) -> None:
    """Every second round goes the other way, so no number of rounds decides."""
    machine, watching = Rounds(), Watching()
    machine.ratios = (1.5, 0.7)
    result = tune(begin(tmp_path / "r", study={"trials": 6, "top_k": 1}), machine, observer=watching)
    assert result.winner is None
    assert 3 <= len(result.rankings[0].comparison.round_ratios) <= 15
    assert any("no plan is proven faster" in text for text in watching.messages)


@pytest.mark.parametrize("fails_in", [2, 7])
def test_a_plan_that_fails_in_the_final_rounds_cannot_win(tmp_path: Path, fails_in: int) -> None:
    """Neither is the baseline then measured on alone."""

    class Failing(Rounds):
        def run(self, request: TrialRequest, **others: Any) -> TrialResult:
            result = super().run(request, **others)
            if request.plan is not None and request.folder.name.endswith(f"round-{fails_in}"):
                result = self.disk[request.folder] = replace(
                    result, outcome=Outcome.INFEASIBLE, iteration_s=()
                )
            return result

    machine = Failing()
    machine.ratios = (1.5, 1.0)
    result = tune(begin(tmp_path / "r", study={"trials": 6, "top_k": 1}), machine)
    assert result.winner is None
    assert result.rankings == ()
    own = [folder for folder, key in machine.launched if "round" in folder and key is None]
    assert len(own) <= fails_in


def test_more_rounds_are_only_measured_while_there_is_time(tmp_path: Path) -> None:
    now = [0.0]

    def advance(request: TrialRequest) -> None:
        now[0] += 10.0

    machine = Rounds(wall_s=10.0, on_launch=advance)
    machine.ratios = (1.5, 0.95)
    run = begin(tmp_path / "r", study={"trials": 2, "top_k": 1, "rounds": 3})
    result = tune(run, machine, max_minutes=3.0, clock=lambda: now[0])
    assert now[0] <= 180.0
    assert result.winner is None
    assert 3 < len(result.rankings[0].comparison.round_ratios) < 12


def test_final_rounds_of_an_earlier_session_need_no_time(tmp_path: Path) -> None:
    """A resumed run decides the same, however little time it has."""
    machine = Rounds(wall_s=60.0)
    machine.ratios = (1.4, 1.5, 0.9, 1.3, 1.4, 1.4, 1.2, 1.5, 1.3, 1.4)
    first = tune(begin(tmp_path / "r", study={"trials": 6, "top_k": 2}), machine)
    assert first.winner is not None
    assert len(first.rankings) == 2
    num_launched = len(machine.launched)
    again = tune(resume(tmp_path / "r"), machine, max_minutes=0.1)
    assert again.winner is not None
    assert [(one.trial.number, one.proven_after, one.comparison) for one in again.rankings] == [
        (one.trial.number, one.proven_after, one.comparison) for one in first.rankings
    ]
    assert len(machine.launched) == num_launched


def test_a_launch_that_was_lost_in_a_final_round_stays_lost_when_the_run_is_resumed(tmp_path: Path) -> None:
    """Its round has passed: today's launch is not compared with the baseline's of that time."""

    class LosesOne(Rounds):
        def run(self, request: TrialRequest, **others: Any) -> TrialResult:
            result = super().run(request, **others)
            request.folder.mkdir(parents=True)
            if request.plan is not None and request.folder.name.endswith("-round-3"):
                result = self.disk[request.folder] = replace(result, outcome=Outcome.INFRA, iteration_s=())
            return result

    machine = LosesOne(wall_s=60.0)
    machine.ratios = (1.4, 1.5, 0.9, 1.3, 1.4, 1.4, 1.2, 1.5, 1.3, 1.4)
    first = tune(begin(tmp_path / "r", study={"trials": 6, "top_k": 1}), machine)
    assert first.winner is not None
    assert len(first.winner.comparison.round_ratios) == (first.winner.proven_after or 0) - 1
    num_launched = len(machine.launched)
    for max_minutes in (None, 0.1):
        again = tune(resume(tmp_path / "r"), machine, max_minutes=max_minutes)
        assert again.winner is not None
        assert again.winner.comparison == first.winner.comparison
        assert again.winner.proven_after == first.winner.proven_after
    assert len(machine.launched) == num_launched


@pytest.mark.parametrize(("max_minutes", "is_short"), [(None, False), (2.0, True)])
def test_the_end_says_whether_the_time_was_too_short(
    tmp_path: Path, max_minutes: float | None, is_short: bool
) -> None:
    now = [0.0]

    def advance(request: TrialRequest) -> None:
        now[0] += 10.0

    machine = FakeMachine(wall_s=10.0, on_launch=advance)
    run = begin(tmp_path / "r", study={"trials": 6, "top_k": 1, "rounds": 3})
    tune(run, machine, max_minutes=max_minutes, clock=lambda: now[0])
    (end,) = [event for event in read_events(tmp_path / "r" / "events.jsonl") if event["kind"] == "end"]
    assert end["out_of_time"] is is_short


def test_clearly_slower_plans_are_not_measured_again(tmp_path: Path) -> None:
    job = make_job()
    machine = FakeMachine(job=job)
    own = machine.seconds

    def seconds(plan: Plan) -> float:
        is_own = plan.split == job.split and plan.layout == job.layout and plan.mapping.is_stock
        return 0.1 if is_own and plan.shape == job.shape else 1.0 + own(plan)

    machine.seconds = seconds
    result = tune(begin(tmp_path / "r", study={"trials": 8}), machine)
    assert result.winner is None
    assert result.rankings == ()
    assert not any("round" in folder for folder, _ in machine.launched)


def test_the_final_rounds_are_interleaved_in_random_order(tmp_path: Path) -> None:
    machine = FakeMachine()
    result = tune(begin(tmp_path / "r", study={"trials": 10, "rounds": 5, "top_k": 2}), machine)
    finals = [folder for folder, _ in machine.launched if "round" in folder]
    by_round = {
        index: {name[:6] for name in finals if name.endswith(f"round-{index}")} for index in range(1, 4)
    }
    assert finals == sorted(finals, key=lambda name: int(name.rpartition("-")[2]))
    assert len(by_round[1]) == len(by_round[2]) == 3
    assert all("000000" in names for names in by_round.values())
    assert by_round[3] <= by_round[1]
    assert sum(ranking.comparison.plan.num_launches for ranking in result.rankings) == len(finals) - 3
    orders = {tuple(order_of_round([0, 3, 5], seed=0, round_number=at)) for at in range(20)}
    assert len(orders) == 6


def test_plans_that_do_not_fit_are_told_with_a_constraint_and_never_win(tmp_path: Path) -> None:
    import optuna

    def outcome(plan: Plan) -> Outcome:
        return Outcome.INFEASIBLE if plan.layout.data_parallel == 2 else Outcome.OK

    run = begin(tmp_path / "r", study={"trials": 14, "storage": "sqlite"})
    result = tune(run, FakeMachine(outcome=outcome))
    study = optuna.load_study(
        study_name="r", storage=f"sqlite:///{run.storage.file}", sampler=optuna.samplers.RandomSampler()
    )
    assert not any(trial.state == optuna.trial.TrialState.FAIL for trial in study.trials)
    infeasible = [trial for trial in finished(study) if trial.user_attrs["told"]["outcome"] == "INFEASIBLE"]
    assert infeasible
    for trial in infeasible:
        assert trial.state == optuna.trial.TrialState.COMPLETE
        assert trial.constraints == {"memory_excess": float(1 << 20)}
    assert study.best_trial.user_attrs["told"]["outcome"] == "OK"
    assert all(r.trial.plan.layout.data_parallel == 1 for r in result.rankings)


def test_wrong_results_are_never_scored(tmp_path: Path) -> None:
    import optuna

    def outcome(plan: Plan) -> Outcome:
        return Outcome.WRONG if plan.layout.virtual_stages > 1 else Outcome.OK

    run = begin(tmp_path / "r", study={"trials": 12, "storage": "sqlite"})
    tune(run, FakeMachine(outcome=outcome))
    study = optuna.load_study(study_name="r", storage=f"sqlite:///{run.storage.file}")
    wrong = [trial for trial in finished(study) if trial.user_attrs["told"]["outcome"] == "WRONG"]
    assert wrong
    for trial in wrong:
        assert trial.state == optuna.trial.TrialState.PRUNED
        assert trial.value is None
        assert trial.constraints == {"wrong": 1.0}


def test_thirty_plans_that_do_not_fit_end_the_search(tmp_path: Path) -> None:
    job = make_job()

    def outcome(plan: Plan) -> Outcome:
        is_own = (plan.split, plan.layout, plan.schedule) == (job.split, job.layout, job.schedule)
        return Outcome.OK if is_own else Outcome.INFEASIBLE

    with pytest.raises(InfeasibleError, match="30 plans in a row did not fit"):
        tune(begin(tmp_path / "r", study={"trials": 60}), FakeMachine(outcome=outcome))


def test_trials_that_cannot_be_run_cost_no_budget_but_end_in_a_row(tmp_path: Path) -> None:
    seen: list[str] = []

    def outcome(plan: Plan) -> Outcome:
        seen.append(plan.key)
        return Outcome.INFRA if len(seen) in (3, 6) else Outcome.OK

    result = tune(begin(tmp_path / "r", study={"trials": 10}), FakeMachine(outcome=outcome))
    verdicts = [trial.record.verdict for trial in result.trials if trial.record.repeats is None]
    assert verdicts.count("lost") == 2
    assert len(verdicts) == 1 + 10 + 2

    job = make_job()
    broken = FakeMachine(outcome=lambda plan: Outcome.OK if plan.split == job.split else Outcome.INFRA)
    with pytest.raises(InfrastructureError, match="3 trials in a row could not run"):
        tune(begin(tmp_path / "s", search={"pipeline_parallel": 2, "virtual_stages": 1}), broken)


def test_a_fault_of_the_harness_stops_the_study(tmp_path: Path) -> None:
    def outcome(plan: Plan) -> Outcome:
        return Outcome.HARNESS if plan.layout.data_parallel == 2 else Outcome.OK

    with pytest.raises(SeamError, match="trial"):
        tune(begin(tmp_path / "r", study={"trials": 12}), FakeMachine(outcome=outcome))


@pytest.mark.parametrize("outcome", [Outcome.INFRA, Outcome.INFEASIBLE, Outcome.WRONG])
def test_a_command_that_fails_by_itself_is_shown_and_nothing_is_searched(
    tmp_path: Path, outcome: Outcome
) -> None:
    machine, watching = FakeMachine(outcome=lambda plan: outcome), Watching()
    with pytest.raises(InfrastructureError, match=r"your command failed.*nothing was searched"):
        tune(begin(tmp_path / "r", study={"storage": "sqlite"}), machine, observer=watching)
    assert len(machine.launched) == 1
    assert "  | ValueError: bad flag" in watching.messages
    assert not (tmp_path / "r" / "study.sqlite3").exists()


def test_a_deadline_that_is_too_short_for_the_own_command_is_named(tmp_path: Path) -> None:
    machine = FakeMachine(outcome=lambda plan: Outcome.INFEASIBLE, wall_s=61.0)
    with pytest.raises(InfrastructureError, match=r"raise trial\.deadline_s.*nothing was searched"):
        tune(begin(tmp_path / "r", trial={"deadline_s": 60}), machine)


def test_a_run_is_the_same_again(tmp_path: Path) -> None:
    first = tune(begin(tmp_path / "a" / "r", study={"trials": 12}), FakeMachine())
    second = tune(begin(tmp_path / "b" / "r", study={"trials": 12}), FakeMachine())
    assert outcomes(first) == outcomes(second)
    other = tune(begin(tmp_path / "c" / "r", study={"trials": 12, "seed": 1}), FakeMachine())
    assert outcomes(other) != outcomes(first)


@pytest.mark.parametrize(
    ("is_written", "first"),
    [
        pytest.param(True, 0, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((True, 3), (False, 0), (False, 3))),
    ],
)
def test_a_killed_run_resumes_exactly(tmp_path: Path, is_written: bool, first: int) -> None:
    search = {**SCALING, "schedule": ["no-pipelining", "1f1b", "interleaved"]}
    config = {"search": search, "study": {"trials": 11, "rounds": 3, "top_k": 2}}
    whole = FakeMachine()
    expected = tune(begin(tmp_path / "whole" / "r", **config), whole)
    assert expected.rankings
    for dies_at in range(first + is_written, len(whole.launched), 6):
        folder = tmp_path / f"{dies_at}" / "r"
        machine = FakeMachine(dies_at=dies_at, dies_before_result=not is_written)
        with pytest.raises(Killed):
            tune(begin(folder, **config), machine)
        result = tune(resume(folder), machine)
        assert outcomes(result) == outcomes(expected)
        assert [r.comparison for r in result.rankings] == [r.comparison for r in expected.rankings]
        repeated = 0 if is_written else 1
        assert len(machine.launched) == len(whole.launched) + repeated


def test_stopping_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    config = {"study": {"trials": 8}}
    expected = tune(begin(tmp_path / "whole" / "r", **config), FakeMachine())
    machine = FakeMachine()
    stops: list[bool] = []

    def stop_in_the_fifth(request: TrialRequest) -> None:
        if len(machine.launched) == 5:
            stops.append(True)

    machine.on_launch = stop_in_the_fifth
    with pytest.raises(InterruptedByUserError, match="--resume"):
        tune(begin(tmp_path / "r", **config), machine, should_stop=lambda: bool(stops))
    stops.clear()
    machine.on_launch = lambda request: None
    seen = Watching()
    assert outcomes(tune(resume(tmp_path / "r"), machine, observer=seen)) == outcomes(expected)
    for number in range(1, 5):  # what was measured before is shown again
        assert sum(line.startswith(f"trial {number}: ") and "tokens/s" in line for line in seen.messages) == 1


def test_a_stop_does_not_wait_for_the_orders_of_the_studys_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"study": {"trials": 6}}
    expected = tune(begin(tmp_path / "whole" / "r", **config), FakeMachine())
    stops: list[bool] = []
    decode = Space.decode

    def decode_third(space: Space, source: Any, *, trial: int) -> Plan:
        if isinstance(source, TrialParams) and trial == 3:
            space._layout(source, space._shape(source))  # the study has these choices
            stops.append(True)
            stop_check()()  # as a search of orders does between its tasks
            raise AssertionError("the search of orders went on")
        return decode(space, source, trial=trial)

    machine = FakeMachine()
    monkeypatch.setattr(Space, "decode", decode_third)
    with pytest.raises(InterruptedByUserError, match="--resume"):
        tune(begin(tmp_path / "r", **config), machine, should_stop=lambda: bool(stops))
    monkeypatch.setattr(Space, "decode", decode)
    result = tune(resume(tmp_path / "r"), machine)
    assert outcomes(result) == outcomes(expected)
    assert [trial.number for trial in result.trials] == list(range(len(result.trials)))


def test_a_stop_does_not_wait_for_the_end_of_a_proposal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops: list[bool] = []

    def prepare(*args: object, **options: object) -> None:
        stops.append(True)
        stop_check()()  # as a search of orders does between its tasks
        raise AssertionError("the search of orders went on")

    monkeypatch.setattr(Proposer, "prepare", prepare)
    with pytest.raises(InterruptedByUserError, match="--resume"):
        tune(begin(tmp_path / "r"), FakeMachine(), should_stop=lambda: bool(stops))


def test_a_tuner_whose_run_was_taken_writes_nothing_more(tmp_path: Path) -> None:
    machine = FakeMachine()

    def fence() -> None:
        if len(machine.launched) >= 3:
            raise StorageError("held by another")

    with pytest.raises(StorageError, match="held by another"):
        tune(begin(tmp_path / "r"), machine, fence=fence)
    assert len(machine.launched) == 3


def test_the_baseline_is_measured_again_during_the_search_and_drift_counts(tmp_path: Path) -> None:
    machine, watching = FakeMachine(), Watching()
    own = machine.seconds
    machine.seconds = lambda plan: own(plan) * (1.5 if len(machine.launched) > 5 else 1.0)
    run = begin(tmp_path / "r", study={"trials": 9, "control": 3})
    result = tune(run, machine, observer=watching)
    assert [control.num_tried for control in result.drift_checks] == [3, 6]
    assert result.drift_checks[0].ratio == pytest.approx(1.0, abs=0.05)
    assert result.drift_checks[1].ratio == pytest.approx(1 / 1.5, abs=0.05)
    assert sum("the machine has changed" in line for line in watching.messages) == 1
    drifts = [trial.record.drift for trial in result.trials if trial.record.repeats is None]
    assert drifts == [1.0] * 7 + [result.drift_checks[1].ratio] * 3
    folders = [folder for folder, key in machine.launched if key is None and "round" not in folder]
    assert folders == ["000000", "000003", "000006"]
    for name in folders[1:]:  # the machine makes none
        (tmp_path / "r" / "control" / name).mkdir(parents=True)
    again = tune(resume(tmp_path / "r"), machine)
    assert again.drift_checks == result.drift_checks
    # What was measured counts, whatever the resumed run is asked for.
    for control in (0, 5):
        changed = resume(tmp_path / "r")
        study = changed.config.study.model_copy(update={"control": control})
        changed = replace(changed, config=changed.config.model_copy(update={"study": study}))
        assert tune(changed, machine).drift_checks[:2] == result.drift_checks
    assert tune(begin(tmp_path / "s", study={"trials": 4, "control": 0}), FakeMachine()).drift_checks == ()


def test_a_change_within_chance_is_said_and_the_first_measurement_stays(tmp_path: Path) -> None:
    machine, watching = FakeMachine(noise=0.2), Watching()
    steady = machine.seconds
    machine.seconds = lambda plan: steady(plan) * (1.6 if len(machine.launched) > 5 else 1.0)
    result = tune(begin(tmp_path / "r", study={"trials": 9, "control": 6}), machine, observer=watching)
    (check,) = result.drift_checks
    assert check.is_within_chance
    (line,) = [line for line in watching.messages if line.startswith("after 6 trials")]
    assert "inside the noise range" in line
    assert line.endswith("later trials are still compared with the first measurement")
    assert {trial.record.drift for trial in result.trials} == {1.0}
    assert read_history(tmp_path / "r").drift_checks == result.drift_checks


def test_what_is_measured_on_a_machine_that_has_slowed_down_is_compared_with_that(tmp_path: Path) -> None:
    """The same trials, values and limits as on the machine as it was, but for the noise of the control."""
    requests: list[TrialRequest] = []
    steady = FakeMachine(on_launch=requests.append, noise=0.0)
    slower = FakeMachine(on_launch=requests.append, noise=0.0)
    own = slower.seconds
    slower.seconds = lambda plan: own(plan) * (1.5 if len(slower.launched) > 4 else 1.0)
    study = {"trials": 8, "control": 3}
    trial = {"measure": 10}
    expected = tune(begin(tmp_path / "a" / "r", study=study, trial=trial), steady)
    limits = [one.slow_above_s for one in requests if one.folder.parent.name == "trials"]
    requests.clear()
    watching = Watching()
    found = tune(begin(tmp_path / "b" / "r", study=study, trial=trial), slower, observer=watching)
    for one, other in zip(expected.trials, found.trials, strict=True):
        assert one.plan.key == other.plan.key
        assert other.record.value == pytest.approx(one.record.value)
        assert one.record.iteration_s is not None
        assert other.record.iteration_s == pytest.approx(one.record.iteration_s / other.record.drift)
    drifted = [one.slow_above_s for one in requests if one.folder.parent.name == "trials"]
    for limit, before, later in zip(drifted[1:], limits[1:], found.trials[1:], strict=True):
        assert before is not None
        assert limit == pytest.approx(before / later.record.drift)
    shown = [
        re.match(r"trial (\d+): .* ([\d.]+)x as fast as the baseline", line) for line in watching.messages
    ]
    own_value = found.trials[0].record.value
    assert own_value is not None
    assert {int(one[1]): float(one[2]) for one in shown if one} == {
        one.number: pytest.approx(one.record.value / own_value, abs=0.006)
        for one in found.trials
        if one.record.value is not None and one.record.repeats is None
    }


def test_drift_within_what_launches_scatter_by_is_none() -> None:
    def is_within(ratio: float, *, noise: float) -> bool | None:
        return DriftMeasurement(num_tried=1, ratio=ratio, chance_limit=chance_limit(noise)).is_within_chance

    assert not is_within(0.85, noise=0.02)
    assert not is_within(1.2, noise=0.02)
    assert is_within(0.93, noise=0.0)
    assert is_within(0.75, noise=0.08)
    assert not is_within(0.65, noise=0.08)
    assert DriftMeasurement(num_tried=1, ratio=2.0).is_within_chance is None


def test_what_is_far_behind_the_best_is_cut_short(tmp_path: Path) -> None:
    """The limit is the time at which a plan would be two thirds as good as the best so far."""
    requests: list[TrialRequest] = []
    machine = FakeMachine(on_launch=requests.append, noise=0.0)
    run = begin(tmp_path / "r", search=SCALING, study={"trials": 8}, trial={"measure": 10})
    result = tune(run, machine)
    best = 0.0
    for trial in [one for one in result.trials if one.record.repeats is None]:
        request = next(one for one in requests if one.folder.name == f"{trial.number:06d}")
        if trial.number == 0:
            assert request.slow_above_s is None
        else:
            assert request.slow_above_s is not None
            assert trial.record.value is not None
            assert trial.record.iteration_s is not None
            at_limit = trial.record.value * trial.record.iteration_s / request.slow_above_s
            assert at_limit == pytest.approx(best / 1.5)
        best = max(best, trial.record.value or 0.0)
    assert all(one.slow_above_s is None for one in requests if "round" in one.folder.name)


def test_the_time_limit_keeps_the_final_rounds(tmp_path: Path) -> None:
    now = [0.0]
    machine = FakeMachine(wall_s=10.0)

    def advance(request: TrialRequest) -> None:
        now[0] += 10.0

    machine.on_launch = advance
    watching = Watching()
    run = begin(tmp_path / "r", study={"trials": 50, "rounds": 3, "top_k": 2})
    result = tune(run, machine, max_minutes=4.0, clock=lambda: now[0], observer=watching)
    assert now[0] <= 240.0
    assert result.rankings
    assert result.rankings[0].comparison.plan.num_launches >= 3
    assert any("decided after" in text for text in watching.messages)
    assert any("reserved for the final rounds" in text for text in watching.messages)


def test_events_are_one_object_a_line(tmp_path: Path) -> None:
    run = begin(tmp_path / "r", study={"trials": 4})
    tune(run, FakeMachine())
    with run.folder.events_file.open("a") as file:
        file.write('{"torn": ')
    tune(resume(tmp_path / "r"), FakeMachine())
    lines = run.folder.events_file.read_text().splitlines()
    torn = [line for line in lines if not line.endswith("}")]
    assert torn == ['{"torn": ']
    kinds = [json.loads(line)["kind"] for line in lines if line not in torn]
    assert kinds[0] == "begin"
    assert kinds[-1] == "end"
