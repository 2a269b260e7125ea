"""The process on this host that holds an attempt's ssh connections, one a node; it outlives the tuner.

Its request comes on the standard input. The first node that fails ends the others, within seconds. Where
SIGTERM asks for the end instead, the command takes its time: who asks is there to kill it.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from quartet_plugin.launchers.connected_node import TERMINATE, close, send, start_command

# The file with the hosts that could not be reached, beside the attempt's output.
UNREACHED_FILE = "unreached-hosts.json"
# What ssh itself ends with where it has no connection (ssh(1), EXIT STATUS); no command does.
NO_CONNECTION = 255
_GRACE_S = 5.0
_POLL_S = 0.05


def main() -> int:
    """Start the command on every host, and wait for its end."""
    request: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    connections: list[subprocess.Popen[bytes]] = []
    is_asked = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        del number, frame
        is_asked = True

    signal.signal(signal.SIGTERM, end)
    for index in range(len(request["nodes"])):
        words = [*request["ssh"][index]]
        connection = subprocess.Popen(words, stdin=subprocess.PIPE)
        connections.append(connection)
        start_command(connection, request, index=index)
    begun_s: float | None = None
    while any(connection.poll() is None for connection in connections):
        has_failed = any(connection.poll() for connection in connections)
        if (is_asked or has_failed) and begun_s is None:
            begun_s = time.monotonic()
            for connection in connections:
                send(connection, TERMINATE)
        if begun_s is not None and not is_asked and time.monotonic() > begun_s + _GRACE_S:
            for connection in connections:
                close(connection)
        time.sleep(_POLL_S)
    codes = [connection.returncode for connection in connections]
    unreached = [name for name, code in zip(request["nodes"], codes, strict=True) if code == NO_CONNECTION]
    if unreached:
        (Path(request["folder"]) / UNREACHED_FILE).write_text(json.dumps(unreached))
    return max(code if code >= 0 else 128 - code for code in codes)


if __name__ == "__main__":
    sys.exit(main())
