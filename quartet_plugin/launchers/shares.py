"""A machine divided between several trials at once: each has cores or accelerators of its own, all as many.

A trial's time is compared with the baseline's, so every share has the same number of devices, and no two
shares of a host have one in common.
"""

import contextlib
import os
import random
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.launchers.command import Command
from quartet_plugin.launchers.local import LocalHandle, LocalLauncher

MAX_SHARES = 64

# Below the range that Linux gives to outgoing connections, so that none of them takes a port meanwhile.
_PORTS = range(20_000, 32_768)
_CPUS = Path("/sys/devices/system/cpu")
_GPU_FILE = re.compile(r"nvidia[0-9]+")
_DEVICE_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSlice:
    """What one worker may use: `cores` of the CPU, or `devices` as CUDA_VISIBLE_DEVICES names them.

    It is share `index` of `count` on its host. `is_alone` is False where cores were given out twice.
    """

    device: Literal["cpu", "cuda"]
    index: int = 0
    count: int = 1
    cores: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    is_alone: bool = True

    @property
    def num_devices(self) -> int:
        """Cores, or accelerators."""
        return len(self.cores if self.device == "cpu" else self.devices)

    @property
    def label(self) -> str:
        """For people."""
        if self.device == "cpu":
            return f"cores {_listed(self.cores)}" if self.cores else "every core"
        return f"devices {','.join(self.devices)}"

    @property
    def environment(self) -> dict[str, str]:
        """What its processes are told."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} if self.device == "cuda" else {}

    def overlaps(self, other: "DeviceSlice") -> bool:
        """Whether both, of one host, use the same device, and not on purpose."""
        if self.device != other.device or not (self.is_alone and other.is_alone):
            return False
        return bool({*self.cores, *self.devices} & {*other.cores, *other.devices})

    def free_port(self) -> int:
        """A TCP port that nothing uses now, and that no other share of this division would pick.

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
    """Starts commands on this machine, inside a share of it."""

    def __init__(self, share: DeviceSlice) -> None:
        self._share = share

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdout: Path) -> LocalHandle:
        """See `LocalLauncher`."""
        with _on_cores(self._share.cores):
            return super().start(argv, env={**env, **self._share.environment}, cwd=cwd, stdout=stdout)


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
    num_shares: int,
    command: Command,
    environment: Mapping[str, str],
    size: int | None = None,
    oversubscribe: bool = False,
) -> tuple[DeviceSlice, ...]:
    """This machine in `num_shares` alike, of `size` devices each (None: as large as they can be).

    What is divided are the cores that this process may run on, or the accelerators that CUDA_VISIBLE_DEVICES
    names. With `oversubscribe` every share is all cores. Raises ConfigError where a share would be too small
    for the command, or its trials could not run beside each other.
    """
    if not 1 <= num_shares <= MAX_SHARES:
        raise ConfigError(f"--workers {num_shares}: must be from 1 to {MAX_SHARES} on one host")
    _refuse_fixed_places(command, num_shares=num_shares, device=device, environment=environment)
    if device == "cpu" and oversubscribe:
        shared = DeviceSlice(device="cpu", count=num_shares, cores=_cores(), is_alone=False)
        return tuple(_numbered(shared, index) for index in range(num_shares))
    found: tuple[int, ...] | tuple[str, ...] = _cores() if device == "cpu" else _devices(environment)
    kind = "cores" if device == "cpu" else "accelerators"
    needed = command.num_processes or 1
    each = len(found) // num_shares if size is None else size
    if num_shares * each > len(found) or each < needed:
        most = len(found) // max(needed, size or 1)
        of_each = f"{needed} a trial" if size is None else f"{size} a worker, as the run's others have"
        fix = f"ask for at most {most}" if most else "use a host with more"
        more = ", or add --oversubscribe, with which times say little" if device == "cpu" else ""
        raise ConfigError(
            f"--workers {num_shares}: {len(found)} {kind} here, and {of_each} are needed; {fix}{more}"
        )
    parts = [found[index * each : (index + 1) * each] for index in range(num_shares)]
    if device == "cpu":
        return tuple(
            DeviceSlice(device="cpu", index=index, count=num_shares, cores=tuple(int(core) for core in part))
            for index, part in enumerate(parts)
        )
    return tuple(
        DeviceSlice(device="cuda", index=index, count=num_shares, devices=tuple(str(name) for name in part))
        for index, part in enumerate(parts)
    )


def _numbered(share: DeviceSlice, index: int) -> DeviceSlice:
    return DeviceSlice(
        device=share.device, index=index, count=share.count, cores=share.cores, is_alone=share.is_alone
    )


def _refuse_fixed_places(
    command: Command, *, num_shares: int, device: str, environment: Mapping[str, str]
) -> None:
    """What two trials at once would fight for, and what cannot be counted."""
    if command.num_nodes != 1:
        raise ConfigError("--workers: a trial of several nodes is not divided; give the command one node")
    if command.num_processes is None and device == "cpu":
        raise ConfigError(
            "--workers: the command's number of processes is left to the machine; write it as a number"
        )
    is_standalone = "--standalone" in command.words[: command.before]
    is_standalone |= environment.get("PET_STANDALONE", "0") not in ("", "0")
    if num_shares > 1 and command.port_flag is None and command.starter != "python" and not is_standalone:
        raise ConfigError(
            f"--workers {num_shares}: the command names the port that its processes meet at, and trials at "
            "once would take it from each other; leave the port out"
        )


def _cores() -> tuple[int, ...]:
    """The cores that this process may use, the threads of one core side by side."""
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError("--workers: this system cannot keep processes on cores of their own; leave it out")
    return tuple(sorted(os.sched_getaffinity(0), key=_place))


def _place(cpu: int) -> tuple[int, int, int]:
    """Package, core and number of a logical processor."""
    found = []
    for name in ("physical_package_id", "core_id"):
        try:
            found.append(int((_CPUS / f"cpu{cpu}" / "topology" / name).read_text()))
        except (OSError, ValueError):
            return (0, cpu, cpu)
    return (found[0], found[1], cpu)


def _devices(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The accelerators, as CUDA_VISIBLE_DEVICES names them."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(str(index) for index in range(sum(_is_gpu(path) for path in Path("/dev").iterdir())))
    names = tuple(name.strip() for name in named.split(",") if name.strip())
    for name in names:
        if not _DEVICE_NAME.fullmatch(name):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES: {name[:40]!r}; must be indices or UUIDs, comma-separated"
            )
    return names


def _is_gpu(path: Path) -> bool:
    return _GPU_FILE.fullmatch(path.name) is not None


def _listed(cores: Sequence[int]) -> str:
    """Core numbers in ranges: 0-3,8-11."""
    pieces: list[list[int]] = []
    for core in sorted(cores):
        if pieces and core == pieces[-1][-1] + 1:
            pieces[-1][1:] = [core]
        else:
            pieces.append([core])
    return ",".join("-".join(str(end) for end in piece) for piece in pieces)
