"""The parity gate in trials: which plans are compared there, which apart and why, and what a resume keeps."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.receipt import read_receipt
from quartet_plugin.space.plan_space import baseline_plan
from quartet_plugin.trial.outcome import TOO_SHORT
from quartet_plugin.trial.request import Outcome, TrialRequest, TrialResult
from quartet_plugin.tuner.compared_trials import ComparedTrials, why_nothing_is_kept
from quartet_plugin.tuner.config import parse_config
from quartet_plugin.tuner.run_folder import create_run
from quartet_plugin.tuner.trial_backend import trial_weights
from tests.space.jobs import make_job, make_nodes
from tests.tuner.fakes import COMMAND, FakeMachine, Killed, Watching, resume, tune
from tests.tuner.fakes import begin_with_journal as begin
from tests.tuner.test_parity import (
    OF_EVERY_KIND,
    OURS,
    events,
    is_ours,
    kind_of,
    ours_differ,
    ours_is_faster,
    outcomes,
    zb_v_is_wrong,
)


def keeping(**options: Any) -> FakeMachine:
    """A machine whose trial 0 keeps its weights."""
    return FakeMachine(keeps_weights=True, **{"seconds": ours_is_faster, **options})


def test_every_plan_is_compared_in_its_trial_and_no_launch_is_made_for_it(tmp_path: Path) -> None:
    machine, requests = keeping(), dict[Path, TrialRequest]()
    machine.on_launch = lambda request: requests.update({request.folder: request})
    run = begin(tmp_path / "r", **OF_EVERY_KIND)
    result = tune(run, machine)
    assert machine.checked == []
    tried = [x for x in result.trials[1:] if x.record.repeats is None]
    assert len({kind_of(trial.plan) for trial in tried if is_ours(trial.plan)}) >= 3
    assert not all(is_ours(trial.plan) for trial in tried)
    assert {plan.key for plan in machine.compared} == {trial.plan.key for trial in tried}
    for trial in tried:
        folder = run.folder.parity / f"plan-{trial.plan.key[:12]}"
        assert read_receipt(folder / "plan.parity.json").plan_key == trial.plan.key
        request = requests[run.folder.trial(trial.number)]
        assert (request.num_compared, request.warmup) == (5, 5)
        assert request.weights == trial_weights(run.folder.parity_weights)
    baseline = requests[run.folder.trial(0)]
    assert (baseline.num_compared, baseline.weights, baseline.warmup) == (5, None, 6)
    # A GPU is warmed once: every later start follows other training.
    assert [folder for folder, asked in requests.items() if asked.device_warmup_s] == [run.folder.trial(0)]
    finals = [request for folder, request in requests.items() if folder.parent == run.folder.final]
    assert finals
    assert {(request.num_compared, request.warmup) for request in finals} == {(None, 1)}
    assert result.receipt is not None
    assert not run.folder.parity_weights.exists()


def test_the_commands_warm_up_follows_where_its_settings_were_set_aside(tmp_path: Path) -> None:
    machine, warmups = keeping(settings=("hidden_dropout",)), dict[Path, int]()
    machine.on_launch = lambda request: warmups.update({request.folder: request.warmup})
    run = begin(tmp_path / "r", trial={"warmup": 3}, **OURS)
    result = tune(run, machine)
    numbers = {x.number for x in result.trials[1:] if x.record.repeats is None}
    assert numbers
    assert {warmups[run.folder.trial(number)] for number in numbers} == {8}


def test_a_plan_that_fails_in_its_trial_is_never_measured(tmp_path: Path) -> None:
    machine, watching = keeping(gate=zb_v_is_wrong), Watching()
    run = begin(tmp_path / "r", **OURS)
    result = tune(run, machine, observer=watching)
    wrong = [trial for trial in result.trials if trial.plan.schedule.label == "zb-v"]
    assert {(trial.record.verdict, trial.record.outcome, trial.record.value) for trial in wrong} == {
        ("wrong", "WRONG", None)
    }
    assert [trial.record.repeats is None for trial in wrong] == [True] + [False] * (len(wrong) - 1)
    first = wrong[0]
    assert machine.disk[run.folder.trial(first.number)].iteration_s == ()
    assert machine.disk[run.folder.trial(first.number)].outcome is Outcome.WRONG
    assert [event["trial"] for event in events(run, "quarantine")] == [first.number]
    assert sum("zb-v (v) is excluded from the search" in line for line in watching.messages) == 1
    assert not any(f"trial {first.number}: your" in line for line in watching.messages)
    assert machine.checked == []
    again = keeping(gate=zb_v_is_wrong, disk=machine.disk)
    assert outcomes(tune(resume(tmp_path / "r"), again)) == outcomes(result)
    assert (again.launched, again.compared, again.checked) == ([], [], [])


def test_a_command_of_few_iterations_is_measured_all_the_same(tmp_path: Path) -> None:
    run, asked = begin(tmp_path / "r", **OURS), list[int | None]()

    class ShortMachine(FakeMachine):
        def _result(self, request: TrialRequest) -> TrialResult:
            result = super()._result(request)
            asked.append(request.num_compared)
            if request.num_compared is None:
                return result
            reason = f"rank 0 made 15 of 18 iterations; {TOO_SHORT}"
            return replace(result, outcome=Outcome.INFRA, reason=reason, iteration_s=())

    machine = ShortMachine(seconds=ours_is_faster)
    tune(run, machine)
    assert asked[:2] == [5, None]
    assert set(asked[1:]) == {None}
    assert machine.checked


def test_a_command_that_says_too_few_iterations_is_told_so(tmp_path: Path) -> None:
    machine, watching = keeping(), Watching()
    config = parse_config({"run": "r", **OURS}, where="test")
    run = create_run(tmp_path / "r", config=config, command=(*COMMAND, "--train-iters", "6"))
    tune(run, machine, observer=watching)
    assert machine.compared == []
    assert machine.checked
    words = (
        r"separate launches, because the command trains for 6 iterations, and a compared trial takes (\d+)"
    )
    (found,) = filter(None, (re.search(words, message) for message in watching.messages))
    assert int(found[1]) > 6


@pytest.mark.slow
@pytest.mark.parametrize("has_result", [True, False])
def test_a_killed_run_goes_on_and_compares_nothing_twice(tmp_path: Path, has_result: bool) -> None:
    expected = tune(begin(tmp_path / "whole" / "r", **OURS), whole := keeping(gate=zb_v_is_wrong))
    dies_at = next(at for at, (name, _) in enumerate(whole.launched) if name == "000002")
    killed = keeping(gate=zb_v_is_wrong, dies_at=dies_at, dies_before_result=not has_result)
    run = begin(tmp_path / "r", **OURS)
    with pytest.raises(Killed):
        tune(run, killed)
    # kill -9 leaves the weights; here the exception passed through the clean-up.
    baseline = killed.disk[run.folder.trial(0)]
    weights = trial_weights(run.folder.parity_weights)
    weights.mkdir(parents=True)
    (weights / "kept.json").write_text(json.dumps({"attempt_id": baseline.attempt_id, "schema_version": 1}))
    result = tune(resume(tmp_path / "r"), killed)
    assert outcomes(result) == outcomes(expected)
    assert killed.checked == []
    assert len(killed.compared) == len({plan.key for plan in killed.compared}) == len(whole.compared)
    assert not run.folder.parity_weights.exists()


def test_weights_that_are_gone_are_noticed(tmp_path: Path) -> None:
    machine, watching = keeping(), Watching()
    run = begin(tmp_path / "r", **OF_EVERY_KIND)

    def gate(plan: Plan) -> bool:
        shutil.rmtree(run.folder.parity_weights)
        machine.gate = lambda plan: True
        return True

    machine.gate = gate
    result = tune(run, machine, observer=watching)
    assert len(machine.compared) == 1
    kinds = {kind_of(x.plan) for x in result.trials if is_ours(x.plan)}
    assert len(kinds) > 1
    assert {kind_of(plan) for plan in (*machine.checked, *machine.compared)} >= kinds
    assert (
        sum(
            "separate launches, because the weights that trial 0 stored are missing" in x
            for x in watching.messages
        )
        == 1
    )


def test_a_run_that_is_resumed_without_its_weights_checks_apart(tmp_path: Path) -> None:
    machine = keeping(dies_at=1)
    run = begin(tmp_path / "r", **OURS)
    with pytest.raises(Killed):
        tune(run, machine)
    assert not run.folder.parity_weights.exists()
    result = tune(resume(tmp_path / "r"), machine)
    assert machine.compared == []
    assert machine.checked
    assert result.receipt is not None


def test_weights_of_another_attempt_are_not_used(tmp_path: Path) -> None:
    machine = keeping(dies_at=1)
    run = begin(tmp_path / "r", **OURS)
    with pytest.raises(Killed):
        tune(run, machine)
    weights = trial_weights(run.folder.parity_weights)
    weights.mkdir(parents=True)
    (weights / "kept.json").write_text(json.dumps({"attempt_id": "f" * 32, "schema_version": 1}))
    tune(resume(tmp_path / "r"), machine)
    assert machine.compared == []


def test_slow_weights_are_read_once(tmp_path: Path) -> None:
    machine, watching = keeping(weights_s=1e6), Watching()
    tune(begin(tmp_path / "r", **OF_EVERY_KIND), machine, observer=watching)
    assert len(machine.compared) == 1
    assert machine.checked
    assert any("reading the weights takes 1e+06 s" in line for line in watching.messages)


def test_trial_0_that_fails_while_it_keeps_its_weights_is_launched_without(tmp_path: Path) -> None:
    run, watching = begin(tmp_path / "r", **OURS), Watching()
    asked: list[bool] = []
    machine = FakeMachine(seconds=ours_is_faster)

    def on_launch(request: TrialRequest) -> None:
        if request.plan is None and "round" not in request.folder.name and len(asked) < 2:
            asked.append(request.save_weights is not None)
            if request.save_weights is not None:
                request.save_weights.mkdir(parents=True)

    machine.on_launch = on_launch
    machine.outcome = lambda plan: Outcome.INFRA if len(asked) == 1 else Outcome.OK
    tune(run, machine, observer=watching)
    assert asked == [True, False]
    assert any("launched again and stores no weights" in line for line in watching.messages)
    assert machine.checked


def stock_is_wrong(plan: Plan) -> bool:
    """No plan of stock with another split than the command's passes."""
    return is_ours(plan) or len(set(plan.split.transformer_layers_per_stage)) == 1


def test_a_stock_plan_that_trains_otherwise_is_never_measured_and_others_of_its_schedule_are(
    tmp_path: Path,
) -> None:
    machine, watching = keeping(gate=stock_is_wrong, seconds=ours_differ), Watching()
    run = begin(tmp_path / "r", study={"trials": 12})
    result = tune(run, machine, observer=watching)
    stock = [x for x in result.trials[1:] if not is_ours(x.plan) and x.record.repeats is None]
    same_shape = [x for x in stock if x.plan.shape == x.plan.made_for.shape]
    wrong = [x for x in same_shape if not stock_is_wrong(x.plan)]
    assert len(wrong) > 1
    assert {(x.record.verdict, x.record.outcome, x.record.value) for x in wrong} == {("wrong", "WRONG", None)}
    assert {x.record.verdict for x in same_shape if stock_is_wrong(x.plan)} <= {"measured"}
    assert machine.checked == []
    assert not events(run, "quarantine")


def test_a_stock_plan_that_may_change_the_objective_is_not_compared(tmp_path: Path) -> None:
    stock = baseline_plan(make_job(), nodes=make_nodes(2), run="r", seed=0)
    (tmp_path / "kept.json").write_text(json.dumps({"attempt_id": "a" * 32, "schema_version": 1}))
    kept = ComparedTrials(
        weights=tmp_path, attempt_id="a" * 32, start_s=5.0, iterations_s=2.0, layout=stock.layout
    )
    layout = replace(stock.layout, micro_batch_size=2 * stock.layout.micro_batch_size)
    made_for = replace(stock.made_for, batching_features=("moe_aux_loss",))
    assert kept.start_of(stock) is not None
    assert kept.start_of(replace(stock, layout=layout)) is not None
    assert kept.start_of(replace(stock, made_for=made_for)) is not None
    assert kept.start_of(replace(stock, made_for=made_for, layout=layout)) is None


@pytest.fixture
def custom(tmp_path: Path) -> Plan:
    """A plan with a custom schedule."""
    result = tune(begin(tmp_path / "search" / "r", **OURS), FakeMachine(seconds=ours_is_faster))
    return next(trial.plan for trial in result.trials if is_ours(trial.plan))


def test_where_a_plan_is_checked_and_why(tmp_path: Path, custom: Plan) -> None:
    weights = tmp_path / "weights"
    kept = ComparedTrials(weights=weights, attempt_id="a" * 32, start_s=5.0, iterations_s=2.0)
    assert kept.why_apart(custom) == "the weights that trial 0 stored are missing"
    weights.mkdir()
    (weights / "kept.json").write_text(json.dumps({"attempt_id": "a" * 32, "schema_version": 1}))
    assert kept.why_apart(custom) is None
    start = kept.start_of(custom)
    assert start is not None
    assert (start.weights, start.num_steps, start.num_warmup(2), start.num_warmup(7)) == (weights, 5, 5, 7)
    wider = replace(custom, shape=replace(custom.shape, ffn_hidden_size=custom.shape.ffn_hidden_size + 8))
    assert kept.why_apart(wider) == "the plan's model has another shape than the stored weights"
    assert kept.start_of(wider) is None
    sharded = replace(custom, layout=custom.layout.with_setting("use_megatron_fsdp", True))
    assert "fsdp_dtensor checkpoints load only with Megatron-FSDP on" in str(kept.why_apart(sharded))
    assert kept.start_of(sharded) is None
    assert kept.why_apart(custom, has_depth_proxy=True) == "a depth proxy is measured first"
    assert replace(kept, load_s=4.0).why_apart(custom) is None
    assert "reading the weights takes 6 s" in str(replace(kept, load_s=6.0).why_apart(custom))
    assert replace(kept, reason="trials run in parallel").why_apart(custom) == "trials run in parallel"
    dropout = replace(kept, settings=("hidden_dropout",)).start_of(custom)
    assert dropout is not None
    assert dropout.num_warmup(2) == 7


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("torchrun", "train.py"), None),
        (("deepspeed", "train.py"), "DeepSpeed"),
        (("torchrun", "train.py", "--use-megatron-fsdp"), "--use-megatron-fsdp"),
        # Its stages are its own, and its weights load under any degrees.
        (("torchrun", "train.py", "--hybrid-layer-pattern", "*-*-"), None),
    ],
)
def test_when_trial_0_keeps_its_weights(words: tuple[str, ...], reason: str | None) -> None:
    why = why_nothing_is_kept(parse_command(words, environment={}))
    assert (why is None) if reason is None else (why is not None and reason in why)


def test_the_study_is_the_same_wherever_plans_are_checked(tmp_path: Path) -> None:
    inside = tune(begin(tmp_path / "a" / "r", **OURS), keeping(seconds=ours_differ))
    apart = tune(begin(tmp_path / "b" / "r", **OURS), FakeMachine(seconds=ours_differ))
    assert outcomes(inside) == outcomes(apart)
