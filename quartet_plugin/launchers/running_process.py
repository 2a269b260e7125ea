"""Finds the processes of this machine that files identify by pid, start time and boot."""

import contextlib
import functools
import os
import socket
import time
from pathlib import Path

import psutil

from quartet_plugin.protocol.node_identity import recorded_boot_id
from quartet_plugin.protocol.process_identity import Identity


@functools.cache
def boot_id() -> str:
    """The id of this boot of the machine."""
    return recorded_boot_id() or f"{psutil.boot_time():.0f}"


@functools.cache
def pid_namespace() -> int | None:
    """The inode of this process's pid namespace; None where the system has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino
    return None


def is_visible(identity: Identity, *, host: str, here: str | None = None) -> bool:
    """Whether `is_running` can tell here if a process of `host` runs; `here` is this host's name.

    It sees no process of another boot or pid namespace: machines and containers may share a host name.
    """
    is_here = host == (here or socket.gethostname()) and identity.boot_id == boot_id()
    return is_here and len({identity.pid_namespace, pid_namespace()} - {None}) < 2


def is_of_other_boot(identity: Identity, *, host: str, here: str | None = None) -> bool:
    """Whether a process of `host` has this host's name, `here`, and belongs to another boot than this one.

    It has ended with an earlier boot of this machine, or it belongs to another machine with this host name.
    """
    return host == (here or socket.gethostname()) and identity.boot_id != boot_id()


def find(identity: Identity) -> psutil.Process | None:
    """The running process, None when it has ended (a zombie has)."""
    if identity.boot_id != boot_id():
        return None
    try:
        process = psutil.Process(identity.pid)
        is_same = identity.is_same(identify(process)) and process.status() != psutil.STATUS_ZOMBIE
        return process if is_same else None
    except psutil.Error:
        return None


def is_running(identity: Identity) -> bool:
    """Whether the process still runs on this machine."""
    return find(identity) is not None


def runs_on(identity: Identity, *, host: str, here: str | None = None) -> bool | None:
    """Whether a process of `host` still runs; None where this process cannot see it."""
    return is_running(identity) if is_visible(identity, host=host, here=here) else None


def age_of(identity: Identity) -> float | None:
    """Seconds since the process's start in this boot; None where the system does not report it."""
    ticks = identity.start_ticks
    if ticks is None or identity.boot_id != boot_id() or not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def start_ticks_of(pid: int) -> int | None:
    """Clock ticks from the boot to the process's start; None where the system does not report it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name, in parentheses, may hold anything; behind it the start is the twentieth field.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    return None


def identify(process: psutil.Process) -> Identity | None:
    """The identity of a running process, None when it has ended meanwhile."""
    try:
        start = process.create_time()
        ticks = start_ticks_of(process.pid)
        return Identity(
            pid=process.pid,
            process_start=start,
            boot_id=boot_id(),
            start_ticks=ticks,
            pid_namespace=pid_namespace(),
        )
    except psutil.Error:
        return None


def current_identity() -> Identity:
    """The identity of this process."""
    identity = identify(psutil.Process())
    assert identity is not None
    return identity
