"""Checks the accelerators of this machine around a launch: present, healthy, and their memory released.

The driver's tool answers, since this process must not open a device. Without such a tool (a CPU run, another
vendor) nothing is checked. Other users' processes are named and never touched.
"""

import contextlib
import csv
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import psutil

from quartet_plugin.errors import InfrastructureError
from quartet_plugin.protocol.environment import ATTEMPT_ID

TOOL = "nvidia-smi"
# Seconds for the driver to release a killed process's memory, and the bytes that may stay held.
RELEASE_S = 60.0
MARGIN_BYTES = 512 * 2**20

_FIELDS = ("index", "uuid", "name", "memory.used", "ecc.errors.uncorrected.volatile.total")
_HOLDER_FIELDS = ("gpu_uuid", "pid", "used_memory")
_TOOL_S = 30.0
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """A device now. `num_errors` counts uncorrected memory errors; `holders` has bytes by pid."""

    index: int
    uuid: str
    name: str
    used_bytes: int
    num_errors: int
    holders: Mapping[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """The device's name for messages."""
        return f"device {self.index} ({self.name}, {self.uuid})"


DeviceReader = Callable[[Mapping[str, str]], tuple[DeviceState, ...]]


def read_devices(environment: Mapping[str, str]) -> tuple[DeviceState, ...]:
    """The devices that `environment` shows to a process; empty without the driver's tool.

    Raises InfrastructureError where the tool fails, as it does for a lost device.
    """
    program = shutil.which(TOOL, path=environment.get("PATH"))
    if program is None:
        return ()
    holders: dict[str, dict[int, int]] = {}
    for row in _query(program, f"--query-compute-apps={','.join(_HOLDER_FIELDS)}", len(_HOLDER_FIELDS)):
        with contextlib.suppress(ValueError):
            holders.setdefault(row[0], {})[int(row[1])] = _number(row[2]) << 20
    devices = [
        DeviceState(
            index=_number(row[0]),
            uuid=row[1],
            name=row[2],
            used_bytes=_number(row[3]) << 20,
            num_errors=_number(row[4]),
            holders=holders.get(row[1], {}),
        )
        for row in _query(program, f"--query-gpu={','.join(_FIELDS)}", len(_FIELDS))
    ]
    return tuple(_visible(devices, environment.get("CUDA_VISIBLE_DEVICES")))


def _query(program: str, query: str, num_fields: int) -> list[list[str]]:
    argv = [program, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_TOOL_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(
            f"{TOOL} gave no answer in {_TOOL_S:g} s: the driver hangs; restart the machine, then --resume"
        ) from error
    except OSError as error:
        raise InfrastructureError(f"{TOOL}: cannot start: {error.strerror}") from error
    if done.returncode:
        words = " ".join((done.stdout + done.stderr).split())[:200]
        raise InfrastructureError(
            f"{TOOL} fails with code {done.returncode}: {words}; repair the device, then --resume"
        )
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [[word.strip() for word in row] for row in rows if len(row) == num_fields]


def _number(text: str) -> int:
    """The number in a field; 0 for `[N/A]` and other words."""
    return int(text) if text.isdecimal() else 0


def _visible(devices: Iterable[DeviceState], shown: str | None) -> list[DeviceState]:
    """The devices that CUDA_VISIBLE_DEVICES names by index or by the beginning of a UUID."""
    devices = list(devices)
    if shown is None:
        return devices
    names = [name.strip() for name in shown.split(",")]
    return [
        device
        for device in devices
        if any(name == str(device.index) or (name and device.uuid.startswith(name)) for name in names)
    ]


@dataclass(kw_only=True)
class DeviceGuard:
    """Remembers the devices that a run began with; `before` and `await_release` enclose every launch.

    `shown` are variables that the launcher adds to the environment, such as this worker's devices.
    """

    shown: Mapping[str, str] | None = None
    read: DeviceReader = read_devices
    release_s: float = RELEASE_S
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _known: dict[str, DeviceState] | None = field(init=False, default=None)
    _before: dict[str, DeviceState] = field(init=False, default_factory=dict)

    def _read(self, environment: Mapping[str, str]) -> tuple[DeviceState, ...]:
        return self.read({**environment, **(self.shown or {})})

    def before(self, environment: Mapping[str, str]) -> None:
        """Check the devices before a launch.

        Raises InfrastructureError where they are not those that the run began with: times of other devices
        cannot be compared.
        """
        now = {device.uuid: device for device in self._read(environment)}
        known = self._known if self._known is not None else now
        missing = [str(device) for uuid, device in known.items() if uuid not in now]
        added = [str(device) for uuid, device in now.items() if uuid not in known]
        if missing or added:
            changes = {"missing": missing, "new": added}
            parts = [f"{change} {', '.join(names)}" for change, names in changes.items() if names]
            raise InfrastructureError(
                f"the devices are not those that the run started with: {'; '.join(parts)}; restore them and "
                "--resume, or start another run"
            )
        self._known, self._before = known, now

    def fault(self, environment: Mapping[str, str]) -> str | None:
        """The fault of a device since `before`, in words; None without a fault."""
        for device in self._read(environment):
            then = self._before.get(device.uuid)
            if then is not None and device.num_errors > then.num_errors:
                count = device.num_errors - then.num_errors
                return f"{device}: {count} uncorrectable memory errors"
        return None

    def await_release(self, environment: Mapping[str, str]) -> None:
        """Wait until the memory of a launch is released.

        Raises InfrastructureError, naming device and processes, where it is still held after `release_s`: the
        next trial would not fit.
        """
        end = self.clock() + self.release_s
        while held := self._held(environment):
            if self.clock() >= end:
                device, num_bytes = held[0]
                pids = ", ".join(map(str, sorted(device.holders))) or "no visible process"
                raise InfrastructureError(
                    f"{device}: {num_bytes >> 20} MiB are still held {self.release_s:g} s after the trial "
                    f"ended, by {pids}; end that process or reset the device, then --resume"
                )
            self.sleep(_POLL_S)

    def _held(self, environment: Mapping[str, str]) -> list[tuple[DeviceState, int]]:
        """The devices that hold more bytes than before the launch, without those of unrelated processes."""
        held = []
        for device in self._read(environment):
            then = self._before.get(device.uuid)
            if then is None:
                continue
            new = {pid: size for pid, size in device.holders.items() if pid not in then.holders}
            unrelated = sum(size for pid, size in new.items() if _is_unrelated(pid))
            num_bytes = device.used_bytes - unrelated - then.used_bytes
            if num_bytes > MARGIN_BYTES:
                held.append((device, num_bytes))
        return held


def _is_unrelated(pid: int) -> bool:
    """Whether the process is another user's or has no attempt's id; False where it cannot be read."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.uids().real != os.getuid() or ATTEMPT_ID not in process.environ()
    return False
