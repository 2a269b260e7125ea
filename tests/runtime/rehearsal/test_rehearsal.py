"""Rehearsals in real processes: every action in its order, delays kept, hangs and deaths found and named."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quartet_plugin.errors import InfrastructureError, PlanError
from quartet_plugin.model.costs import StageCosts
from quartet_plugin.runtime.rehearsal import emulated_device, processes
from quartet_plugin.runtime.rehearsal.processes import Rehearsal, Step
from quartet_plugin.runtime.transport import PairTransport
from quartet_plugin.schedule.action import Action, ActionKind
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import simulate

ACTION_S = 0.004
TRANSFER_S = 0.002


def costs_of(placement: tuple[int, ...]) -> StageCosts:
    """Every F, I and W equally long, every boundary between two devices equally far."""
    each = np.full(len(placement), ACTION_S)
    device = np.array(placement, dtype=np.int64)
    crossing = np.where(device[:-1] != device[1:], TRANSFER_S, 0.0)
    return StageCosts(
        device_of_stage=device,
        forward_s=each,
        input_grad_s=each,
        weight_grad_s=each,
        backward_s=2 * each,
        activation_bytes=each,
        forward_transfer_s=np.append(crossing, 0.0),
        backward_transfer_s=np.concatenate(([0.0], crossing)),
        held_fraction=1.0,
    )


def rehearsal(schedule: Schedule, folder: Path, **changes: object) -> Rehearsal:
    whole = Rehearsal(schedule=schedule, costs=costs_of(schedule.placement), folder=folder, num_steps=2)
    return replace(whole, **changes)  # type: ignore[arg-type]


def ends_of(schedule: Schedule, step: Step) -> dict[tuple[int, ActionKind, int], float]:
    return {
        (action.stage, action.kind, action.microbatch): end
        for device in range(schedule.num_devices)
        for action, end in zip(schedule.actions(device), step.end_s[device], strict=True)
    }


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved"])
def test_every_action_comes_after_what_it_needs(name: str, tmp_path: Path) -> None:
    schedule = named(name, num_devices=3, num_microbatches=6, num_chunks=1 if name == "1f1b" else 2)
    steps = rehearsal(schedule, tmp_path).run()
    expected_s = simulate(schedule, costs_of(schedule.placement)).makespan_s
    assert len(steps) == 2
    for step in steps:
        # Real processes are never faster than the simulator: that would be a delay not kept.
        assert step.wall_s >= expected_s
        ends = ends_of(schedule, step)
        for device in range(schedule.num_devices):
            assert list(step.start_s[device]) == sorted(step.start_s[device])
            for action, start in zip(schedule.actions(device), step.start_s[device], strict=True):
                source = source_of(action, schedule.num_stages)
                if source is not None:
                    same = schedule.placement[source[0]] == device
                    assert start >= ends_before(ends, source) + (0.0 if same else TRANSFER_S) - 1e-9


def test_the_parts_of_a_pair_run_together_once_both_inputs_are_there(tmp_path: Path) -> None:
    schedule = named("interleaved", num_devices=3, num_microbatches=6, with_pairs=True)
    costs = costs_of(schedule.placement)
    costs = replace(costs, exchange_s=np.full((2, 6), ACTION_S / 2))
    (step,) = rehearsal(schedule, tmp_path, costs=costs, num_steps=1).run()
    expected = simulate(schedule, costs)
    assert expected.makespan_s < simulate(replace(schedule, pairs=()), costs).makespan_s
    assert step.wall_s >= expected.makespan_s
    ends = ends_of(schedule, step)
    for device in range(3):
        first = schedule.pairs[device]
        start, end = np.array(step.start_s[device]), np.array(step.end_s[device])
        assert len(first) > 0
        assert (start[first] == start[first + 1]).all()
        assert (end[first] == end[first + 1]).all()
        # Of a pair's 3 actions' times both exchanges are hidden.
        assert end[first] - start[first] == pytest.approx(np.full(len(first), 2 * ACTION_S))
        for index in first.tolist():
            for part in schedule.actions(device)[index : index + 2]:
                source = source_of(part, schedule.num_stages)
                assert source is None or start[index] >= ends_before(ends, source) - 1e-9


def source_of(action: Action, num_stages: int) -> tuple[int, bool, int] | None:
    if action.kind is ActionKind.W:
        return None
    forward = action.kind is ActionKind.F
    stage = action.stage - 1 if forward else action.stage + 1
    return (stage, forward, action.microbatch) if 0 <= stage < num_stages else None


def ends_before(ends: dict[tuple[int, ActionKind, int], float], source: tuple[int, bool, int]) -> float:
    """When the device had produced it."""
    stage, forward, microbatch = source
    kinds = (ActionKind.F,) if forward else (ActionKind.I, ActionKind.B)
    return next(ends[stage, kind, microbatch] for kind in kinds if (stage, kind, microbatch) in ends)


def test_times_are_scaled(tmp_path: Path) -> None:
    schedule = named("1f1b", num_devices=2, num_microbatches=2)
    (step,) = rehearsal(schedule, tmp_path, num_steps=1, time_scale=3.0).run()
    assert step.wall_s >= 3 * simulate(schedule, costs_of(schedule.placement)).makespan_s


def test_a_schedule_that_cannot_run_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process was started"))
    good = named("1f1b", num_devices=2, num_microbatches=3)
    rows = [good.actions(0), good.actions(1)]
    rows[0] = [action for action in rows[0] if str(action) != "0F1"]
    bad = Schedule.of_actions(rows, num_microbatches=3, placement=good.placement)
    with pytest.raises(PlanError, match="0F1"):
        rehearsal(bad, tmp_path).run()


def test_a_hang_says_where_every_device_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(self: emulated_device.DelayedTransport, transfers: object) -> None:
        """A transport that loses what it is given; forked children inherit it."""

    monkeypatch.setattr(PairTransport, "post", deaf)
    monkeypatch.setattr(PairTransport, "wait", lambda *_: time.sleep(600))
    schedule = named("1f1b", num_devices=2, num_microbatches=2)
    with pytest.raises(InfrastructureError, match=r"hung: .*device 1 at waiting for .*0 from device 0"):
        rehearsal(schedule, tmp_path, hang_s=1.0).run()


def test_an_error_in_a_device_is_named_with_its_action(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: emulated_device.SleepingCompute, stage: int, microbatch: int, received: object) -> None:
        self._show(f"{stage}F{microbatch}")
        raise ValueError("no such stage")

    monkeypatch.setattr(emulated_device.SleepingCompute, "forward", broken)
    schedule = named("1f1b", num_devices=2, num_microbatches=2)
    with pytest.raises(InfrastructureError, match=r"device 0 at 0F0: ValueError: no such stage"):
        rehearsal(schedule, tmp_path).run()


def test_a_process_that_is_killed_ends_the_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    fork = os.fork

    def remembered() -> int:
        pid = fork()
        pids.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", remembered)
    monkeypatch.setattr(processes, "_PEERS_S", 0.5)
    schedule = named("1f1b", num_devices=2, num_microbatches=64)
    run = rehearsal(schedule, tmp_path, num_steps=50)

    def kill_when_it_runs() -> None:
        deadline = time.monotonic() + 60
        while len(pids) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        os.kill(pids[1], signal.SIGKILL)

    killer = threading.Thread(target=kill_when_it_runs)
    killer.start()
    with pytest.raises(InfrastructureError, match=r"the rehearsal failed"):
        run.run()
    killer.join()
    assert not any(is_alive(pid) for pid in pids)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_importing_it_starts_nothing() -> None:
    code = "import quartet_plugin.runtime.rehearsal, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"
