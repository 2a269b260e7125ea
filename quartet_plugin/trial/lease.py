"""The lease of a run folder: one tuner holds it at a time, and a replaced tuner writes nothing more.

`lock.json` names the holder (docs/formats.md) and counts generations. Its age is measured by the file
server's own clock, as the difference of two modification times in the same folder.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from quartet_plugin.errors import QuartetError, StorageError
from quartet_plugin.launchers.running_process import current_identity, is_of_other_boot, runs_on
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import dump
from quartet_plugin.protocol.attempt_files import read_shared
from quartet_plugin.protocol.environment import EXPIRY_S, LEASE_RENEWAL_S
from quartet_plugin.protocol.process_identity import Holder

LOCK_NAME = "lock.json"

_GUARD_NAME = ".lock.guard"
_GUARD_WAIT_S = 30.0
_LOOK_S = 1.0


class LeaseLostError(StorageError):
    """Another process holds the lease now; this process may write nothing more."""


class Lease:
    """The right to write into a run folder; `acquire` one, `renew` it, `check` before every write."""

    def __init__(self, folder: Path, holder: Holder, *, clock: Callable[[], float], renew_s: float) -> None:
        self._folder = folder
        self._holder = holder
        self._clock = clock
        self._renew_s = renew_s
        self._renewed_s = clock()

    @classmethod
    def acquire(
        cls,
        folder: Path,
        *,
        takeover: bool = False,
        expiry_s: float = EXPIRY_S,
        renew_s: float = LEASE_RENEWAL_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = lambda _: None,
    ) -> "Lease":
        """Take the run folder.

        A holder whose process has provably ended (same host, boot and pid namespace, and no such process) is
        replaced at once. A holder of another boot with this host's name is replaced once it has not renewed
        for `expiry_s`, which is waited for; `say` gets a line about that. Any other holder is replaced only
        with `takeover`, once it has not renewed for `expiry_s`. Raises StorageError naming the holder.
        """
        silent = _await_other_boot(folder, expiry_s=expiry_s, clock=clock, sleep=sleep, say=say)
        with _guard(folder):
            before = read_holder(folder)
            generation = 1
            if before is not None:
                if silent is None or renewal_of(folder) != silent:
                    _refuse_living(folder, before, takeover=takeover, expiry_s=expiry_s)
                generation = before.generation + 1
            process = asdict(current_identity())
            holder = Holder(**process, host=socket.gethostname(), generation=generation)
            if before is None:
                _create(folder, holder)
            else:
                write_json_atomic(folder / LOCK_NAME, dump(holder))
        return cls(folder, holder, clock=clock, renew_s=renew_s)

    @property
    def generation(self) -> int:
        """The number of times that the run has been taken, this lease included."""
        return self._holder.generation

    def check(self) -> None:
        """Raise LeaseLostError when another tuner holds the run now: a tuner that was stopped and woke up
        must not write. Renews the lease every `renew_s`.
        """
        self._verify()
        self.keep()

    def keep(self) -> None:
        """Renew the lease if `renew_s` have passed since the last renewal; no file is read otherwise."""
        if self._clock() - self._renewed_s >= self._renew_s:
            self.renew()

    def keep_if_writable(self) -> None:
        """As `keep` during a trial, whose own watch limits how long its files may be away.

        What cannot be recorded now is tried again at the next call. Raises LeaseLostError alone.
        """
        try:
            self.keep()
        except LeaseLostError:
            raise
        except StorageError:
            pass

    def renew(self) -> None:
        """Record that this tuner lives.

        Raises LeaseLostError when another tuner holds the run now, StorageError where it cannot be recorded.
        """
        with _guard(self._folder):
            self._verify()
            write_json_atomic(self._folder / LOCK_NAME, dump(self._holder))
        self._renewed_s = self._clock()

    def release(self) -> None:
        """Give the run back; no effect when another tuner holds it."""
        with _guard(self._folder):
            if read_holder(self._folder) == self._holder:
                (self._folder / LOCK_NAME).unlink(missing_ok=True)

    def __enter__(self) -> "Lease":
        """Held until the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the run back. Raises StorageError in place of a fault of a tuner that was replaced.

        The tuner that holds the run now may have removed what this one was writing: the fault that
        this one sees (a missing folder) says nothing of the user's place.
        """
        if isinstance(fault, QuartetError | OSError):
            self._verify()
        self.release()

    def _verify(self) -> None:
        now = read_holder(self._folder)
        if now != self._holder:
            who = "nobody" if now is None else str(now)
            raise LeaseLostError(
                f"{self._folder / LOCK_NAME}: the run is held by {who} now, not by this tuner; it writes "
                "nothing more"
            )


def renewal_of(folder: Path) -> int | None:
    """When the lease was last renewed, in ns by the server's clock; None where nobody holds it."""
    with contextlib.suppress(OSError):
        return (folder / LOCK_NAME).lstat().st_mtime_ns
    return None


def read_holder(folder: Path) -> Holder | None:
    """The holder that lock.json names, None without one. Raises QuartetError where it cannot be read."""
    try:
        return read_shared(Holder, folder / LOCK_NAME, max_bytes=64 * 1024)
    except FileNotFoundError:
        return None


def _await_other_boot(
    folder: Path,
    *,
    expiry_s: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    say: Callable[[str], None],
) -> int | None:
    """The latest renewal, in ns, of a holder of another boot whose lease has expired; None for other holders.

    A holder that renews meanwhile lives, on another machine with this host's name.
    """
    with _guard(folder):
        holder = read_holder(folder)
        if holder is None or not is_of_other_boot(holder, host=holder.host):
            return None
        renewal, wait_s = renewal_of(folder), expiry_s - age_s(folder / LOCK_NAME)
    if wait_s >= 0:
        say(
            f"{folder}: held by {holder}, before a reboot of this machine or now on another machine with "
            f"this host name; waits up to {wait_s:.0f} s for its lease to expire"
        )
    # By this process's clock: a lock from the future, written before a clock was set, never gets old.
    end_s = clock() + wait_s
    while clock() <= end_s:
        if renewal_of(folder) != renewal:
            return None
        sleep(_LOOK_S)
    return renewal


def _refuse_living(folder: Path, holder: Holder, *, takeover: bool, expiry_s: float) -> None:
    is_alive = runs_on(holder, host=holder.host)
    if is_alive is False:
        return
    silent_s = age_s(folder / LOCK_NAME)
    if takeover and silent_s > expiry_s:
        return
    fix = "wait for it, stop it, run trials for it with --join, or choose another run folder"
    if silent_s > expiry_s:
        fix = "end it, or add --takeover if it can no longer run"
    elif takeover:
        fix = f"it can be taken over {expiry_s - silent_s:.0f} s from now unless it renews"
    who = str(holder)
    if is_of_other_boot(holder, host=holder.host):
        who += ", on another machine with this host name"
    elif is_alive is None and holder.host == socket.gethostname():
        who += ", in another container"
    raise StorageError(f"{folder}: another tuner holds this run: {who}, renewed {silent_s:.0f} s ago; {fix}")


def age_s(path: Path) -> float:
    """Seconds since a file was written, by the clock of its file server alone; never negative.

    Raises StorageError where it is not there, or where nothing can be written beside it.
    """
    probe = path.with_name(f".age.{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, b".")
            now = os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
            probe.unlink(missing_ok=True)
        return max(0.0, now - path.lstat().st_mtime)
    except OSError as error:
        raise StorageError(f"{path.parent}: cannot be written: {error.strerror}") from error


def _create(folder: Path, holder: Holder) -> None:
    """Write the first lock atomically, and never over an existing lock."""
    draft = folder / f".lock.{secrets.token_hex(4)}.draft"
    try:
        write_json_atomic(draft, dump(holder))
        os.link(draft, folder / LOCK_NAME)
    except FileExistsError as error:
        raise StorageError(f"{folder}: another tuner has just taken this run") from error
    except OSError as error:
        raise StorageError(f"{folder / LOCK_NAME}: cannot be created: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def _guard(folder: Path) -> Iterator[None]:
    """A block for one process at a time; the system ends it when the process dies. The file stays, empty."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(folder / _GUARD_NAME, flags, 0o600)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written: {error.strerror}") from error
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    end = time.monotonic() + _GUARD_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                return  # a file system without locks: the exclusive creation and the checks remain
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES) or time.monotonic() > end:
                raise StorageError(f"{folder}: its lock cannot be acquired: {error.strerror}") from error
            time.sleep(0.02)
