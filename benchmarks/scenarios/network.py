"""Network namespaces behind links of limited bandwidth, joined by a bridge. Needs root, `ip` and `tc`."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

PREFIX = "quartet"
_NAMES = "abcdefgh"


def namespace(index: int, *, prefix: str = PREFIX) -> str:
    """The name of a namespace."""
    return f"{prefix}-{_NAMES[index]}"


def interface(index: int, *, prefix: str = PREFIX) -> str:
    """The name of the link in a namespace."""
    return f"{namespace(index, prefix=prefix)}-0"


def address(index: int) -> str:
    """The address of a namespace."""
    return f"10.77.13.{index + 1}"


def _run(*words: str, check: bool = True) -> None:
    subprocess.run(words, check=check, capture_output=not check)


@contextlib.contextmanager
def joined_namespaces(
    rates: Sequence[str],
    *,
    prefix: str = PREFIX,
    burst: str = "128kb",
    frame_bytes: int = 1500,
    window_bytes: int | None = None,
) -> Iterator[None]:
    """A namespace for each of `rates` (as tc writes them, each way); this process in the first.

    Their names begin with `prefix`, so that two programs may have some at a time. A link that has been idle
    lets `burst` through at once; rates count headers, one a frame. A connection has at most `window_bytes`
    under way, None for what Linux grants. Raises ValueError for more than 8. All are removed at the end.
    """
    if not 2 <= len(rates) <= len(_NAMES):
        raise ValueError(f"rates: {len(rates)}; must be from 2 to {len(_NAMES)}")
    _remove(len(rates), prefix)
    try:
        _make(rates, prefix=prefix, burst=burst, frame_bytes=frame_bytes)
        if window_bytes is not None:
            _bound_windows(len(rates), prefix, window_bytes)
        with (
            Path("/proc/self/ns/net").open("rb") as own,
            Path("/run/netns", namespace(0, prefix=prefix)).open("rb") as first,
        ):
            os.setns(first.fileno(), os.CLONE_NEWNET)
            try:
                yield
            finally:
                os.setns(own.fileno(), os.CLONE_NEWNET)
    finally:
        _remove(len(rates), prefix)


def _make(rates: Sequence[str], *, prefix: str, burst: str, frame_bytes: int) -> None:
    bridge = f"{prefix}-bridge"
    inside_bridge = ("ip", "netns", "exec", bridge)
    _run("ip", "netns", "add", bridge)
    _run(*inside_bridge, "ip", "link", "add", "bridge", "type", "bridge")
    _run(*inside_bridge, "ip", "link", "set", "bridge", "mtu", str(frame_bytes), "up")
    for index, rate in enumerate(rates):
        name, port = namespace(index, prefix=prefix), f"port-{index}"
        device = interface(index, prefix=prefix)
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", device, "netns", name, "type", "veth",
             "peer", "name", port, "netns", bridge)  # fmt: skip
        _run(*inside_bridge, "ip", "link", "set", port, "master", "bridge")
        inside = ("ip", "netns", "exec", name)
        _run(*inside, "ip", "address", "add", f"{address(index)}/24", "dev", device)
        _run(*inside, "ip", "link", "set", "lo", "up")
        for where, end in ((inside, device), (inside_bridge, port)):
            _run(*where, "ip", "link", "set", end, "mtu", str(frame_bytes), "up")
            _run(*where, "tc", "qdisc", "add", "dev", end, "root", "tbf",
                 "rate", rate, "burst", burst, "latency", "50ms")  # fmt: skip


def _bound_windows(count: int, prefix: str, window_bytes: int) -> None:
    sizes = f"4096 {window_bytes} {window_bytes}"
    for index in range(count):
        inside = ("ip", "netns", "exec", namespace(index, prefix=prefix))
        _run(*inside, "sysctl", "-qw", f"net.ipv4.tcp_rmem={sizes}", f"net.ipv4.tcp_wmem={sizes}")


def _remove(count: int, prefix: str) -> None:
    for name in (f"{prefix}-bridge", *(namespace(index, prefix=prefix) for index in range(count))):
        _run("ip", "netns", "delete", name, check=False)
