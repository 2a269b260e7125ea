"""One test per row of the fault matrix that a trial meets on one machine without a GPU."""

import functools
import itertools
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from quartet_plugin.errors import ConfigError, ExitCode, InfrastructureError, StorageError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.plan import Baseline, MadeFor, Mapping, NodeInfo, Plan, Provenance, Slot
from quartet_plugin.model.training_job import parse_training_job
from quartet_plugin.protocol.rank_files import RankFileReader, Snapshot
from quartet_plugin.trial import watch
from quartet_plugin.trial.attempt import read_result
from quartet_plugin.trial.devices import DeviceGuard, DeviceState
from quartet_plugin.trial.log import CappedLog
from quartet_plugin.trial.processes import ProcessRegistry
from quartet_plugin.trial.request import Outcome, Timeouts, TrialResult
from quartet_plugin.trial.runner import run_trial
from tests.cli.tuning import living
from tests.faults.conftest import (
    FAKE,
    SHORT,
    BareLauncher,
    Clock,
    all_in,
    are_recorded,
    once_seen,
    past_the_limits,
    trial_request,
)
from tests.faults.fake_trial import job

Trial = Callable[..., TrialResult]
FOREVER = ("--step-s", "600")
REAL_TORCHRUN = Path(sys.executable).parent / "torchrun"


def a_plan() -> Plan:
    """A plan that fits the fake job."""
    known = parse_training_job(job())
    assert known.split is not None
    return Plan(
        made_for=MadeFor(
            framework=known.framework,
            framework_version=known.framework_version,
            shape=known.shape,
            global_batch_size=known.global_batch_size,
            baseline=Baseline(layout=known.layout, split=known.split, schedule=known.schedule),
            world_size=2,
            nodes=(NodeInfo(host="node-a", node_class="cpu", num_slots=2),),
        ),
        shape=known.shape,
        layout=known.layout,
        split=known.split,
        schedule=known.schedule,
        mapping=Mapping(slots=(Slot(node=0, local=0), Slot(node=0, local=1))),
        provenance=Provenance(run="r", trial=1, seed=0, quartet_version="0"),
    )


def attempts(result: TrialResult) -> list[str]:
    """The attempt folders of a trial, in order."""
    return sorted(path.name for path in result.folder.parent.iterdir())


def test_a_good_trial_is_measured(trial: Trial) -> None:
    result = trial("--mode", "ok", plan=a_plan())
    assert result.outcome is Outcome.OK
    assert len(result.iteration_s) == len(result.loss) == len(result.grad_norm) == 4
    assert result.loss == pytest.approx((9.8, 9.7, 9.6, 9.5))
    assert result.peak_memory_bytes == 1001
    assert result.plan_key == a_plan().key
    assert result.job is not None
    assert parse_training_job(result.job).global_batch_size == 4
    assert read_result(result.folder) == result
    assert (result.folder.stat().st_mode & 0o777) == 0o700


def test_a_clearly_slower_trial_is_cut_short_and_still_measured(trial: Trial) -> None:
    result = trial("--mode", "ok", "--step-s", "0.2", plan=a_plan(), measure=600, slow_above_s=0.1)
    assert result.outcome is Outcome.OK
    assert 3 <= len(result.iteration_s) < 300
    assert "cut short" in result.reason
    assert min(result.iteration_s) >= 0.2
    assert attempts(result) == ["attempt-1"]


def test_a_trial_that_is_fast_enough_is_not_cut_short(trial: Trial) -> None:
    result = trial("--mode", "ok", "--step-s", "0.05", plan=a_plan(), measure=10, slow_above_s=5.0)
    assert (result.outcome, result.reason, len(result.iteration_s)) == (Outcome.OK, "measured", 10)


def test_row_1_out_of_memory_stops_the_whole_trial(trial: Trial) -> None:
    result = trial("--mode", "oom", timeouts=Timeouts(shutdown_s=3.0))
    assert (result.outcome, result.phase) == (Outcome.INFEASIBLE, "measure")
    assert result.memory_excess_bytes == 12_345
    assert result.peak_memory_bytes == 5000
    assert attempts(result) == ["attempt-1"]


@pytest.mark.parametrize(
    ("mode", "at", "phase"), [("oom-init", 1, "init"), ("oom", 1, "warmup"), ("oom", 2, "measure")]
)
def test_row_2_out_of_memory_keeps_its_phase(trial: Trial, mode: str, at: int, phase: str) -> None:
    result = trial("--mode", mode, "--at", str(at))
    assert (result.outcome, result.phase) == (Outcome.INFEASIBLE, phase)
    assert result.memory_excess_bytes > 0


def test_row_1_peers_that_ignore_sigterm_do_not_hold_it_up(trial: Trial) -> None:
    result = trial("--mode", "oom", "--stubborn", deadline_s=60.0, timeouts=Timeouts())
    assert result.outcome is Outcome.INFEASIBLE
    assert watch._PEERS_S + watch._ERROR_GRACE_S + 3 * watch._KILL_GRACE_S < 10.0


def test_refused_arguments_are_infeasible_in_one_line(trial: Trial) -> None:
    result = trial("--mode", "refused", plan=a_plan())
    assert (result.outcome, result.phase, result.memory_excess_bytes) == (Outcome.INFEASIBLE, "init", 0)
    assert result.reason.endswith("AssertionError: hidden size must divide")


def test_row_3_a_killed_rank_is_tried_once_more(trial: Trial) -> None:
    result = trial("--mode", "sigkill", "--faulty-attempts", "1")
    assert result.outcome is Outcome.OK
    assert attempts(result) == ["attempt-1", "attempt-2"]
    first = read_result(result.folder.parent / "attempt-1")
    assert first is not None
    assert first.outcome is Outcome.INFRA
    assert first.reason == (
        "rank 1 was killed (SIGKILL); the host may have run out of memory; check its kernel log"
    )


def test_row_3_the_kernels_count_names_the_reason(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([4, 5, 5, 6])
    monkeypatch.setattr(watch, "num_oom_kills", lambda: next(counts))
    result = trial("--mode", "sigkill", plan=a_plan())
    assert result.outcome is Outcome.INFEASIBLE
    assert result.reason == "rank 1 was killed (SIGKILL): the host ran out of memory (twice)"


def test_row_3_of_the_users_own_command_it_stays_infrastructure(trial: Trial) -> None:
    result = trial("--mode", "sigkill")
    assert (result.outcome, result.memory_excess_bytes) == (Outcome.INFRA, 0)
    assert attempts(result) == ["attempt-1", "attempt-2"]


def test_row_3_killed_twice_is_the_plan(trial: Trial) -> None:
    result = trial("--mode", "sigkill", plan=a_plan())
    assert result.outcome is Outcome.INFEASIBLE
    assert result.memory_excess_bytes > 0
    assert attempts(result) == ["attempt-1", "attempt-2"]


def test_row_5_a_hang_leaves_its_stacks_and_is_tried_once_more(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(watch, "_STACKS_S", 60.0)
    result = trial("--mode", "hang", plan=a_plan(), **past_the_limits(tmp_path))
    assert (result.outcome, result.phase) == (Outcome.INFEASIBLE, "measure")
    assert "hang" in result.reason
    assert attempts(result) == ["attempt-1", "attempt-2"]
    for name in attempts(result):
        attempt = result.folder.parent / name
        stacks = (attempt / "stdout.log").read_text().split("Fatal Python error: Aborted")[1:]
        assert [" in block" in stack for stack in stacks] == [True, True], "one of each rank, in one piece"
        assert (attempt / "STOP").read_text() == "hang\n"


def test_row_5_what_the_baseline_needs_for_a_step_is_learned(trial: Trial, tmp_path: Path) -> None:
    """Its steps take longer than a step may take, and nobody could predict that."""
    go = tmp_path / "go"
    limits = replace(SHORT, step_s=0.2, step_factor=20.0, shutdown_s=0.2)
    result = trial(
        *("--step-s", "1.5", "--hold", str(go), "--hold-from", "0", "--hold-at", "0"),
        measure=1,
        timeouts=limits,
        stop=once_seen(tmp_path, lambda attempt: all_in(attempt, "warmup"), go.touch),
    )
    assert (result.outcome, attempts(result)) == (Outcome.OK, ["attempt-1"])


def test_row_5_ranks_that_ignore_sigterm_are_killed(trial: Trial, tmp_path: Path) -> None:
    result = trial("--mode", "stubborn", max_attempts=1, **past_the_limits(tmp_path))
    assert result.outcome is Outcome.INFRA


def test_row_6_a_slow_start_is_no_hang(trial: Trial, tmp_path: Path) -> None:
    go, clock = tmp_path / "go", Clock()

    def start() -> None:
        if clock.ahead_s:  # and the limits were looked at since
            go.touch()
        clock.ahead_s = 60.0

    result = trial(
        *("--hold", str(go), "--hold-from", "0", "--hold-at", "-1"),
        timeouts=replace(SHORT, first_step_s=30.0, step_s=30.0),
        clock=clock,
        stop=once_seen(tmp_path, lambda attempt: all_in(attempt, "init"), start),
    )
    assert (result.outcome, attempts(result)) == (Outcome.OK, ["attempt-1"])


def test_row_6_a_start_that_never_ends_is_one(trial: Trial, tmp_path: Path) -> None:
    result = trial("--mode", "hang-init", max_attempts=1, **past_the_limits(tmp_path))
    assert (result.outcome, result.phase) == (Outcome.INFRA, "init")


def test_the_deadline_of_a_trial_is_a_budget(trial: Trial) -> None:
    result = trial(
        *FOREVER,
        deadline_s=1.2,
        timeouts=Timeouts(init_s=9, first_step_s=9, step_s=9, shutdown_s=0.5),
    )
    assert result.outcome is Outcome.INFEASIBLE
    assert "deadline" in result.reason
    assert attempts(result) == ["attempt-1"]


@pytest.mark.parametrize(("mode", "word"), [("exc", "RuntimeError"), ("segv", "SIGSEGV"), ("exit17", "17")])
def test_row_7_a_broken_rank_is_tried_again_and_proven_by_repetition(
    trial: Trial, mode: str, word: str
) -> None:
    once = trial("--mode", mode, "--faulty-attempts", "1", plan=a_plan())
    assert once.outcome is Outcome.OK
    first = read_result(once.folder.parent / "attempt-1")
    assert first is not None
    assert first.outcome is Outcome.INFRA
    assert word in first.reason
    assert "rank 1" in first.reason


@pytest.mark.parametrize("mode", ["exc", "segv", "exit17"])
def test_row_7_the_same_error_twice_is_the_plan(trial: Trial, mode: str) -> None:
    result = trial("--mode", mode, plan=a_plan())
    assert result.outcome is Outcome.INFEASIBLE
    assert attempts(result) == ["attempt-1", "attempt-2"]


def test_a_script_that_fails_by_itself_shows_its_own_last_lines(trial: Trial) -> None:
    result = trial("--mode", "exc")
    assert result.outcome is Outcome.INFRA
    assert attempts(result) == ["attempt-1"]
    assert result.last_lines[-1] == "the script's own last words"


def test_a_command_that_never_trains_is_not_tried_again(trial: Trial) -> None:
    result = trial("--mode", "nothing")
    assert (result.outcome, result.phase) == (Outcome.INFRA, "launch")
    assert attempts(result) == ["attempt-1"]
    assert result.last_lines[-1] == "SyntaxError: the script's own fault"


def test_a_command_that_is_not_there(trial: Trial) -> None:
    with pytest.raises(ConfigError, match="not found"):
        trial(torchrun="/nowhere/torchrun")


def test_row_9_ctrl_c_stops_and_cleans_up(trial: Trial, tmp_path: Path) -> None:
    stop = threading.Event()

    def asked() -> bool:
        if list(tmp_path.rglob("rank-1.beat.json")):
            stop.set()
        return stop.is_set()

    result = trial(*FOREVER, stop=asked)
    assert result.outcome is Outcome.CANCELLED
    assert (result.folder / "STOP").exists()
    assert attempts(result) == ["attempt-1"]


def test_row_9_a_second_ctrl_c_kills_at_once(trial: Trial, tmp_path: Path) -> None:
    def interrupt() -> bool:
        if list(tmp_path.rglob("rank-1.beat.json")):
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        trial("--mode", "stubborn", stop=interrupt)


@pytest.mark.parametrize("error", [KeyboardInterrupt, StorageError])
def test_row_9_what_breaks_between_start_and_watching_leaves_no_ranks(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[BaseException]
) -> None:
    """The first list of processes cannot be written, or Ctrl-C comes just then."""

    def rescan(self: ProcessRegistry, launcher_pid: int, **options: Any) -> None:
        end = time.monotonic() + 30
        while not list(tmp_path.rglob("rank-1.beat.json")) and time.monotonic() < end:
            time.sleep(0.01)
        raise error("now")

    monkeypatch.setattr(ProcessRegistry, "rescan", rescan)
    with pytest.raises(error, match="now"):
        trial(*FOREVER)


def test_row_10_the_id_of_a_launcher_that_has_ended_may_be_anothers(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system gives ids again: no process is looked for under one whose owner was waited for."""
    asked: list[int] = []
    rescan = ProcessRegistry.rescan

    def noted(self: ProcessRegistry, launcher_pid: int, **options: Any) -> None:
        asked.append(launcher_pid)
        rescan(self, launcher_pid, **options)

    monkeypatch.setattr(ProcessRegistry, "rescan", noted)
    assert trial().outcome is Outcome.OK
    assert asked[0] > 0
    assert asked[-1] == 0


def test_row_10_a_killed_launcher_leaves_no_ranks(fake_torchrun: Path, tmp_path: Path) -> None:
    launcher = BareLauncher()

    def kill_launcher() -> bool:
        if list(tmp_path.rglob("rank-1.beat.json")):
            psutil.Process(launcher.started[-1]).kill()
        return False

    request = trial_request(fake_torchrun, tmp_path / "000", *FOREVER, max_attempts=1)
    result = run_trial(request, launcher=launcher, stop=kill_launcher, poll_s=0.02)
    assert result.outcome is Outcome.INFRA
    assert "the launcher was ended by SIGKILL" in result.reason


def test_row_11_an_orphan_is_ended_and_strangers_are_not(trial: Trial) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        result = trial("--mode", "orphan")
        assert result.outcome is Outcome.OK
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_row_11_what_left_its_parents_and_its_environment_is_ended(trial: Trial, tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    stranger = subprocess.Popen(words, start_new_session=True)
    try:
        result = trial("--mode", "escape")
        assert result.outcome is Outcome.OK
        assert living(tmp_path) == []
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_row_12_nan_is_never_scored(trial: Trial) -> None:
    result = trial("--mode", "nan", plan=a_plan())
    assert result.outcome is Outcome.WRONG
    assert not result.is_measured
    assert result.reason == "loss is nan at iteration 3"
    text = (result.folder / "result.json").read_text()
    assert '"nan"' in text
    assert "NaN" not in text


def test_row_14_noise_is_measured_once_more(trial: Trial) -> None:
    noisy = ("--mode", "noisy", "--step-s", "0.03", "--nominal")
    result = trial(*noisy, max_spread=0.25)
    assert result.outcome is Outcome.UNSTABLE
    assert result.is_measured
    assert attempts(result) == ["attempt-1", "attempt-2"]
    assert trial(*noisy, "--faulty-attempts", "3", max_spread=0.25).outcome is Outcome.OK


def test_row_14_a_noisy_measurement_outlives_lost_attempts(trial: Trial) -> None:
    noisy = ("--mode", "noisy", "--step-s", "0.03", "--nominal")
    result = trial(*noisy, "--faulty-attempts", "1", "--later-mode", "network", max_spread=0.25)
    assert (result.outcome, result.folder.name) == (Outcome.UNSTABLE, "attempt-1")
    assert len(result.iteration_s) == 4
    assert attempts(result) == ["attempt-1", "attempt-2", "attempt-3"]


def test_row_18_a_taken_port_is_replaced(trial: Trial) -> None:
    result = trial("--mode", "port-in-use", "--faulty-attempts", "3", max_attempts=1)
    assert result.outcome is Outcome.OK
    ports = set()
    for name in attempts(result):
        words = json.loads((result.folder.parent / name / "command.json").read_text())["argv"]
        ports.add(words[words.index("--master-port") + 1])
    assert len(attempts(result)) == 4
    assert len(ports) > 1


def test_row_18_the_users_own_port_stays(fake_torchrun: Path, tmp_path: Path) -> None:
    words = [
        str(fake_torchrun),
        "--nproc-per-node",
        "2",
        "--master-port",
        "29511",
        str(FAKE),
        "--mode",
        "port-in-use",
    ]
    request = replace(
        trial_request(fake_torchrun, tmp_path / "000"), command=parse_command(words, environment={})
    )
    result = run_trial(request, launcher=BareLauncher(), poll_s=0.02)
    assert result.outcome is Outcome.INFRA
    assert "choose another port" in result.reason
    assert attempts(result) == ["attempt-1"]


def test_a_lost_peer_is_tried_three_times(trial: Trial) -> None:
    result = trial("--mode", "network", plan=a_plan())
    assert result.outcome is Outcome.INFRA
    assert attempts(result) == ["attempt-1", "attempt-2", "attempt-3"]


def test_what_the_tuner_has_ended_is_no_cause(trial: Trial, fake_torchrun: Path) -> None:
    """A starter that SIGTERM ends, and that prints nothing of its ranks."""
    started = fake_torchrun.read_text().replace("exec ", "")
    fake_torchrun.write_text(f"{started.rstrip()} > /dev/null 2>&1\nsleep 600\n")
    result = trial("--mode", "network", max_attempts=1)
    assert result.outcome is Outcome.INFRA
    assert "Connection closed by peer" in result.reason


def test_row_21_a_rank_with_another_plan_is_told(trial: Trial) -> None:
    result = trial("--mode", "other-plan", plan=a_plan())
    assert result.outcome is Outcome.HARNESS
    assert "did not run the plan" in result.reason


@pytest.mark.parametrize(
    ("mode", "field"), [("partial-result", "rank-1.json"), ("bad-beat", "iteration: -1")]
)
def test_a_file_that_breaks_its_format_is_our_fault(trial: Trial, mode: str, field: str) -> None:
    result = trial("--mode", mode)
    assert result.outcome is Outcome.HARNESS
    assert field in result.reason


def test_a_plan_that_the_ranks_refuse_is_our_fault(trial: Trial) -> None:
    assert trial("--mode", "plan").outcome is Outcome.HARNESS


def test_too_few_iterations_are_said(trial: Trial) -> None:
    result = trial("--mode", "short")
    assert result.outcome is Outcome.INFRA
    assert "3 of 5 iterations" in result.reason


def test_a_launcher_that_does_not_exit_does_not_spoil_what_was_measured(trial: Trial) -> None:
    result = trial("--mode", "late-exit", timeouts=Timeouts(shutdown_s=0.5))
    assert result.outcome is Outcome.OK


def lose_files(monkeypatch: pytest.MonkeyPatch, is_lost: Iterator[bool]) -> None:
    """Nothing of an attempt can be read by those looks at it for which the iterator says so."""
    scan = RankFileReader.scan

    def scanning(self: RankFileReader) -> Snapshot:
        if next(is_lost):
            raise StorageError("attempt-1: cannot be read: Stale file handle")
        return scan(self)

    monkeypatch.setattr(RankFileReader, "scan", scanning)


def test_row_28_a_file_system_that_pauses_loses_no_trial(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor is what cannot be seen meanwhile taken for a hang: it is away for longer than a step may take."""
    attempt = tmp_path / "trials" / "000000" / "attempt-1"
    go, clock, num_after = tmp_path / "go", Clock(), 0

    def looks() -> Iterator[bool]:
        nonlocal num_after
        while not all_in(attempt, "measure"):
            yield False
        yield False  # the ranks are seen as they measure
        for _ in range(5):
            clock.ahead_s += 6.0
            yield True
        while True:
            num_after += 1
            yield False

    def stop() -> bool:
        if num_after > 1:  # they were seen where they were, and the limits were looked at
            go.touch()
        return False

    lose_files(monkeypatch, looks())
    result = trial(
        *("--hold", str(go), "--hold-from", "0"),
        timeouts=replace(SHORT, step_s=20.0, step_factor=1.0),
        clock=clock,
        stop=stop,
    )
    assert go.exists()
    assert (result.outcome, attempts(result)) == (Outcome.OK, ["attempt-1"])


def test_row_28_a_file_system_that_stays_away_ends_the_trial_and_leaves_no_process(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def looks() -> Iterator[bool]:
        while not list(tmp_path.rglob("rank-1.beat.json")):
            yield False
        yield from itertools.repeat(True)

    monkeypatch.setattr(watch, "_LOST_S", 0.3)
    lose_files(monkeypatch, looks())
    with pytest.raises(StorageError, match="Stale file handle") as caught:
        trial(*FOREVER)
    assert caught.value.exit_code is ExitCode.STORAGE


def test_row_28_ctrl_c_is_heard_while_it_is_away(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    num_failed = 0
    heard = threading.Event()

    def looks() -> Iterator[bool]:
        nonlocal num_failed
        while not list(tmp_path.rglob("rank-1.beat.json")):
            yield False
        while not heard.is_set():
            num_failed += 1
            yield True
        yield from itertools.repeat(False)

    def asked() -> bool:
        if num_failed > 2:
            heard.set()
        return heard.is_set()

    lose_files(monkeypatch, looks())
    result = trial(*FOREVER, stop=asked)
    assert result.outcome is Outcome.CANCELLED


def test_row_29_a_log_that_grows_is_kept_short(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    short = functools.partial(CappedLog, max_bytes=40_000)
    monkeypatch.setattr(watch, "CappedLog", short)
    monkeypatch.setattr(watch, "_RESCAN_S", 0.0)
    monkeypatch.setattr(watch, "_RESCAN_MEASURING_S", 0.0)
    result = trial("--mode", "shout", measure=20)
    assert result.outcome is Outcome.OK
    log = result.folder / "stdout.log"
    assert "bytes left out" in log.read_text()
    assert log.stat().st_size < 41 * 10_001


def test_row_29_no_trial_is_started_on_a_full_disk(trial: Trial) -> None:
    with pytest.raises(StorageError, match="MiB free"):
        trial(min_free_bytes=2**60)


def test_row_29_a_disk_that_fills_up_leaves_no_process(tmp_path: Path, fake_torchrun: Path) -> None:
    """The limit on file sizes stands in for the full disk; it holds for the tuner alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    go = tmp_path / "go"

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        go.touch()

    request = trial_request(fake_torchrun, tmp_path / "000", "--hold", str(go), "--hold-from", "0")
    try:
        with pytest.raises(StorageError, match="cannot be written"):
            run_trial(
                request,
                launcher=BareLauncher(),
                stop=once_seen(tmp_path, are_recorded, fill),
                poll_s=0.02,
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_row_37_secrets_are_not_written_down(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    monkeypatch.setenv("NCCL_TOKEN", "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    result = trial("--mode", "ok")
    for path in tmp_path.rglob("*.json"):
        assert "hunter2" not in path.read_text()
    environment = json.loads((result.folder / "command.json").read_text())["environment"]
    assert environment["NCCL_DEBUG"] == "WARN"
    assert environment["NCCL_TOKEN"] == "***"
    assert "WANDB_API_KEY" not in environment


def test_row_39_links_are_not_followed(trial: Trial, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / "000000").symlink_to(target)
    with pytest.raises(StorageError, match="a symbolic link"):
        trial("--mode", "ok")


def a_guard(*looks: int, num_errors: int = 0) -> DeviceGuard:
    """Of one device that holds so many GiB, look by look; the last look stays."""
    left = list(looks)

    def read(environment: Any) -> tuple[DeviceState, ...]:
        size = left.pop(0) if len(left) > 1 else left[0]
        count = num_errors if len(left) == 1 else 0
        one = DeviceState(index=0, uuid="GPU-0", name="H200", used_bytes=size << 30, num_errors=count)
        return (one,) if size else ()

    ticks = itertools.count()
    return DeviceGuard(read=read, release_s=2.0, clock=lambda: next(ticks), sleep=lambda _: None)


def on_devices(trial: Trial, guard: DeviceGuard, *fake: str, **options: Any) -> TrialResult:
    """A trial that would run on an accelerator."""
    return trial(*fake, device="cuda", devices=guard, plan=a_plan(), **options)


def test_row_10_a_device_that_is_not_given_back_ends_the_study_and_not_the_measurement(
    trial: Trial, tmp_path: Path
) -> None:
    with pytest.raises(InfrastructureError, match=r"MiB are still held .* then --resume") as caught:
        on_devices(trial, a_guard(1, 1, 90))
    assert caught.value.exit_code is ExitCode.INFRASTRUCTURE
    kept = read_result(tmp_path / "trials" / "000000" / "attempt-1")
    assert kept is not None
    assert kept.outcome is Outcome.OK


def test_row_10_memory_that_the_driver_gives_back_late_is_waited_for(trial: Trial) -> None:
    assert on_devices(trial, a_guard(1, 1, 90, 1)).outcome is Outcome.OK


def test_row_35_what_a_faulty_device_measured_is_not_told(trial: Trial) -> None:
    result = on_devices(trial, a_guard(1, 1, 1, num_errors=2), max_attempts=1)
    assert result.outcome is Outcome.INFRA
    assert "uncorrectable memory errors" in result.reason
    assert result.iteration_s == ()


def test_row_36_nothing_is_started_on_other_devices(trial: Trial, tmp_path: Path) -> None:
    guard = a_guard(1, 1, 1, 0)
    assert on_devices(trial, guard).outcome is Outcome.OK
    with pytest.raises(InfrastructureError, match="missing device 0"):
        on_devices(trial, guard)
    assert len(list(tmp_path.rglob("attempt-*"))) == 1


def test_runs_on_the_cpu_look_at_no_device(trial: Trial) -> None:
    def read(environment: Any) -> tuple[DeviceState, ...]:
        raise AssertionError

    assert trial("--mode", "ok", devices=DeviceGuard(read=read)).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("mode", "outcome", "word"),
    [
        ("ok", Outcome.OK, "measured"),
        ("sigkill", Outcome.INFEASIBLE, "rank 1 was killed (SIGKILL)"),
        pytest.param("oom", Outcome.INFEASIBLE, "out of memory", marks=pytest.mark.nightly),
        pytest.param("segv", Outcome.INFEASIBLE, "rank 1 was ended by SIGSEGV", marks=pytest.mark.nightly),
        pytest.param("hang", Outcome.INFEASIBLE, "hang", marks=pytest.mark.slow),
        pytest.param("orphan", Outcome.OK, "measured", marks=pytest.mark.slow),
    ],
)
def test_under_the_real_torchrun_with_gloo(
    trial: Trial, tmp_path: Path, mode: str, outcome: Outcome, word: str
) -> None:
    passing = past_the_limits(tmp_path, ranks=(1,)) if mode == "hang" else {}
    result = trial("--gloo", "--mode", mode, torchrun=REAL_TORCHRUN, plan=a_plan(), **passing)
    assert result.outcome is outcome
    assert word in result.reason


@pytest.mark.parametrize("num_writes", [0, 1, 2])
def test_row_32_a_replaced_tuner_writes_nothing_into_the_attempt_that_it_started(
    fake_torchrun: Path, tmp_path: Path, num_writes: int
) -> None:
    """Replaced before the attempt, before the list of its processes, or before its next list or result."""
    allowed = iter(range(num_writes))

    def fence() -> None:
        if next(allowed, None) is None:
            raise StorageError("the run is held by another tuner")

    request = trial_request(fake_torchrun, tmp_path / "000")
    with pytest.raises(StorageError, match="another tuner"):
        run_trial(request, launcher=BareLauncher(), poll_s=0.02, is_subreaper=True, fence=fence)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert "result.json" not in names
    assert ("trial.json" in names, "processes.json" in names) == (num_writes > 0, num_writes > 1)


def test_row_10_under_the_real_torchrun(tmp_path: Path) -> None:
    """Its ranks have sessions of their own, and live on when it is killed."""
    launcher = BareLauncher()

    def kill_launcher() -> bool:
        if list(tmp_path.rglob("rank-1.beat.json")):
            psutil.Process(launcher.started[-1]).kill()
        return False

    request = trial_request(REAL_TORCHRUN, tmp_path / "000", *FOREVER, max_attempts=1)
    result = run_trial(request, launcher=launcher, stop=kill_launcher)
    assert result.outcome is Outcome.INFRA
    assert "the launcher was ended by SIGKILL" in result.reason


def test_row_18_under_the_real_torchrun(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        words = [str(REAL_TORCHRUN), "--nproc-per-node", "2", "--master-port", str(port), str(FAKE), "--gloo"]
        request = replace(
            trial_request("torchrun", tmp_path / "000", timeouts=Timeouts()),
            command=parse_command(words, environment={}),
        )
        result = run_trial(request, launcher=BareLauncher())
    assert result.outcome is Outcome.INFRA
    assert "choose another port" in result.reason
