"""TCP ports for what tests start, which nothing else takes before it listens.

The kernel gives connections ports from 32768 on, and Quartet takes its own from 20000 on. These lie below,
and every worker of pytest-xdist has a part of them.
"""

import contextlib
import os
import random
import socket
from collections import deque

_PORTS = range(10_000, 20_000)
_MAX_TRIES = 1000
# Tests seed the common generator: two test runs at once would choose alike.
_draw = random.SystemRandom()
_latest: deque[int] = deque(maxlen=200)


def free_port() -> int:
    """A port that nothing uses, and that was not given a short time ago."""
    return free_ports(1).start


def free_ports(number: int) -> range:
    """The same for several ports in a row."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % count
    size = len(_PORTS) // count
    for _ in range(_MAX_TRIES):
        first = _PORTS[worker * size + _draw.randrange(size - number + 1)]
        ports = range(first, first + number)
        if not set(ports) & set(_latest) and _are_free(ports):
            _latest.extend(ports)
            return ports
    raise AssertionError(f"no {number} free ports from {_PORTS[0]} to {_PORTS[-1]}")


def _are_free(ports: range) -> bool:
    with contextlib.ExitStack() as stack:
        try:
            for port in ports:
                stack.enter_context(socket.socket()).bind(("", port))
        except OSError:
            return False
    return True
