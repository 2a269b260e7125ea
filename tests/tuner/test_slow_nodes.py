"""A node that becomes slow during a search is found, looked at twice, named, and given less work."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.model.plan import Plan
from tests.calibration.truth import Truth
from tests.space.jobs import make_job, make_nodes
from tests.tuner.fakes import FakeMachine, Killed, Watching, begin_with_journal, outcome, resume, tune

# Accelerators of one kind: the prior says that they are alike, so trials alone teach a slow one late.
NODES = tuple(replace(node, node_class="NVIDIA H100 80GB HBM3 x1") for node in make_nodes(1, 1))
SLOW = {"node-1": 1.8}
SEARCH = {"pipeline_parallel": 2, "virtual_stages": 1, "schedule": "1f1b", "micro_batch_size": 4}


def machine_that_is_slow(when: Callable[[int], bool], **options: Any) -> FakeMachine:
    """Two nodes of one slot, the second of which takes 1.8 times as long in the launches of `when`."""
    healthy, slow = Truth(NODES), Truth(NODES, slowdowns=(1.0, 1.8))

    def seconds(plan: Plan) -> float:
        return (slow if when(len(machine.launched) - 1) else healthy)(plan)

    def slow_nodes(launch: int) -> Mapping[str, float]:
        return SLOW if when(launch) else {}

    machine = FakeMachine(
        job=make_job(), cluster=NODES, seconds=seconds, slow_nodes=slow_nodes, noise=0.003, **options
    )
    return machine


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "r" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def layers_on_the_slow_node(plan: Plan) -> int:
    stage = [slot.node for slot in plan.mapping.slots].index(1)
    return plan.split.transformer_layers_per_stage[stage]


def test_a_node_made_slow_in_the_middle_is_found_named_and_given_the_light_stage(tmp_path: Path) -> None:
    machine, watching = machine_that_is_slow(lambda launch: launch >= 4), Watching()
    run = begin_with_journal(tmp_path / "r", search=SEARCH, study={"trials": 7, "control": 100})
    result = tune(run, machine, observer=watching)
    named = [line for line in watching.messages if line.startswith("node ")]
    assert len(named) == 1
    words = "node node-1 is slow: its computations take 1.80x the time of the other nodes', in two launches"
    assert words in named[0]
    (suspect,) = events(tmp_path, "node-suspect")
    assert (suspect["node"], suspect["launch"], suspect["factor"]) == ("node-1", "4", 1.8)
    (confirmed,) = events(tmp_path, "node-speed")
    assert (confirmed["node"], confirmed["launch"]) == ("node-1", "0 again")
    # The second look is the user's command at once, before the next trial.
    assert [folder for folder, _ in machine.launched[4:6]] == ["000004", "000004"]
    slowdowns = [trial.record.node_slowdowns for trial in result.trials if trial.record.repeats is None]
    assert slowdowns[:4] == [None] * 4
    assert slowdowns[4:] == [pytest.approx(SLOW)] * len(slowdowns[4:])
    after = next(trial for trial in result.trials if trial.number == 5)
    assert after.record.predicted_s is not None
    assert layers_on_the_slow_node(after.plan) < 4
    # The plan that is the best now was measured before: then it was slower than the user's command.
    assert result.winner is not None
    best = result.winner.trial
    assert layers_on_the_slow_node(best.plan) < 4
    slow = Truth(NODES, slowdowns=(1.0, 1.8))
    assert slow(best.plan) == min(slow(trial.plan) for trial in result.trials)
    own_value = result.trials[0].record.value
    assert best.number < 4
    assert own_value is not None
    assert best.record.value is not None
    assert best.record.value < own_value


def test_trials_before_and_after_are_predicted_as_on_one_machine(tmp_path: Path) -> None:
    """Predictions are of the machine at its first speed; the slow node is in them all the same."""
    machine = machine_that_is_slow(lambda launch: launch >= 4)
    run = begin_with_journal(tmp_path / "r", search=SEARCH, study={"trials": 8, "control": 100})
    result = tune(run, machine)
    later = [trial.record for trial in result.trials if trial.number > 5 and trial.record.repeats is None]
    assert later
    for record in later:
        assert record.iteration_s is not None
        assert record.predicted_s == pytest.approx(record.iteration_s * record.drift, rel=0.05)


def test_one_slow_launch_makes_no_slow_node(tmp_path: Path) -> None:
    machine, watching = machine_that_is_slow(lambda launch: launch == 4), Watching()
    run = begin_with_journal(tmp_path / "r", search=SEARCH, study={"trials": 6, "control": 100})
    tune(run, machine, observer=watching)
    assert [event["factor"] for event in events(tmp_path, "node-suspect")] == [1.8]
    assert not events(tmp_path, "node-speed")
    assert not any(line.startswith("node ") for line in watching.messages)


def test_a_node_that_was_always_a_little_slower_does_not_hide_that_it_became_slow(tmp_path: Path) -> None:
    machine = machine_that_is_slow(lambda launch: launch >= 4)
    machine.slow_nodes = lambda launch: {"node-1": 1.5 if launch >= 4 else 1.1}
    tune(begin_with_journal(tmp_path / "r", search=SEARCH, study={"trials": 6, "control": 100}), machine)
    assert [event["factor"] for event in events(tmp_path, "node-speed")] == [1.5]


def test_a_node_whose_speed_scatters_is_not_slow(tmp_path: Path) -> None:
    """From launch to launch it takes as long as the other one, or up to 1.25 times as long."""
    machine = machine_that_is_slow(lambda launch: False)
    machine.slow_nodes = lambda launch: {"node-1": 1.25 if launch == 5 else (1.07, 1.0, 1.14)[launch % 3]}
    tune(begin_with_journal(tmp_path / "r", search=SEARCH, study={"trials": 6, "control": 100}), machine)
    assert [event["factor"] for event in events(tmp_path, "node-suspect")] == []


def test_a_search_on_noisy_nodes_looks_twice_only_a_few_times(tmp_path: Path) -> None:
    """Three trials see a slow node, and what follows them does not."""
    slow = (1, 4, 7)
    machine = machine_that_is_slow(lambda launch: launch in slow)
    run = begin_with_journal(tmp_path / "r", search=SEARCH, study={"trials": 6, "control": 100})
    result = tune(run, machine)
    launches = events(tmp_path, "launch")
    assert [launches[index]["stage"] for index in slow] == ["search"] * 3
    suspects = [event["launch"] for event in events(tmp_path, "node-suspect")]
    assert suspects == [str(launches[index]["trial"]) for index in slow]
    assert [check.num_tried for check in result.drift_checks] == [1, 3]
    assert not events(tmp_path, "node-speed")


def test_a_node_that_is_mended_is_told(tmp_path: Path) -> None:
    machine, watching = machine_that_is_slow(lambda launch: 2 <= launch < 6), Watching()
    run = begin_with_journal(tmp_path / "r", search=SEARCH, study={"trials": 7, "control": 100})
    tune(run, machine, observer=watching)
    named = [line for line in watching.messages if line.startswith("node ")]
    assert len(named) == 2
    assert named[1] == "node node-1 computes as fast as the others again"
    assert [event["factor"] for event in events(tmp_path, "node-speed")] == [1.8, 1.0]


def test_without_drift_checks_the_next_trial_is_the_second_look(tmp_path: Path) -> None:
    machine = machine_that_is_slow(lambda launch: launch >= 3)
    run = begin_with_journal(tmp_path / "r", search=SEARCH, study={"trials": 5, "control": 0})
    result = tune(run, machine)
    assert result.drift_checks == ()
    assert [event["launch"] for event in events(tmp_path, "node-speed")] == ["4"]


@pytest.mark.parametrize(
    ("control", "dies_at"),
    [
        pytest.param(0, 6, id="after the second look of a trial"),
        pytest.param(3, 5, id="in the second look"),
        pytest.param(3, 6, id="after the second look"),
    ],
)
def test_a_resumed_search_knows_the_slow_node(control: int, dies_at: int, tmp_path: Path) -> None:
    study = {"trials": 7, "control": control}
    expected = tune(
        begin_with_journal(tmp_path / "a" / "r", search=SEARCH, study=study),
        machine_that_is_slow(lambda launch: launch >= 3),
    )
    machine = machine_that_is_slow(lambda launch: launch >= 3, dies_at=dies_at)
    with pytest.raises(Killed):
        tune(begin_with_journal(tmp_path / "b" / "r", search=SEARCH, study=study), machine)
    assert events(tmp_path / "b", "node-suspect")
    machine.dies_at = None
    machine.launched.pop()
    found = tune(resume(tmp_path / "b" / "r"), machine)
    assert outcome(found) == outcome(expected)
    assert found.drift_checks == expected.drift_checks
