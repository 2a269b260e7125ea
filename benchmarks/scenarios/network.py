"""Two network namespaces joined by a link of limited bandwidth. Needs root, `ip` and `tc`."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

NAMESPACES = ("quartet-a", "quartet-b")
ADDRESSES = ("10.77.13.1", "10.77.13.2")


def _run(*words: str, check: bool = True) -> None:
    subprocess.run(words, check=check, capture_output=not check)


@contextlib.contextmanager
def two_namespaces(*, rate: str) -> Iterator[None]:
    """The two namespaces, this process in the first; `rate` as tc writes it, each way. Removed at the end."""
    _remove()
    try:
        _make(rate)
        with (
            Path("/proc/self/ns/net").open("rb") as own,
            Path("/run/netns", NAMESPACES[0]).open("rb") as first,
        ):
            os.setns(first.fileno(), os.CLONE_NEWNET)
            try:
                yield
            finally:
                os.setns(own.fileno(), os.CLONE_NEWNET)
    finally:
        _remove()


def _make(rate: str) -> None:
    devices = [f"{name}-0" for name in NAMESPACES]
    for name in NAMESPACES:
        _run("ip", "netns", "add", name)
    _run("ip", "link", "add", devices[0], "netns", NAMESPACES[0], "type", "veth",
         "peer", "name", devices[1], "netns", NAMESPACES[1])  # fmt: skip
    for name, device, address in zip(NAMESPACES, devices, ADDRESSES, strict=True):
        inside = ("ip", "netns", "exec", name)
        _run(*inside, "ip", "address", "add", f"{address}/24", "dev", device)
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(*inside, "ip", "link", "set", device, "up")
        _run(*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf",
             "rate", rate, "burst", "128kb", "latency", "50ms")  # fmt: skip


def _remove() -> None:
    for name in NAMESPACES:
        _run("ip", "netns", "delete", name, check=False)
