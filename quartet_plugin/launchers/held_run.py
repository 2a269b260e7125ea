"""An attempt on nodes that one process of this host holds: the end of that process ends the attempt.

The process outlives the tuner. A file beside the attempt's output says which it is and what it is connected
to, so that a later tuner finds it.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.launchers.local import open_output
from quartet_plugin.launchers.running_process import boot_id, find, identify, is_running
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import dump, parse
from quartet_plugin.protocol.process_identity import Identity

CONNECTIONS_FILE = "connections.json"
_UNKNOWN_EXIT = 1


class HeldRun:
    """The holding process as a handle. `process` is None where another process has started it."""

    def __init__(
        self, folder: Path, attempt_id: str, process: "subprocess.Popen[bytes] | None" = None
    ) -> None:
        self.attempt_id = attempt_id
        self._folder, self._process = folder, process
        self._adopted = None if process is not None else self._read_identity()

    @property
    def pid(self) -> int:
        """The process id of what holds the connections; 0 where it has ended."""
        if self._process is not None:
            return self._process.pid
        return self._adopted.pid if self._adopted is not None and is_running(self._adopted) else 0

    def poll(self) -> int | None:
        """The exit code; of what another process has started only that it has ended."""
        if self._process is not None:
            return self._process.poll()
        return None if self.pid else _UNKNOWN_EXIT

    def terminate(self) -> None:
        """Ask the command on every node to end."""
        with contextlib.suppress(psutil.Error):
            if (holder := self._holder()) is not None:
                holder.terminate()

    def kill(self) -> None:
        """Cut the connections, which ends the command on every node that notices."""
        with contextlib.suppress(psutil.Error):
            if (holder := self._holder()) is not None:
                holder.kill()

    def cut(self) -> None:
        """Cut the connections, and wait for the end of what held them."""
        self.kill()
        if self._process is not None:
            self._process.wait()
        else:
            self.await_holder(10.0)

    def await_holder(self, limit_s: float) -> None:
        """Wait at most so long for the end of what holds the connections."""
        with contextlib.suppress(psutil.Error, subprocess.TimeoutExpired):
            if (holder := self._holder()) is not None:
                holder.wait(timeout=limit_s)

    def read(self, name: str) -> Any:
        """The content of a file of the start or of the holding process; empty where there is none."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self._folder / name).read_text())
        return {}

    def _holder(self) -> "subprocess.Popen[bytes] | psutil.Process | None":
        """The process that holds the connections, if it still runs or is this tuner's child."""
        if self._process is not None:
            return self._process
        return find(self._adopted) if self._adopted is not None else None

    def _read_identity(self) -> Identity | None:
        """The holding process as the tuner that started it wrote it down; None where it did not."""
        content = self.read(CONNECTIONS_FILE)
        with contextlib.suppress(ConfigError, TypeError):
            written = {known.name: content[known.name] for known in fields(Identity) if known.name in content}
            # An earlier version wrote no boot: then this one is meant.
            return parse(Identity, {"boot_id": boot_id(), **written}, where=CONNECTIONS_FILE)
        return None


def start_held(
    module: str,
    request: Mapping[str, Any],
    *,
    env: Mapping[str, str],
    stdout: Path,
    connections: Mapping[str, Any],
    folder: Path | None = None,
    python: str | None = None,
) -> "subprocess.Popen[bytes]":
    """Start `module`, which holds the connections, with `request` on its standard input.

    `connections` goes into the file by which a later tuner ends what runs on the nodes, in `folder`, else
    beside `stdout`; `python` is another one than this. Raises InfrastructureError where the process cannot
    start.
    """
    output = open_output(stdout)
    try:
        process = subprocess.Popen(
            [python or sys.executable, "-m", module],
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise InfrastructureError(f"{module}: cannot start: {error.strerror}") from error
    finally:
        os.close(output)
    identity = identify(psutil.Process(process.pid))
    assert identity is not None  # nobody else waits for this child
    content = {"schema_version": 1, **dump(identity), **connections}
    write_json_atomic((folder or stdout.parent) / CONNECTIONS_FILE, content)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(json.dumps(request).encode())
    return process
