"""The process that holds ssh connections, with the nodes' own program in the place of ssh."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from quartet_plugin.launchers.connected_node import MODULE, OTHER_255
from quartet_plugin.launchers.ssh import FAN_OUT, ssh_words

# The second request to end is one too many.
TRAINING = """
import signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *ignored: asked.append(1))
print("begun", flush=True)
while not asked:
    time.sleep(0.02)
time.sleep(0.4)
print("saved", flush=True)
sys.exit(9 if len(asked) > 1 else 0)
"""


def holder(folder: Path, argv: list[str]) -> "subprocess.Popen[bytes]":
    """One host's connection, where nodes that outlive another's failure get no time."""
    request = {
        "argv": argv,
        "env": dict(os.environ),
        "cwd": str(folder),
        "nodes": ["localhost"],
        "ssh": [[sys.executable, "-m", MODULE]],
        "folder": str(folder),
    }
    code = f"import sys, {FAN_OUT} as held; held._GRACE_S = 0.0; sys.exit(held.main())"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps(request).encode())
    process.stdin = None
    return process


def test_a_command_that_is_asked_to_end_takes_its_time(tmp_path: Path) -> None:
    process = holder(tmp_path, [sys.executable, "-c", TRAINING])
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, b"saved\n")


def test_no_command_ends_as_a_lost_connection_does(tmp_path: Path) -> None:
    process = holder(tmp_path, ["bash", "-c", "exit -1"])
    assert process.wait(timeout=30) == OTHER_255
    assert not list(tmp_path.iterdir())


def test_the_hosts_shell_splits_no_path() -> None:
    words = ssh_words("h", config=None, python="/home/me/my envs/bin/python")
    command = " ".join(words[words.index("h") + 1 :])
    assert shlex.split(command) == ["exec", "/home/me/my envs/bin/python", "-m", MODULE]
