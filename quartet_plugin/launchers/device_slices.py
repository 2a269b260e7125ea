"""The devices of one machine, cut into slices for trials that run at once.

A trial's time is compared with the baseline's, so every slice has the same number of devices, and no two
slices of a host have a device in common.
"""

import contextlib
import os
import random
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import Popen
from typing import Literal

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.launchers.command import Command
from quartet_plugin.launchers.local import LocalLauncher
from quartet_plugin.protocol.work_queue_files import SliceRecord

MAX_SLICES = 64

# Below the range that Linux gives to outgoing connections, so that none of them takes a port meanwhile.
_PORTS = range(20_000, 32_768)
_CPUS = Path("/sys/devices/system/cpu")
_GPU_FILE = re.compile(r"nvidia[0-9]+")
_DEVICE_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSlice:
    """Slice `index` of the `count` on a host: `cores`, or `devices` by their names in CUDA_VISIBLE_DEVICES.

    Of a cluster it is `num_nodes` whole nodes, by name in `nodes` where no queue chooses them. `exclusive` is
    False where the cores belong to other slices too (`--oversubscribe`).
    """

    device: Literal["cpu", "cuda"]
    index: int = 0
    count: int = 1
    cores: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    exclusive: bool = True
    nodes: tuple[str, ...] = ()
    num_nodes: int = 0

    @property
    def num_devices(self) -> int:
        """The number of cores, of accelerators, or of nodes."""
        if self.num_nodes:
            return self.num_nodes
        return len(self.cores if self.device == "cpu" else self.devices)

    @property
    def label(self) -> str:
        """The devices, for messages."""
        if self.num_nodes:
            queued = f"{self.num_nodes} nodes of the queue"
            return f"nodes {', '.join(self.nodes)}" if self.nodes else queued
        if self.device == "cpu":
            return f"cores {_core_ranges(self.cores)}" if self.cores else "every core"
        return f"devices {','.join(self.devices)}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that keep processes on the slice's accelerators; none for cores."""
        if self.num_nodes or self.device == "cpu":
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)}

    @property
    def record(self) -> SliceRecord:
        """The slice as a worker's file names it."""
        values = asdict(self)
        return SliceRecord(is_alone=values.pop("exclusive"), **values)

    @classmethod
    def of(cls, record: SliceRecord) -> "DeviceSlice":
        """The slice that a worker's file names."""
        values = asdict(record)
        return cls(exclusive=values.pop("is_alone"), **values)

    def overlaps(self, other: "DeviceSlice") -> bool:
        """Whether two exclusive slices of one host have a device in common."""
        if self.device != other.device or not (self.exclusive and other.exclusive):
            return False
        return bool({*self.cores, *self.devices, *self.nodes} & {*other.cores, *other.devices, *other.nodes})

    def free_port(self) -> int:
        """A TCP port that nothing uses now, and that no other slice of this division would pick.

        Raises InfrastructureError when there is none.
        """
        ports = [port for port in _PORTS if port % self.count == self.index % self.count]
        random.shuffle(ports)
        for port in ports:
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.bind(("", port))
                return port
        raise InfrastructureError(
            f"no free TCP port from {_PORTS[0]} to {_PORTS[-1]} for {self.label}; close other programs"
        )


class SliceLauncher(LocalLauncher):
    """Starts commands on one slice of this machine."""

    def __init__(self, device_slice: DeviceSlice) -> None:
        self._slice = device_slice

    def environment_of(self, env: Mapping[str, str]) -> dict[str, str]:
        """See `LocalLauncher`: with the slice's accelerators."""
        return {**env, **self._slice.environment}

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        output: int,
        descriptors: Sequence[int] = (),
    ) -> Popen[bytes]:
        """See `LocalLauncher`: on the slice's cores."""
        with _on_cores(self._slice.cores):
            return super().spawn(argv, env=env, cwd=cwd, output=output, descriptors=descriptors)


@contextlib.contextmanager
def _on_cores(cores: tuple[int, ...]) -> Iterator[None]:
    """What this thread starts meanwhile inherits the cores from its first instruction on."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def divide(
    device: Literal["cpu", "cuda"],
    *,
    num_slices: int,
    command: Command,
    environment: Mapping[str, str],
    size: int | None = None,
    oversubscribe: bool = False,
) -> tuple[DeviceSlice, ...]:
    """Cut this machine into `num_slices` of `size` devices each (None: as many as there are for each).

    What is divided are the cores that this process may run on, or the accelerators that CUDA_VISIBLE_DEVICES
    names. With `oversubscribe` every slice is all cores. Raises ConfigError where a slice would be too small
    for the command, or its trials could not run beside each other.
    """
    if not 1 <= num_slices <= MAX_SLICES:
        raise ConfigError(f"--workers {num_slices}: must be from 1 to {MAX_SLICES} on one host")
    _refuse_fixed_places(command, num_slices=num_slices, device=device, environment=environment)
    empty = DeviceSlice(device=device, count=num_slices)
    if device == "cpu" and oversubscribe:
        shared = replace(empty, cores=_cores(), exclusive=False)
        return tuple(replace(shared, index=index) for index in range(num_slices))
    cores, accelerators = (_cores(), ()) if device == "cpu" else ((), _accelerators(environment))
    num_devices = len(cores) + len(accelerators)
    kind = "cores" if device == "cpu" else "accelerators"
    needed = command.num_processes or 1
    each = num_devices // num_slices if size is None else size
    if num_slices * each > num_devices or each < needed:
        most = num_devices // max(needed, size or 1)
        of_each = f"{needed} a trial" if size is None else f"{size} a worker, as the run's others have"
        fix = f"use at most {most} workers" if most else "use a host with more"
        more = ", or add --oversubscribe, with which times are not meaningful" if device == "cpu" else ""
        raise ConfigError(
            f"--workers {num_slices}: {num_devices} {kind} here, and {of_each} are needed; {fix}{more}"
        )
    parts = [slice(index * each, (index + 1) * each) for index in range(num_slices)]
    return tuple(
        replace(empty, index=index, cores=cores[part], devices=accelerators[part])
        for index, part in enumerate(parts)
    )


def slice_of_cores(num_cores: int) -> DeviceSlice:
    """The first `num_cores` of the cores that this process may use, for one trial at a time."""
    return DeviceSlice(device="cpu", cores=_cores()[:num_cores])


def num_cores_here() -> int | None:
    """The number of cores that this process may use; None where the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _refuse_fixed_places(
    command: Command, *, num_slices: int, device: str, environment: Mapping[str, str]
) -> None:
    """Raise ConfigError for what two trials at once would fight for, and for what cannot be counted."""
    if command.num_nodes != 1:
        raise ConfigError("--workers: devices of several nodes cannot be divided; use one node")
    if command.starter == "other":
        raise ConfigError(
            f"--workers: the devices and ports of {command.program!r} are not known before it runs; start "
            "the command with torchrun, or omit --workers"
        )
    if command.num_processes is None and device == "cpu":
        raise ConfigError(
            "--workers: the command does not give its number of processes; write it as a number"
        )
    is_standalone = "--standalone" in command.words[: command.before]
    is_standalone |= environment.get("PET_STANDALONE", "0") not in ("", "0")
    if num_slices > 1 and command.port_flag is None and command.starter != "python" and not is_standalone:
        raise ConfigError(
            f"--workers {num_slices}: the command sets the rendezvous port, which trials at the same time "
            "cannot share; omit the port"
        )


def _cores() -> tuple[int, ...]:
    """The cores that this process may use, the threads of one core side by side."""
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError("--workers: this system cannot bind processes to cores; omit it")
    return tuple(sorted(os.sched_getaffinity(0), key=_core_position))


def _core_position(cpu: int) -> tuple[int, int, int]:
    """Package, core and number of a logical processor."""
    ids = []
    for name in ("physical_package_id", "core_id"):
        try:
            ids.append(int((_CPUS / f"cpu{cpu}" / "topology" / name).read_text()))
        except (OSError, ValueError):
            return (0, cpu, cpu)
    return (ids[0], ids[1], cpu)


def _accelerators(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The accelerators, as CUDA_VISIBLE_DEVICES names them."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        num_files = sum(_GPU_FILE.fullmatch(path.name) is not None for path in Path("/dev").iterdir())
        return tuple(str(index) for index in range(num_files))
    names = tuple(name.strip() for name in visible.split(",") if name.strip())
    for name in names:
        if not _DEVICE_NAME.fullmatch(name):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES: {name[:40]!r}; must be indices or UUIDs, comma-separated"
            )
    return names


def _core_ranges(cores: Sequence[int]) -> str:
    """Core numbers in ranges: 0-3,8-11."""
    pieces: list[list[int]] = []
    for core in sorted(cores):
        if pieces and core == pieces[-1][-1] + 1:
            pieces[-1][1:] = [core]
        else:
            pieces.append([core])
    return ",".join("-".join(str(end) for end in piece) for piece in pieces)
