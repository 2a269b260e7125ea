"""The processes of a rehearsal: forked from a process that has loaded torch, watched, and always ended."""

import gc
import json
import mmap
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from quartet_plugin.errors import InfrastructureError, PlanError
from quartet_plugin.model.costs import StageCosts
from quartet_plugin.runtime.executor import Executor
from quartet_plugin.runtime.process_groups import Channels
from quartet_plugin.runtime.programs import lower_schedule
from quartet_plugin.runtime.records import NullRecorder
from quartet_plugin.runtime.rehearsal.emulated_device import (
    DelayedTransport,
    SleepingCompute,
    sleep_until,
    wake_on_time,
)
from quartet_plugin.schedule.channels import check_for_every_backend
from quartet_plugin.schedule.instruction import Program
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.validate import validate

MAX_DEVICES = 256
_TEXT_BYTES = 96
_HEAD_START_S = 0.02
_POLL_S = 0.05
_STARTUP_S = 120.0
_PEERS_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One rehearsed step: from the common start to the last device's end, and every action's times.

    `start_s[d]` and `end_s[d]` are aligned with the schedule's list of device d, count from the common start
    and are the device's own; its process notices an end a little later, and `wall_s` has that too.
    """

    wall_s: float
    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]


class PositionBoard:
    """A line of every process on its current action, in memory that all share."""

    def __init__(self, num_devices: int) -> None:
        self._memory = mmap.mmap(-1, num_devices * _TEXT_BYTES)

    def write(self, device: int, text: str) -> None:
        """Replace a device's line."""
        line = text.encode("ascii", "replace")[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        self._memory[device * _TEXT_BYTES : (device + 1) * _TEXT_BYTES] = line

    def read(self, device: int) -> str:
        """A device's line."""
        line = self._memory[device * _TEXT_BYTES : (device + 1) * _TEXT_BYTES]
        return line.decode("ascii", "replace").strip(" \0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """`num_steps` steps of a schedule, each after a barrier, all times multiplied with `time_scale`.

    The processes meet and leave their records in `folder`. A step that lasts longer than `hang_s` counts as
    hanging.
    """

    schedule: Schedule
    costs: StageCosts
    folder: Path
    num_steps: int = 3
    time_scale: float = 1.0
    hang_s: float = 60.0

    def run(self) -> list[Step]:
        """Rehearse every step.

        Raises PlanError, before any process starts, for a schedule that is not valid or could dead-lock;
        InfrastructureError, saying where every device is, when the processes hang or one of them fails.
        """
        if self.schedule.num_devices > MAX_DEVICES:
            raise PlanError(f"num_devices: {self.schedule.num_devices}; at most {MAX_DEVICES} are rehearsed")
        validate(self.schedule)
        program = lower_schedule(self.schedule, self.costs)
        check_for_every_backend(program)
        torch.set_num_threads(1)
        board = PositionBoard(program.num_devices)
        device_of_pid: dict[int, int] = {}
        try:
            for device in range(program.num_devices):
                device_of_pid[self._fork(program, device=device, board=board)] = device
            self._watch(device_of_pid, board)
        finally:
            _end(device_of_pid)
        return self._steps(program)

    def _fork(self, program: Program, *, device: int, board: PositionBoard) -> int:
        pid = os.fork()
        if pid:
            return pid
        # The child must never return into the caller's stack.
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _run_device(self, program, device=device, board=board)
            code = 0
        except BaseException as error:
            place = board.read(device)
            text = "".join(traceback.format_exception_only(error)).strip()
            (self.folder / f"device-{device}.err.json").write_text(
                json.dumps(
                    {"time": time.time(), "at": place, "error": text, "is_network": _is_network(error)}
                )
            )
        finally:
            os._exit(code)

    def _watch(self, device_of_pid: dict[int, int], board: PositionBoard) -> None:
        """Wait until all have ended well; raises for the first that has not, or when none moves any more."""
        left = dict(device_of_pid)
        lines: dict[int, str] = {}
        moved = time.monotonic()
        limit_s = _STARTUP_S
        while left:
            for pid in list(left):
                done, status = os.waitpid(pid, os.WNOHANG)
                if not done:
                    continue
                device = left.pop(pid)
                del device_of_pid[pid]
                if status:
                    time.sleep(min(_PEERS_S, self.hang_s))
                    raise self._failure(device, status, board)
            now = {device: board.read(device) for device in left.values()}
            if now != lines:
                lines, moved = now, time.monotonic()
                limit_s = self.hang_s if all(now.values()) else _STARTUP_S
            if time.monotonic() - moved > limit_s:
                raise InfrastructureError(f"the rehearsal hung: {_positions(now)}")
            time.sleep(_POLL_S)

    def _failure(self, device: int, status: int, board: PositionBoard) -> InfrastructureError:
        """The root cause: the first error that is not a peer gone away, else the process that died."""
        errors = []
        for path in self.folder.glob("device-*.err.json"):
            content = json.loads(path.read_text())
            errors.append((content["is_network"], content["time"], path.name.split(".")[0], content))
        errors.sort(key=lambda error: error[:3])
        if errors and not errors[0][0]:
            _, _, name, content = errors[0]
            where = name.replace("-", " ")
            return InfrastructureError(
                f"the rehearsal failed on {where} at {content['at']}: {content['error']}"
            )
        code = os.waitstatus_to_exitcode(status)
        ended = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return InfrastructureError(
            f"the rehearsal failed: device {device} ended {ended} at {board.read(device) or 'its start'}"
        )

    def _steps(self, program: Program) -> list[Step]:
        results = [
            json.loads((self.folder / f"device-{device}.json").read_text())
            for device in range(program.num_devices)
        ]
        return [
            Step(
                wall_s=max(result["steps"][step]["wall_s"] for result in results),
                start_s=tuple(tuple(result["steps"][step]["start_s"]) for result in results),
                end_s=tuple(tuple(result["steps"][step]["end_s"]) for result in results),
            )
            for step in range(self.num_steps)
        ]


def _run_device(rehearsal: Rehearsal, program: Program, *, device: int, board: PositionBoard) -> None:
    """One device's process: meet the others, run every step, write the times."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    show = partial(board.write, device)
    timeout = timedelta(seconds=_STARTUP_S + rehearsal.hang_s)
    # A file: a server would be a thread of the process that forks, and no thread survives that.
    store = dist.FileStore(str(rehearsal.folder / "store"), program.num_devices)
    dist.init_process_group("gloo", store=store, rank=device, world_size=program.num_devices, timeout=timeout)
    channels = Channels.open(program.placement, ranks=range(program.num_devices), timeout=timeout)
    wake_on_time()
    scale = rehearsal.time_scale
    compute = SleepingCompute(rehearsal.costs, show=show, scale=scale)
    transport = DelayedTransport(channels, rehearsal.costs, show=show, scale=scale)
    executor = Executor(program, device=device)
    recorder = NullRecorder()
    steps: list[dict[str, Any]] = []
    gc.collect()
    gc.disable()
    for _ in range(rehearsal.num_steps):
        begin_s = _common_start()
        compute.begin(begin_s)
        sleep_until(begin_s)
        executor.run(compute, transport, recorder)
        wall_s = time.monotonic() - begin_s
        steps.append({"wall_s": wall_s, "start_s": compute.start_s, "end_s": compute.end_s})
    show("done")
    (rehearsal.folder / f"device-{device}.json").write_text(json.dumps({"steps": steps}))
    dist.barrier()


def _common_start() -> float:
    """The moment, on the clock that all share, at which a step begins on every device."""
    dist.barrier()
    begin = torch.full((1,), time.monotonic() + _HEAD_START_S, dtype=torch.float64)
    dist.broadcast(begin, 0)
    return float(begin[0])


def _is_network(error: BaseException) -> bool:
    """Whether an error may come from a peer that went away, and so from another device's fault."""
    return isinstance(error, InfrastructureError | dist.DistBackendError | dist.DistNetworkError)


def _positions(lines: Mapping[int, str]) -> str:
    shown = [f"device {device} at {line or 'its start'}" for device, line in sorted(lines.items())[:16]]
    return "; ".join(shown)


def _end(pids: Mapping[int, int]) -> None:
    """Kill and reap the processes that are left; no other process can have a pid of an unreaped child."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
