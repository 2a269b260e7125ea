"""The parity gate in a study: before the first timing of a kind, before a win, and never twice."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import (
    InfeasibleError,
    InfrastructureError,
    InterruptedByUserError,
    PlanError,
    SeamError,
)
from quartet_plugin.model.plan import Plan, read_plan
from quartet_plugin.model.receipt import needs_receipt, receipt_path, require_receipt
from quartet_plugin.schedule.placement import PlacementKind
from quartet_plugin.trial.parity import ParityUnavailableError
from quartet_plugin.trial.request import Outcome
from quartet_plugin.tuner.parity import ParityKind, kind_of_plan
from quartet_plugin.tuner.run_folder import TuningRun
from quartet_plugin.tuner.tune_result import TuneResult, write_best
from tests.space.jobs import make_job
from tests.tuner.fakes import FakeMachine, Killed, Watching, by_formula, resume, tune
from tests.tuner.fakes import begin_with_journal as begin

OURS: dict[str, Any] = {
    "search": {"pipeline_parallel": 2, "mapping": "stock", "schedule": ["1f1b", "zb-h1", "zb-v", "v-half"]},
    "study": {"trials": 12, "rounds": 3, "top_k": 2},
}
# The sampler alone tries schedules of every kind.
OF_EVERY_KIND: dict[str, Any] = {**OURS, "study": {**OURS["study"], "starts": "none"}}


def kind_of(plan: Plan) -> ParityKind:
    return kind_of_plan(plan, features=make_job().features)


def kind_of_any(plan: Plan) -> ParityKind | None:
    return kind_of(plan) if is_ours(plan) else None


def is_ours(plan: Plan) -> bool:
    return plan.schedule.custom is not None


def ours_is_faster(plan: Plan) -> float:
    return by_formula(plan) * (0.5 if is_ours(plan) else 1.0)


def ours_differ(plan: Plan) -> float:
    """By chance, so that the best of a kind need not be the one that was checked first."""
    by_chance = 0.4 + 0.2 * int(plan.key[:4], 16) / 65535
    return by_formula(plan) * (by_chance if is_ours(plan) else 1.0)


def zb_v_is_wrong(plan: Plan) -> bool:
    return plan.schedule.label != "zb-v"


def outcomes(result: TuneResult) -> list[tuple[Any, ...]]:
    return [
        (trial.number, trial.plan.key, trial.record.verdict, trial.record.value, trial.record.repeats)
        for trial in result.trials
    ]


def events(run: TuningRun, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.folder.events_file.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_a_kind_names_its_tensor_partition() -> None:
    kind = ParityKind(family="1f1b", placement=PlacementKind.LINEAR, features=frozenset({"tensor_parallel"}))
    assert kind.label == "1f1b (linear)"
    cut = replace(kind, features=kind.features | {"partition_attention rings, mlp grid"})
    assert cut.label == "1f1b (linear) with partition attention rings, mlp grid"


def test_a_kind_is_checked_once_before_its_first_timing_and_a_plan_before_it_wins(tmp_path: Path) -> None:
    machine = FakeMachine(seconds=ours_is_faster)
    run = begin(tmp_path / "r", **OF_EVERY_KIND)
    order: list[tuple[str, str]] = []
    machine.on_launch = lambda request: order.append(
        ("final" if "round" in request.folder.name else "timed", request.plan_key or "")
    )
    passes = machine.gate

    def gate(plan: Plan) -> bool:
        order.append(("checked", plan.key))
        return passes(plan)

    machine.gate = gate
    result = tune(run, machine)
    in_search = [r.plan for r in result.trials if is_ours(r.plan) and r.record.repeats is None]
    assert len({kind_of(plan) for plan in in_search}) >= 3
    for kind in {kind_of(plan) for plan in in_search}:
        first = next(plan for plan in in_search if kind_of(plan) == kind)
        at = order.index(("checked", first.key))
        assert order.index(("timed", first.key)) > at
        siblings = {plan.key for plan in in_search if kind_of(plan) == kind}
        assert all(("timed", key) not in order[:at] for key in siblings)
    assert result.winner is not None
    winner = result.winner.trial.plan
    assert is_ours(winner)
    final = next(at for at, (what, _) in enumerate(order) if what == "final")
    assert ("checked", winner.key) in order[:final]
    assert len(machine.checked) == len({plan.key for plan in machine.checked})
    assert not run.folder.parity_weights.exists()


def test_the_winners_receipt_lets_it_train_at_once(tmp_path: Path) -> None:
    run = begin(tmp_path / "r", **OURS)
    result = tune(run, FakeMachine(seconds=ours_is_faster))
    plan = write_best(result, run=run)
    assert plan is not None
    assert needs_receipt(plan)
    receipt = require_receipt(read_plan(run.folder.best_plan), path=run.folder.best_plan, torch_version=None)
    assert receipt.plan_digest == plan.digest
    slower = FakeMachine(seconds=lambda plan: by_formula(plan) * (2.0 if is_ours(plan) else 1.0))
    stock = tune(begin(tmp_path / "s", **OURS), slower)
    assert stock.receipt is None
    write_best(stock, run=run)
    assert not receipt_path(run.folder.best_plan).exists()


def test_what_fails_is_quarantined_and_the_study_goes_on(tmp_path: Path) -> None:
    machine, watching = FakeMachine(seconds=ours_is_faster, gate=zb_v_is_wrong), Watching()
    run = begin(tmp_path / "r", **OURS)
    result = tune(run, machine, observer=watching)
    wrong = [trial for trial in result.trials if trial.plan.schedule.label == "zb-v"]
    assert wrong
    assert {trial.record.verdict for trial in wrong} == {"wrong"}
    assert all(trial.record.value is None for trial in wrong)
    assert [trial.record.repeats is None for trial in wrong] == [True] + [False] * (len(wrong) - 1)
    assert {trial.record.repeats for trial in wrong[1:]} <= {wrong[0].number}
    keys = {trial.plan.key for trial in wrong}
    assert not keys & {key for _, key in machine.launched}
    assert sum(plan.schedule.label == "zb-v" for plan in machine.checked) == 1
    assert len([r for r in result.trials[1:] if r.record.repeats is None]) == 12
    assert [event["trial"] for event in events(run, "quarantine")] == [wrong[0].number]
    words = "zb-v (v) is excluded from the search: it does not train as stock does"
    assert sum(words in line for line in watching.messages) == 1
    assert result.winner is not None
    assert result.winner.trial.plan.schedule.label != "zb-v"


def test_a_leader_that_fails_by_itself_cannot_win(tmp_path: Path) -> None:
    """Its kind passed with another plan."""
    seen: set[ParityKind] = set()

    def gate(plan: Plan) -> bool:
        is_first = kind_of(plan) not in seen
        seen.add(kind_of(plan))
        return is_first

    machine, watching = FakeMachine(seconds=ours_differ, gate=gate), Watching()
    result = tune(begin(tmp_path / "r", **OURS), machine, observer=watching)
    first = {kind_of(plan): plan.key for plan in reversed(machine.checked)}
    failed = [plan for plan in machine.checked if first[kind_of(plan)] != plan.key]
    assert failed
    out = [line for line in watching.messages if " is not a finalist: " in line]
    assert any("does not train as stock does" in line for line in out)
    assert result.winner is None or kind_of_any(result.winner.trial.plan) not in {*map(kind_of, failed)}


def test_a_trial_that_diverges_quarantines_its_kind(tmp_path: Path) -> None:
    def outcome(plan: Plan) -> Outcome:
        return Outcome.WRONG if plan.schedule.label == "zb-h1" else Outcome.OK

    machine = FakeMachine(outcome=outcome)
    run = begin(tmp_path / "r", **OF_EVERY_KIND)
    result = tune(run, machine)
    diverged = [trial for trial in result.trials if trial.plan.schedule.label == "zb-h1"]
    assert {trial.record.verdict for trial in diverged} == {"wrong"}
    launched = {key for _, key in machine.launched}
    assert sum(trial.plan.key in launched for trial in diverged) == 1
    again = tune(resume(tmp_path / "r"), machine)
    assert outcomes(again) == outcomes(result)


@pytest.mark.parametrize(
    ("error", "verdict", "is_spent"),
    [
        (InfeasibleError("parity: the plan does not run: out of memory"), "infeasible", True),
        (PlanError("parity: the plan does not run: refused"), "infeasible", True),
        (ParityUnavailableError("parity: stock does not run"), "infeasible", False),
    ],
)
def test_a_check_that_says_nothing_does_not_stop_the_study(
    tmp_path: Path, error: Exception, verdict: str, is_spent: bool
) -> None:
    def gate(plan: Plan) -> bool:
        raise error

    machine = FakeMachine(gate=gate)
    result = tune(begin(tmp_path / "r", **OURS), machine)
    own = [trial for trial in result.trials if is_ours(trial.plan)]
    assert own
    assert {trial.record.verdict for trial in own} == {verdict}
    assert not {trial.plan.key for trial in own} & {key for _, key in machine.launched}
    assert any(trial.record.repeats is None for trial in own) == is_spent
    assert len(machine.checked) == 1 or is_spent
    assert any(trial.record.verdict == "measured" for trial in result.trials[1:])


def test_a_check_that_was_broken_is_infrastructure(tmp_path: Path) -> None:
    def gate(plan: Plan) -> bool:
        raise InfrastructureError("parity: the plan's run failed")

    config = {**OURS, "search": {**OURS["search"], "schedule": ["zb-h1", "zb-v"]}}
    with pytest.raises(InfrastructureError, match="3 trials in a row could not run"):
        tune(begin(tmp_path / "r", **config), FakeMachine(gate=gate))


def test_a_seam_that_changed_stops_the_study(tmp_path: Path) -> None:
    def gate(plan: Plan) -> bool:
        raise SeamError("changed")

    run = begin(tmp_path / "r", **OURS)
    with pytest.raises(SeamError):
        tune(run, FakeMachine(gate=gate))
    assert not run.folder.parity_weights.exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_failing", [False, True])
def test_killed_in_a_check_the_run_resumes_exactly(tmp_path: Path, is_failing: bool) -> None:
    def machine(**options: Any) -> FakeMachine:
        gate = zb_v_is_wrong if is_failing else lambda plan: True
        return FakeMachine(seconds=ours_differ, gate=gate, **options)

    whole = machine()
    expected = tune(begin(tmp_path / "whole" / "r", **OF_EVERY_KIND), whole)
    assert len(whole.checked) >= 4
    for dies_in in range(len(whole.checked)):
        folder = tmp_path / f"{dies_in}" / "r"
        killed = machine(dies_in_check=dies_in)
        with pytest.raises(Killed):
            tune(begin(folder, **OF_EVERY_KIND), killed)
        # kill -9 leaves them; here the exception passed through the clean-up.
        weights = folder / "parity" / "weights"
        weights.mkdir(parents=True, exist_ok=True)
        (weights / "torn").write_bytes(b"half")
        result = tune(resume(folder), killed)
        assert outcomes(result) == outcomes(expected)
        assert [r.comparison for r in result.rankings] == [r.comparison for r in expected.rankings]
        assert [plan.key for plan in killed.checked] == [
            plan.key for at, plan in enumerate(whole.checked) for _ in range(2 if at == dies_in else 1)
        ]
        assert not weights.exists()
        assert not list(folder.rglob("*.tmp"))


def test_a_finished_run_checks_nothing_again(tmp_path: Path) -> None:
    machine = FakeMachine(seconds=ours_is_faster, gate=zb_v_is_wrong)
    first = tune(begin(tmp_path / "r", **OURS), machine)
    count = len(machine.checked)
    again = tune(resume(tmp_path / "r"), machine)
    assert outcomes(again) == outcomes(first)
    assert len(machine.checked) == count
    assert again.receipt == first.receipt is not None


def test_a_torn_receipt_is_made_again(tmp_path: Path) -> None:
    machine = FakeMachine(seconds=ours_is_faster)
    run = begin(tmp_path / "r", **OURS)
    first = tune(run, machine)
    assert first.winner is not None
    key = first.winner.trial.plan.key
    (run.folder.parity / f"plan-{key[:12]}" / "plan.parity.json").write_text('{"schema_version": 1, "pl')
    count = len(machine.checked)
    again = tune(resume(tmp_path / "r"), machine)
    assert [plan.key for plan in machine.checked[count:]] == [key]
    assert again.receipt is not None


def test_other_versions_are_checked_again(tmp_path: Path) -> None:
    machine = FakeMachine(seconds=ours_is_faster)
    first = tune(begin(tmp_path / "r", **OURS), machine)
    assert first.receipt is not None
    count = len(machine.checked)
    machine.job = replace(machine.job, torch_version="2.12.0")
    machine.disk = {
        folder: result
        if result.job is None
        else replace(result, job={**result.job, "torch_version": "2.12.0"})
        for folder, result in machine.disk.items()
    }
    again = tune(resume(tmp_path / "r"), machine)
    assert len(machine.checked) > count
    assert again.receipt is not None
    assert again.receipt.versions.torch_version == "2.12.0"


def test_ctrl_c_in_a_check_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    expected = tune(begin(tmp_path / "whole" / "r", **OURS), FakeMachine(seconds=ours_is_faster))
    machine = FakeMachine(seconds=ours_is_faster)
    stops: list[bool] = []

    def gate(plan: Plan) -> bool:
        if len(machine.checked) == 2 and not stops:
            stops.append(True)
            raise InterruptedByUserError("stopped in a parity check")
        return True

    machine.gate = gate
    run = begin(tmp_path / "r", **OURS)
    with pytest.raises(InterruptedByUserError):
        tune(run, machine)
    assert not run.folder.parity_weights.exists()
    assert events(run, "interrupted")
    assert outcomes(tune(resume(tmp_path / "r"), machine)) == outcomes(expected)
