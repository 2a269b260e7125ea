"""One tuner a run folder."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from quartet_plugin.errors import ConfigError, ExitCode, StorageError
from quartet_plugin.launchers.running_process import boot_id
from quartet_plugin.protocol.environment import EXPIRY_S
from quartet_plugin.trial.lease import Lease, renewal_of

HOLD = """
import sys, time
from pathlib import Path
from quartet_plugin.trial.lease import Lease
lease = Lease.acquire(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def change_lock(folder: Path, **changes: Any) -> None:
    """Make the lock say something else."""
    path = folder / "lock.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_row_30_a_second_tuner_is_told_who_holds_the_run(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        for takeover in (False, True):
            with pytest.raises(StorageError) as caught:
                Lease.acquire(tmp_path, takeover=takeover)
            assert f"process {process.pid} on {socket.gethostname()}" in str(caught.value)
            assert caught.value.exit_code is ExitCode.STORAGE
    finally:
        process.kill()
        process.wait()
    with Lease.acquire(tmp_path) as lease:
        assert lease.generation == 2
    assert not (tmp_path / "lock.json").exists()


def test_it_is_renewed_for_whoever_asks_often(tmp_path: Path) -> None:
    now = [0.0]
    with Lease.acquire(tmp_path, renew_s=10.0, clock=lambda: now[0]) as lease:
        os.utime(tmp_path / "lock.json", (0, 0))
        lease.keep()
        assert renewal_of(tmp_path) == 0
        now[0] = 10.0
        lease.keep()
        assert renewal_of(tmp_path) != 0


def test_row_28_a_trial_goes_on_while_the_lease_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise StorageError("lock.json: cannot be written: Input/output error")

    with Lease.acquire(tmp_path, renew_s=0.0) as lease:
        with monkeypatch.context() as failing:
            failing.setattr("quartet_plugin.trial.lease.write_json_atomic", fail)
            lease.keep_if_writable()
            with pytest.raises(StorageError, match="Input/output error"):
                lease.keep()
        os.utime(tmp_path / "lock.json", (0, 0))
        lease.keep_if_writable()
        assert renewal_of(tmp_path) != 0
        change_lock(tmp_path, generation=2)
        with pytest.raises(StorageError, match="writes nothing more"):
            lease.keep_if_writable()
        change_lock(tmp_path, generation=1)


def test_it_is_given_back_and_taken_again(tmp_path: Path) -> None:
    with Lease.acquire(tmp_path) as lease:
        lease.check()
        lease.renew()
        written = json.loads((tmp_path / "lock.json").read_text())
        assert written["pid"] == os.getpid()
        assert written["boot_id"] == boot_id()
        with pytest.raises(StorageError):
            Lease.acquire(tmp_path)
    with Lease.acquire(tmp_path) as lease:
        assert lease.generation == 1


def test_another_hosts_lease_needs_expiry_and_the_word(tmp_path: Path) -> None:
    Lease.acquire(tmp_path)
    change_lock(tmp_path, host="elsewhere")
    assert_needs_expiry_and_the_word(tmp_path, holder=r"process \d+ on elsewhere")


def assert_needs_expiry_and_the_word(folder: Path, *, holder: str) -> None:
    """The first lease is refused to others with its holder, and given up once it is old and they say so."""
    with pytest.raises(StorageError, match=holder):
        Lease.acquire(folder, takeover=True)
    old = time.time() - 1000
    os.utime(folder / "lock.json", (old, old))
    with pytest.raises(StorageError, match="--takeover"):
        Lease.acquire(folder)
    assert Lease.acquire(folder, takeover=True).generation == 2


def test_a_holder_in_another_container_needs_expiry_and_the_word(tmp_path: Path) -> None:
    """It has this host's name, and no process with its pid is to be seen."""
    Lease.acquire(tmp_path)
    namespace = json.loads((tmp_path / "lock.json").read_text())["pid_namespace"]
    change_lock(tmp_path, pid=2**30, pid_namespace=namespace + 1)
    assert_needs_expiry_and_the_word(tmp_path, holder="in another container, renewed")


class Waiting:
    """A clock that sleeps move on; `on_sleep` is called in each."""

    def __init__(self, on_sleep: Callable[[], None] = lambda: None) -> None:
        self.now_s = 0.0
        self.said: list[str] = []
        self._on_sleep = on_sleep

    def acquire(self, folder: Path, **options: Any) -> Lease:
        return Lease.acquire(
            folder, clock=lambda: self.now_s, sleep=self._sleep, say=self.said.append, **options
        )

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self._on_sleep()


def held_by_another_boot(folder: Path, *, renewed_s: float) -> Path:
    """The lock of a folder that this host held in another boot, renewed so many seconds from now."""
    Lease.acquire(folder)
    change_lock(folder, boot_id="another")
    renewed_at = time.time() + renewed_s
    os.utime(folder / "lock.json", (renewed_at, renewed_at))
    return folder / "lock.json"


def test_a_holder_before_a_reboot_is_waited_for_and_replaced(tmp_path: Path) -> None:
    """Nobody has to help; also where the clock was set back since its latest renewal."""
    held_by_another_boot(tmp_path, renewed_s=1e6)
    waiting = Waiting()
    assert waiting.acquire(tmp_path).generation == 2
    assert EXPIRY_S < waiting.now_s <= EXPIRY_S + 2.0
    (said,) = waiting.said
    assert f"process {os.getpid()} on {socket.gethostname()}, before a reboot of this machine or now" in said
    assert "waits up to 120 s" in said


def test_a_holder_before_a_reboot_is_replaced_at_once_where_its_lease_has_expired(tmp_path: Path) -> None:
    held_by_another_boot(tmp_path, renewed_s=-1000.0)
    waiting = Waiting()
    assert waiting.acquire(tmp_path).generation == 2
    assert (waiting.now_s, waiting.said) == (0.0, [])


@pytest.mark.parametrize("takeover", [False, True])
def test_a_holder_that_renews_on_another_machine_with_this_host_name_is_not_replaced(
    tmp_path: Path, takeover: bool
) -> None:
    lock = held_by_another_boot(tmp_path, renewed_s=1e6)
    renewed_at = lock.stat().st_mtime + 20.0
    waiting = Waiting(lambda: os.utime(lock, (renewed_at, renewed_at)))
    with pytest.raises(StorageError, match="on another machine with this host name, renewed 0 s ago"):
        waiting.acquire(tmp_path, takeover=takeover)
    assert 0.0 < waiting.now_s < EXPIRY_S
    assert json.loads(lock.read_text())["boot_id"] == "another"


def test_a_holder_that_gives_the_run_back_is_waited_for_no_longer(tmp_path: Path) -> None:
    lock = held_by_another_boot(tmp_path, renewed_s=1e6)
    waiting = Waiting(lambda: lock.unlink(missing_ok=True))
    assert waiting.acquire(tmp_path).generation == 1
    assert waiting.now_s < EXPIRY_S


def test_row_34_a_lock_from_the_future_is_not_expired(tmp_path: Path) -> None:
    Lease.acquire(tmp_path)
    change_lock(tmp_path, host="elsewhere")
    ahead = time.time() + 1e6
    os.utime(tmp_path / "lock.json", (ahead, ahead))
    with pytest.raises(StorageError):
        Lease.acquire(tmp_path, takeover=True)


def test_row_34_a_clock_that_is_set_makes_no_holder_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lease.acquire(tmp_path):
        create_time = psutil.Process.create_time
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + 3600.0)
        with pytest.raises(StorageError, match="another tuner holds this run"):
            Lease.acquire(tmp_path)


def test_a_lock_of_an_older_version_is_read(tmp_path: Path) -> None:
    lease = Lease.acquire(tmp_path)
    old = json.loads((tmp_path / "lock.json").read_text())
    del old["start_ticks"], old["pid_namespace"]
    (tmp_path / "lock.json").write_text(json.dumps(old))
    with pytest.raises(StorageError, match="another tuner holds this run"):
        Lease.acquire(tmp_path)
    assert lease.generation == 1


@pytest.mark.parametrize("changes", [{"start_ticks": 5}, {"process_start": 5.0, "start_ticks": None}])
def test_a_pid_that_is_used_again_is_a_dead_holder(tmp_path: Path, changes: dict[str, Any]) -> None:
    Lease.acquire(tmp_path)
    change_lock(tmp_path, **changes)
    assert Lease.acquire(tmp_path).generation == 2


def test_row_32_a_tuner_that_wakes_up_after_a_takeover_writes_nothing(tmp_path: Path) -> None:
    first = Lease.acquire(tmp_path, renew_s=0.0)
    first.check()
    change_lock(tmp_path, start_ticks=5)
    second = Lease.acquire(tmp_path)
    for write in (first.check, first.renew):
        with pytest.raises(StorageError, match="writes nothing more"):
            write()
    first.release()
    second.check()
    second.release()
    with pytest.raises(StorageError, match="nobody"):
        second.check()


@pytest.mark.parametrize("fault", [ConfigError("cannot be written: No such file"), FileNotFoundError("gone")])
def test_row_32_a_fault_of_a_replaced_tuner_is_told_as_its_replacement(
    tmp_path: Path, fault: Exception
) -> None:
    """What it was writing into is gone because the next tuner removed it, not by the user's fault."""
    lease = Lease.acquire(tmp_path)
    change_lock(tmp_path, generation=2)
    with pytest.raises(StorageError, match="it writes nothing more") as caught, lease:
        raise fault
    assert caught.value.__context__ is fault
    assert json.loads((tmp_path / "lock.json").read_text())["generation"] == 2


def test_a_fault_of_the_holder_is_told_as_it_is(tmp_path: Path) -> None:
    """And the run is given back."""
    with pytest.raises(ConfigError, match="no such plan"), Lease.acquire(tmp_path):
        raise ConfigError("no such plan")
    assert not (tmp_path / "lock.json").exists()


def test_of_many_at_once_one_gets_it(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(4)
    ]
    try:
        said = [process.stdout.readline() for process in processes if process.stdout is not None]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert said.count("held\n") == 1


def test_a_broken_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text("{")
    with pytest.raises(Exception, match=r"lock\.json"):
        Lease.acquire(tmp_path)
    with pytest.raises(StorageError):
        Lease.acquire(tmp_path / "nowhere")
