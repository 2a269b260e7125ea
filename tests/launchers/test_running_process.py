"""A process is known by pid, start and boot."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from quartet_plugin.launchers.running_process import (
    age_of,
    boot_id,
    current_identity,
    identify,
    is_of_other_boot,
    is_running,
    is_visible,
    pid_namespace,
    runs_on,
    start_ticks_of,
)
from quartet_plugin.protocol.process_identity import Identity


@pytest.fixture
def mine() -> Iterator[Identity]:
    """The identity of a process that sleeps."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        identity = identify(psutil.Process(process.pid))
        assert identity is not None
        yield identity
    finally:
        process.kill()
        process.wait()


def test_a_process_that_has_ended_does_not_run_though_nobody_has_waited_for_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify(psutil.Process(process.pid))
    assert identity is not None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert not is_running(identity)
    finally:
        process.wait()


def test_row_34_an_age_is_by_no_clock_that_can_be_set() -> None:
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        identity = identify(psutil.Process(process.pid))
        assert identity is not None
        age_s = age_of(identity)
        assert age_s is not None
        assert 0 <= age_s <= time.monotonic() - began + 1
        assert age_of(replace(identity, boot_id="another")) is None
    finally:
        process.kill()
        process.wait()


def test_starts_without_ticks_are_compared_in_seconds(mine: Identity) -> None:
    """What another version wrote down, and systems that do not count them."""
    old = replace(mine, start_ticks=None)
    assert is_running(old)
    assert not is_running(replace(old, process_start=old.process_start + 5))
    assert start_ticks_of(2**30) is None


def test_this_process_is_itself() -> None:
    me = current_identity()
    assert is_running(me)
    assert me.boot_id == boot_id()
    assert me.process_start <= time.time() + 1


def test_a_process_of_another_container_or_host_is_not_visible() -> None:
    me = current_identity()
    assert me.pid_namespace is not None
    assert me.pid_namespace == pid_namespace()
    contained = replace(me, pid_namespace=me.pid_namespace + 1)
    assert is_visible(me, host="a", here="a")
    assert not is_visible(me, host="b", here="a")
    assert not is_visible(contained, host="a", here="a")
    assert runs_on(me, host="a", here="a") is True
    assert runs_on(contained, host="a", here="a") is None


def test_a_process_of_another_boot_is_not_visible() -> None:
    """It ended with this machine's earlier boot, or another machine has this host name."""
    me, here = current_identity(), socket.gethostname()
    other = replace(me, boot_id="another")
    assert not is_visible(other, host="a", here="a")
    assert runs_on(other, host="a", here="a") is None
    assert not is_running(other)
    assert is_of_other_boot(other, host=here)
    assert not is_of_other_boot(me, host=here)
    assert not is_of_other_boot(other, host=f"not-{here}")


def test_a_process_of_an_earlier_version_is_visible() -> None:
    assert is_visible(replace(current_identity(), pid_namespace=None), host="a", here="a")
