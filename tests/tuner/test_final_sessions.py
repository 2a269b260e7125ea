"""Final rounds over several sessions of a run: what is compared was launched in one of them."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.model.measurement import Comparison
from quartet_plugin.model.plan import Plan
from quartet_plugin.trial.attempt import read_result
from quartet_plugin.trial.request import TrialRequest, TrialResult
from quartet_plugin.tuner.config import parse_config
from quartet_plugin.tuner.finalists import first_rounds_of
from quartet_plugin.tuner.history import read_history
from quartet_plugin.tuner.run_folder import TuningRun, resume_run
from quartet_plugin.tuner.tune_result import TuneResult
from tests.tuner.fakes import COMMAND, Killed, Watching, by_formula, tune
from tests.tuner.fakes import begin_with_journal as begin
from tests.tuner.run_folders import WritingMachine

FIRST = {"trials": 8, "rounds": 3, "top_k": 1, "storage": "journal"}
SECOND = {**FIRST, "top_k": 3}
SLOWDOWN = 1.5


class Machine(WritingMachine):
    """Makes the folder of a launch before it starts, as the runner does."""

    def run(self, request: TrialRequest, **options: Any) -> TrialResult:
        request.folder.mkdir(parents=True, exist_ok=True)
        return super().run(request, **options)


def rounds_on_disk(run: TuningRun) -> dict[int, set[int]]:
    return {number: {*rounds} for number, rounds in run.folder.final_launches().items()}


def resumed(folder: Path, study: Mapping[str, Any] = SECOND) -> TuningRun:
    config = parse_config({"run": "r", "study": {**study}}, where="test")
    return resume_run(folder, config=config, command=COMMAND)


def compared(result: TuneResult) -> dict[int, tuple[int | None, Comparison]]:
    return {each.trial.number: (each.proven_after, each.comparison) for each in result.rankings}


def session_one(folder: Path) -> tuple[Machine, TuneResult]:
    """A run with one finalist, on a machine that is slower from now on."""
    machine = Machine(noise=0.002)
    result = tune(begin(folder, study=FIRST), machine)
    machine.seconds = lambda plan: SLOWDOWN * by_formula(plan)
    return machine, result


def true_speedup(result: TuneResult, plan: Plan) -> float:
    return by_formula(result.baseline) / by_formula(plan)


def test_new_finalists_are_compared_with_the_baseline_of_their_own_session(tmp_path: Path) -> None:
    machine, first = session_one(tmp_path / "r")
    (old,) = (each.trial.number for each in first.rankings)
    before = rounds_on_disk(resumed(tmp_path / "r"))
    num_begun = 1 + max(before[0])
    num_launched, watching = len(machine.launched), Watching()
    run = resumed(tmp_path / "r")
    second = tune(run, machine, observer=watching)
    after = rounds_on_disk(run)
    new = set(after) - {0, old}
    assert len(new) == 2
    for number in new:
        assert min(after[number]) == num_begun
        assert after[number] <= after[0]
    assert before[0] < after[0]
    assert before[old] <= after[old]
    assert len(machine.launched) - num_launched == sum(
        len(rounds - before.get(number, set())) for number, rounds in after.items()
    )
    rankings = {each.trial.number: each for each in second.rankings}
    assert new <= set(rankings)
    for ranking in rankings.values():
        true = true_speedup(second, ranking.trial.plan)
        assert ranking.comparison.speedup.median == pytest.approx(true, rel=0.02)
    assert before[old] <= set(rankings[old].rounds)
    assert any("new in the final rounds: trial " in text for text in watching.messages)
    history = read_history(tmp_path / "r")
    assert [each.number for each in history.finalists] == [each.trial.number for each in second.rankings]


@pytest.mark.parametrize("dies_after", [0, 1, 4])
@pytest.mark.parametrize("is_written", [False, True])
def test_killed_in_the_rounds_of_new_finalists_it_goes_on_with_them(
    tmp_path: Path, dies_after: int, is_written: bool
) -> None:
    machine, _ = session_one(tmp_path / "whole")
    run = resumed(tmp_path / "whole")
    whole = tune(run, machine)
    names = [name for name, _ in machine.launched]
    machine, _ = session_one(tmp_path / "r")
    machine.dies_at = dies_at = len(machine.launched) + dies_after
    machine.dies_before_result = not is_written
    with pytest.raises(Killed):
        tune(resumed(tmp_path / "r"), machine)
    machine.dies_at = None
    again = resumed(tmp_path / "r")
    assert compared(tune(again, machine)) == compared(whole)
    assert rounds_on_disk(again) == rounds_on_disk(run)
    launched = [name for name, _ in machine.launched]
    assert set(launched) == set(names)
    ending = launched[dies_at].removeprefix(launched[dies_at].partition("-round-")[0])
    num_begun = sum(name.endswith(ending) for name in launched[: dies_at + 1])
    is_whole = is_written and num_begun == sum(name.endswith(ending) for name in names)
    assert len(launched) == len(names) + (0 if is_whole else num_begun)


def slowed(plan: Plan, *, factor: float) -> float:
    return factor * by_formula(plan)


def dies_in_second_round(machine: Machine) -> Callable[[TrialRequest], None]:
    """Two launches of the round are measured, the third is killed."""
    num_before = len(machine.launched)

    def die(request: TrialRequest) -> None:
        names = [name for name, _ in machine.launched[num_before:]]
        if sum(name.endswith("-round-2") for name in names) == 3:
            raise Killed

    return die


@pytest.mark.parametrize("num_kills", [1, 2])
def test_only_launches_of_one_session_are_compared_in_a_round(tmp_path: Path, num_kills: int) -> None:
    """The machine is slower whenever the run is resumed."""
    machine, watching = Machine(noise=0.002), Watching()
    run = begin(tmp_path / "r", study=SECOND)
    for kill in range(num_kills):
        machine.on_launch = dies_in_second_round(machine)
        with pytest.raises(Killed):
            tune(run, machine)
        machine.seconds = partial(slowed, factor=SLOWDOWN ** (kill + 1))
        run = resumed(tmp_path / "r")
    machine.on_launch = lambda request: None
    result = tune(run, machine, observer=watching)
    assert len(result.rankings) == 3
    for ranking in result.rankings:
        true = true_speedup(result, ranking.trial.plan)
        assert ranking.comparison.round_ratios == pytest.approx([true] * len(ranking.rounds), rel=0.02)
        assert ranking.rounds[:2] == (0, 1)
    ratios = {each.trial.number: each.comparison.round_ratios for each in result.rankings}
    for finalist in read_history(tmp_path / "r").finalists:
        assert finalist.comparison.round_ratios == pytest.approx(ratios.pop(finalist.number))
    assert not ratios
    results = [read_result(path) for path in run.folder.final.glob("*-round-2/attempt-*")]
    measured = [each for each in results if each is not None and each.iteration_s]
    assert Counter(each.is_superseded for each in measured) == {True: 2 * num_kills, False: 4}
    assert sum("final round 2 was interrupted" in text for text in watching.messages) == 1


def test_a_run_without_new_finalists_launches_nothing(tmp_path: Path) -> None:
    machine, first = session_one(tmp_path / "r")
    num_launched = len(machine.launched)
    again = tune(resumed(tmp_path / "r", FIRST), machine)
    assert compared(again) == compared(first)
    second = tune(resumed(tmp_path / "r"), machine)
    num_with_new = len(machine.launched)
    assert num_with_new > num_launched
    assert compared(tune(resumed(tmp_path / "r"), machine)) == compared(second)
    assert len(machine.launched) == num_with_new


def test_the_round_in_which_a_finalist_joins_is_read_from_the_log_and_the_disk() -> None:
    events: list[dict[str, Any]] = [
        {"kind": "finalists", "trials": [3, 7]},
        {"kind": "finalists", "trials": [3, 9], "first_round": 4},
        {"kind": "finalists", "trials": [9, 11, 12], "first_round": 9},
        {"kind": "finalists", "trials": None, "first_round": 9},
        {"kind": "finalists", "trials": [13], "first_round": "9"},
        {"kind": "begin", "trials": [5], "first_round": 2},
    ]
    joined = first_rounds_of(events, launched={12: {8, 9}, 15: {2, 3}})
    assert joined == {3: 0, 7: 0, 9: 4, 11: 9, 12: 8, 13: 0, 15: 2}
