"""Rows of the fault matrix that a whole tuner meets, on a machine made of arithmetic."""

import errno
import functools
import json
import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quartet_plugin.cli.export import write_native
from quartet_plugin.errors import (
    ConfigError,
    ExitCode,
    InfeasibleError,
    InfrastructureError,
    StorageError,
)
from quartet_plugin.model.plan import NodeInfo, Plan
from quartet_plugin.trial.request import Outcome, Timeouts, TrialRequest, TrialResult
from quartet_plugin.tuner import finalists as final
from quartet_plugin.tuner.config import StudyConfig, parse_config
from quartet_plugin.tuner.context import TimeBudget
from quartet_plugin.tuner.disk_reserve import DiskReserve
from quartet_plugin.tuner.final_rounds import FinalRounds, winner_of
from quartet_plugin.tuner.finalists import bootstrap_median
from quartet_plugin.tuner.run_folder import RunFolder, create_run, resume_run
from quartet_plugin.tuner.trial_launcher import TrialLaunch
from quartet_plugin.tuner.tune_result import write_best
from tests.space.jobs import make_job
from tests.tuner.fakes import FakeMachine, Killed, Watching, by_formula, resume, tune
from tests.tuner.fakes import begin_with_journal as begin
from tests.tuner.test_finalists import launch, trial


def is_own(plan: Plan) -> bool:
    """Whether it is the user's configuration."""
    job = make_job()
    return (plan.split, plan.layout, plan.schedule, plan.mapping.is_stock) == (
        job.split,
        job.layout,
        job.schedule,
        True,
    )


def events(folder: Path) -> list[dict[str, Any]]:
    """What the run said of itself."""
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


# Row 15 and 17: what is lost costs nothing, and a run that could not go on can


@pytest.mark.slow
def test_row_17_a_run_that_lost_its_trials_goes_on_when_that_is_mended(tmp_path: Path) -> None:
    config = {"study": {"trials": 8}}
    expected = tune(begin(tmp_path / "whole" / "r", **config), FakeMachine())
    machine = FakeMachine()
    is_broken: list[bool] = []
    machine.outcome = lambda plan: Outcome.INFRA if is_broken else Outcome.OK

    def break_down(request: TrialRequest) -> None:
        if len(machine.launched) == 5:
            is_broken.append(True)

    machine.on_launch = break_down
    with pytest.raises(
        InfrastructureError, match=r"3 trials in a row .* fix that, then add --resume"
    ) as caught:
        tune(begin(tmp_path / "r", **config), machine)
    assert caught.value.exit_code is ExitCode.INFRASTRUCTURE
    is_broken.clear()
    machine.on_launch = lambda request: None
    result = tune(resume(tmp_path / "r"), machine)
    verdicts = [trial.record.verdict for trial in result.trials if trial.record.repeats is None]
    assert verdicts.count("lost") == 3
    assert verdicts.count("measured") == 1 + 8
    kept = [(trial.number, trial.record.value) for trial in expected.trials[:4]]
    assert [(trial.number, trial.record.value) for trial in result.trials[:4]] == kept


def test_row_17_final_rounds_that_cannot_be_run_are_not_nothing_better(tmp_path: Path) -> None:
    config = {"study": {"trials": 6, "rounds": 3}}
    whole = tune(begin(tmp_path / "whole" / "r", **config), FakeMachine())
    assert whole.winner is not None
    machine = FakeMachine()
    is_broken = [False]
    machine.outcome = lambda plan: Outcome.INFRA if is_broken[0] else Outcome.OK

    def break_down(request: TrialRequest) -> None:
        is_broken[0] = request.folder.name.endswith("round-2")

    machine.on_launch = break_down
    with pytest.raises(InfrastructureError, match=r"final rounds in a row were lost: .* then add --resume"):
        tune(begin(tmp_path / "r", **config), machine)
    machine.on_launch = lambda request: None
    is_broken[0] = False
    result = tune(resume(tmp_path / "r"), machine)
    assert [r.comparison for r in result.rankings] == [r.comparison for r in whole.rankings]


def test_row_17_one_lost_launch_of_the_final_rounds_costs_that_round_alone(tmp_path: Path) -> None:
    machine = FakeMachine()
    lost: list[str] = []
    is_lost = [False]
    machine.outcome = lambda plan: Outcome.INFRA if is_lost[0] else Outcome.OK

    def lose(request: TrialRequest) -> None:
        is_lost[0] = request.plan is not None and request.folder.name.endswith("round-2") and not lost
        lost.extend([request.folder.name] * is_lost[0])

    machine.on_launch = lose
    result = tune(begin(tmp_path / "r", study={"trials": 6, "rounds": 5}), machine)
    (name,) = lost
    short = next(ranking for ranking in result.rankings if ranking.trial.number == int(name[:6]))
    assert 1 not in short.rounds
    assert 0 in short.rounds


def test_row_15_a_plan_that_was_lost_may_be_tried_again(tmp_path: Path) -> None:
    """Its own trial is over; when the sampler comes to it again it is launched, not answered from memory."""
    fixed = {"pipeline_parallel": 2, "virtual_stages": 1, "micro_batch_size": 4, "schedule": "1f1b"}
    config = {"search": {**fixed, "split": ["6+2", "7+1"]}, "study": {"trials": 4}}
    lost: list[str] = []

    def outcome(plan: Plan) -> Outcome:
        if not is_own(plan) and not lost:
            lost.append(plan.key)
            return Outcome.INFRA
        return Outcome.OK

    result = tune(begin(tmp_path / "r", **config), FakeMachine(outcome=outcome))
    record = [trial.record.verdict for trial in result.trials if trial.plan.key == lost[0]]
    assert record[0] == "lost"
    assert "measured" in record[1:]


# Row 16: the time of a run


@pytest.mark.slow
def test_row_16_the_time_limit_counts_the_parity_checks_that_are_ahead(tmp_path: Path) -> None:
    """A check runs the command twice before the first timing of a schedule of ours, once later."""
    now = [0.0]
    machine = FakeMachine(wall_s=10.0)
    num_checks = [0]

    def took(seconds: float) -> None:
        now[0] += seconds

    def gate(plan: Plan) -> bool:
        num_checks[0] += 1
        took(20.0 if num_checks[0] == 1 else 10.0)
        return True

    machine.on_launch = lambda request: took(10.0)
    machine.gate = gate
    machine.seconds = lambda plan: by_formula(plan) * (0.5 if plan.schedule.custom is not None else 1.0)
    search = {"pipeline_parallel": 2, "mapping": "stock", "schedule": ["zb-h1", "zb-v", "v-half"]}
    run = begin(tmp_path / "r", search=search, study={"trials": 60, "rounds": 3, "top_k": 3})
    watching = Watching()
    result = tune(run, machine, max_minutes=6.0, clock=lambda: now[0], observer=watching)
    assert num_checks[0] >= 3
    assert now[0] <= 360.0
    assert result.rankings
    assert any("reserved for the final rounds" in text for text in watching.messages)


def test_row_16_no_trial_is_begun_that_cannot_end_in_time(tmp_path: Path) -> None:
    now = [0.0]
    machine = FakeMachine(wall_s=100.0)

    def take(request: TrialRequest) -> None:
        now[0] += 100.0

    machine.on_launch = take
    result = tune(begin(tmp_path / "r", study={"trials": 5}), machine, max_minutes=2.0, clock=lambda: now[0])
    assert [folder for folder, _ in machine.launched if "round" not in folder] == ["000000"]
    assert result.winner is None


# Rows 28 and 29: storage


class FullDisk:
    """Every write fails for want of space as long as the ballast is there."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.is_full = False
        monkeypatch.setattr(os, "fsync", self.unless_full(os.fsync))
        monkeypatch.setattr(os, "write", self.unless_full(os.write))

    def unless_full(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, failing while the disk is full."""

        def called(*arguments: Any) -> Any:
            if self.is_full and list(self.folder.glob(".ballast-*")):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*arguments)

        return called


@pytest.mark.slow
def test_row_29_a_full_disk_ends_the_run_with_its_last_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"study": {"trials": 6, "storage": "sqlite"}}
    expected = tune(begin(tmp_path / "whole" / "r", **config), FakeMachine())
    folder = tmp_path / "r"
    run = begin(folder, **config)
    disk = FullDisk(folder, monkeypatch)
    machine = FakeMachine()

    def fill(request: TrialRequest) -> None:
        disk.is_full = len(machine.launched) == 4

    machine.on_launch = fill
    with DiskReserve(folder, size_bytes=4096) as ballast:
        with pytest.raises(StorageError, match="No space left on device") as caught:
            tune(run, machine, make_room=ballast.drop)
        assert not list(folder.glob(".ballast-*"))
    assert caught.value.exit_code is ExitCode.STORAGE
    last = events(folder)[-1]
    assert last["kind"] == "storage"
    assert "No space left" in last["reason"]
    num_launched = len(machine.launched)
    result = tune(resume(folder), machine)
    assert [trial.record.value for trial in result.trials] == [r.record.value for r in expected.trials]
    assert machine.launched[num_launched][0] != machine.launched[num_launched - 1][0]  # it was on the disk


def test_row_32_last_events_are_not_written_into_another_tuners_run(tmp_path: Path) -> None:
    machine = FakeMachine()

    def fence() -> None:
        if len(machine.launched) >= 3:
            raise StorageError("held by another")

    dropped: list[bool] = []
    with pytest.raises(StorageError, match="held by another"):
        tune(begin(tmp_path / "r"), machine, fence=fence, make_room=lambda: dropped.append(True))
    assert "storage" not in [event["kind"] for event in events(tmp_path / "r")]


# Row 36: other devices


@pytest.mark.slow
def test_row_36_times_of_other_devices_are_not_told(tmp_path: Path) -> None:
    """A run that is resumed elsewhere; where it began it goes on, and measures that trial there."""
    config = {"study": {"trials": 6}}
    expected = tune(begin(tmp_path / "whole" / "r", **config), FakeMachine())
    machine = FakeMachine(dies_at=3)
    with pytest.raises(Killed):
        tune(begin(tmp_path / "r", **config), machine)
    machine.dies_at = None
    home = machine.cluster
    away: tuple[NodeInfo, ...] = (replace(home[0], node_class="H100 x2"),)
    ran_on: dict[Path, tuple[NodeInfo, ...]] = {}
    place = [away]
    machine.on_launch = lambda request: ran_on.update({request.folder: place[0]})
    machine.nodes = lambda result: ran_on.get(result.folder, home)  # type: ignore[method-assign]
    with pytest.raises(InfrastructureError, match="trial 3: ran on H100 x2, the baseline on cpu") as caught:
        tune(resume(tmp_path / "r"), machine)
    assert caught.value.exit_code is ExitCode.INFRASTRUCTURE
    place[0] = home
    result = tune(resume(tmp_path / "r"), machine)
    assert [trial.record.value for trial in result.trials] == [r.record.value for r in expected.trials]
    assert [name for name, _ in machine.launched].count("000003") == 3


# Row 37: secrets


def test_row_37_the_winners_scripts_take_secrets_from_the_environment(tmp_path: Path) -> None:
    words = ("torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", "--api-key", "hunter22", "--lr", "$1")
    config = parse_config({"run": "r", "study": {"trials": 8}}, where="test")
    run = create_run(tmp_path / "r", config=config, command=words)
    result = tune(run, FakeMachine())
    assert result.winner is not None
    plan = write_best(result, run=run)
    assert plan is not None
    write_native(plan, run=run)
    files = [path for path in run.folder.path.rglob("*") if path.is_file()]
    assert run.folder.best_command in files
    for path in files:
        assert b"hunter22" not in path.read_bytes(), path
    shown = tmp_path / "shown.sh"
    text = run.folder.best_command.read_text()
    shown.write_text(text.replace("exec quartet", "exec printf '%s\\0'"))
    environment = {"PATH": os.environ["PATH"], "QUARTET_SECRET_API_KEY": "hunter22"}
    done = subprocess.run(["sh", str(shown)], capture_output=True, check=True, env=environment)
    given = done.stdout.decode().split("\0")[:-1]
    assert tuple(given[given.index("--") + 1 :]) == words
    again = resume_run(run.folder.path, config=None, command=words)
    assert again.command == words
    renewed = (*words[:5], "another", *words[6:])
    assert resume_run(run.folder.path, config=None, command=renewed).command == renewed
    with pytest.raises(ConfigError, match="another command") as caught:
        resume_run(run.folder.path, config=None, command=(*words[:-1], "2"))
    assert "hunter22" not in str(caught.value)


# Rows 41 and 42: nothing fits, or nothing runs


@pytest.mark.slow
def test_row_41_thirty_that_do_not_fit_show_the_nearest_and_no_best_plan(tmp_path: Path) -> None:
    def outcome(plan: Plan) -> Outcome:
        return Outcome.OK if is_own(plan) else Outcome.INFEASIBLE

    machine = FakeMachine(outcome=outcome)
    run = begin(tmp_path / "r", study={"trials": 200})
    with pytest.raises(InfeasibleError) as caught:
        tune(run, machine)
    assert caught.value.exit_code is ExitCode.INFEASIBLE
    assert "30 plans in a row did not fit; the nearest was trial " in str(caught.value)
    assert "infeasible" in str(caught.value)  # the machine's reason for that trial
    assert len([folder for folder, key in machine.launched if key is not None]) == 30
    assert not run.folder.best_plan.exists()


def test_row_41_a_plan_that_failed_never_wins(tmp_path: Path) -> None:
    """Even where it would be the fastest by far: in the final rounds it does not fit any more."""
    machine = FakeMachine()
    is_final = [False]

    def seconds(plan: Plan) -> float:
        return 0.1 if plan.layout.data_parallel == 2 else 1.0

    def outcome(plan: Plan) -> Outcome:
        if is_final[0] and plan.layout.data_parallel == 2:
            return Outcome.INFEASIBLE
        return Outcome.OK

    def look(request: TrialRequest) -> None:
        is_final[0] = "round" in request.folder.name

    machine.seconds, machine.outcome, machine.on_launch = seconds, outcome, look
    run = begin(tmp_path / "r", study={"trials": 8})
    result = tune(run, machine)
    assert any(trial.plan.layout.data_parallel == 2 for trial in result.trials)
    assert result.winner is None
    assert write_best(result, run=run) is None
    assert not run.folder.best_plan.exists()


def test_row_42_the_own_command_that_fails_is_exit_5(tmp_path: Path) -> None:
    machine = FakeMachine(outcome=lambda plan: Outcome.INFRA)
    with pytest.raises(InfrastructureError) as caught:
        tune(begin(tmp_path / "r"), machine)
    assert caught.value.exit_code is ExitCode.INFRASTRUCTURE
    assert len(machine.launched) == 1


@pytest.mark.parametrize("outcome", [Outcome.INFEASIBLE, Outcome.WRONG, Outcome.INFRA])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_row_42_an_own_command_that_was_mended_is_launched_again(
    tmp_path: Path, outcome: Outcome, is_resumed: bool
) -> None:
    """What it came to before says nothing any more; a deadline may have been raised."""
    machine = FakeMachine(outcome=lambda plan: outcome)
    with pytest.raises(InfrastructureError):
        tune(begin(tmp_path / "r", study={"trials": 2}), machine)
    machine.outcome = lambda plan: Outcome.OK
    run = resume(tmp_path / "r") if is_resumed else begin(tmp_path / "r", study={"trials": 2})
    assert len(tune(run, machine).trials) >= 3


def test_row_6_an_own_command_that_only_starts_slowly_is_told_what_to_raise(tmp_path: Path) -> None:
    machine = FakeMachine(outcome=lambda plan: Outcome.INFRA)
    plain = machine._result
    reason = "hang: rank 0 made no progress for 300 s in phase init"
    machine._result = lambda request: replace(plain(request), reason=reason)  # type: ignore[method-assign]
    with pytest.raises(InfrastructureError, match=r"in phase init; .* raise trial\.deadline_s"):
        tune(begin(tmp_path / "r"), machine)


def test_row_6_the_deadline_sets_the_starts_limit_and_what_was_seen_lengthens_it(tmp_path: Path) -> None:
    requests: list[TrialRequest] = []
    machine = FakeMachine(on_launch=requests.append)
    plain = machine._result

    def slow(request: TrialRequest) -> TrialResult:
        return replace(plain(request), start_s=700.0, first_step_s=50.0)

    machine._result = slow  # type: ignore[method-assign]
    tune(begin(tmp_path / "r", study={"trials": 2}, trial={"deadline_s": 1200.0}), machine)
    assert requests[0].timeouts.init_s == 600.0
    assert {request.timeouts.init_s for request in requests[1:]} == {2100.0}
    assert {request.timeouts.first_step_s for request in requests} == {240.0}


def test_row_6_the_first_start_on_gpus_may_compile_and_later_ones_learn_from_it(tmp_path: Path) -> None:
    requests: list[TrialRequest] = []
    machine = FakeMachine(on_launch=requests.append)
    plain = machine._result

    def cold(request: TrialRequest) -> TrialResult:
        return replace(plain(request), start_s=20.0, first_step_s=150.0)

    machine._result = cold  # type: ignore[method-assign]
    tune(begin(tmp_path / "r", study={"trials": 2}, device="cuda"), machine)
    first, later = requests[0], requests[1:]
    assert (first.timeouts.init_s, first.timeouts.first_step_s) == (900.0, 600.0)
    assert first.deadline_s == 600.0 + 600.0 + 480.0
    assert {request.timeouts.first_step_s for request in later} == {450.0}
    assert {request.timeouts.init_s for request in later} == {450.0}
    assert {request.deadline_s for request in later} == {600.0}
    assert Timeouts.cold(60.0) == Timeouts.within(60.0)


def test_row_6_trials_have_time_for_a_first_step_as_slow_as_the_baselines(tmp_path: Path) -> None:
    """24 minutes for the first iteration: the user gave the deadline for it, later trials need it again."""
    requests: list[TrialRequest] = []
    machine = FakeMachine(on_launch=requests.append)
    plain = machine._result

    def compiling(request: TrialRequest) -> TrialResult:
        return replace(plain(request), start_s=60.0, first_step_s=1440.0)

    machine._result = compiling  # type: ignore[method-assign]
    config = {"trial": {"deadline_s": 1800.0}, "device": "cuda"}
    tune(begin(tmp_path / "r", study={"trials": 2}, **config), machine)
    first, later = requests[0], requests[1:]
    assert first.timeouts.first_step_s == 1800.0
    assert first.deadline_s > 1800.0 + 1440.0
    assert {request.timeouts.first_step_s for request in later} == {3 * 1440.0}
    assert {request.deadline_s for request in later} == {1800.0 + 1500.0 - 900.0}


# Row 43: the best plan is noise


@dataclass
class NoisyMachine:
    """Stands for `TrialLauncher` in the final rounds: runs differ by some percent, and the machine drifts."""

    generator: random.Random
    speedup: float
    noise: float = 0.03
    drift: float = 1.0

    def launch(self, wanted: TrialLaunch, **options: Any) -> TrialResult:
        """One launch; without a plan it is the baseline's."""
        self.drift *= self.generator.gauss(1.0, 0.01)
        seconds = self.drift * self.generator.gauss(1.0, self.noise)
        return launch(seconds if wanted.plan is None else seconds / self.speedup)


def num_winners(
    monkeypatch: pytest.MonkeyPatch, *, num_studies: int, num_rounds: int = 5, speedup: float = 1.0
) -> int:
    """Of so many studies with three candidates of that speedup, those that end with a winner."""
    fast = functools.partial(bootstrap_median, num_resamples=400)
    monkeypatch.setattr(final, "bootstrap_median", fast)
    winners = 0
    for seed in range(num_studies):
        study = StudyConfig(rounds=num_rounds, seed=seed)
        context: Any = SimpleNamespace(
            run=SimpleNamespace(config=SimpleNamespace(study=study), folder=RunFolder(path=Path("r"))),
            budget=TimeBudget(limit_s=None, clock=lambda: 0.0),
            observer=Watching(),
            events=SimpleNamespace(add=lambda *_, **__: None),
        )
        baseline: Any = SimpleNamespace(
            plan=trial(0, value=1.0, layers=4).plan, objective="tokens_per_s", launched_plan=None
        )
        machine: Any = NoisyMachine(random.Random(seed), speedup)
        played = FinalRounds(context=context, launcher=machine, baseline=baseline)
        chosen = [trial(number, value=1.0, layers=4 + number) for number in (1, 2, 3)]
        winners += winner_of(played.measure(chosen)) is not None
    return winners


def test_row_43_noise_seldom_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that take as long as the baseline: 2 % may pass, and in 300 searches 3 % by chance."""
    assert num_winners(monkeypatch, num_studies=300) <= 0.03 * 300


def test_row_43_what_is_faster_by_more_than_noise_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_winners(monkeypatch, num_studies=40, speedup=1.08) >= 0.9 * 40
