"""The storage of a study: SQLite or a journal file in the run folder, PostgreSQL or a gRPC proxy by URL.

Only the coordinator writes, under the run's lease. What is kept is JSON: storages that pickle are refused. A
URL's password reaches the driver alone; it is cut out of everything that is written or shown.
"""

import contextlib
import itertools
import json
import secrets
import shutil
import sqlite3
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from typing import Any, Literal
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from quartet_plugin.errors import ConfigError, InterruptedByUserError, QuartetError, StorageError
from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.model.schema import nearest_word
from quartet_plugin.protocol.masking import MASK, is_secret, masked

SQLITE, JOURNAL = "sqlite", "journal"
FORMS = "sqlite, journal, postgresql://USER@HOST/DATABASE or grpc://HOST:PORT"
SQLITE_NAME, JOURNAL_NAME, STUDY_NAME = "study.sqlite3", "study.journal", "study.json"

# How long a lost server is waited for, and between how many seconds it is asked again.
PATIENCE_S = 600.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_CONNECT_S = 10
# What a lost study is made again from, and the words for it.
Remake = Literal["folders", "log", "nothing"]
_REMAKE_WORDS: dict[Remake, str] = {"folders": "the trials' folders", "log": "events.jsonl"}
_NO_REPLAY = "a run with workers or --from does not propose the same plans again, and its log is incomplete"
# An Optuna journal's lock is held for milliseconds; an older one was left by a process that was killed.
_STALE_LOCK_S = 2.0
# A record is appended to a journal in less.
_APPEND_S = 0.5


def check_address(text: str) -> str:
    """`study.storage` as it may be used. Raises ConfigError, without the password that it may hold."""
    if text in (SQLITE, JOURNAL):
        return text
    rule = f"must be {FORMS}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"not a URL; {rule}") from error
    scheme = parts.scheme.lower()
    if scheme in ("redis", "rediss"):
        raise ConfigError("Optuna stores pickled objects in Redis, which quartet never reads; " + rule)
    if scheme == "grpc":
        if not host or port is None or parts.username or parts.path.strip("/") or parts.query:
            raise ConfigError("a proxy is given by host and port only, as in grpc://127.0.0.1:13000")
        return text
    if scheme not in ("postgresql", "postgresql+psycopg"):
        near = "" if scheme else nearest_word(text, known=(SQLITE, JOURNAL))
        raise ConfigError(f"{without_password(text)[:60]!r}; {rule}{near}")
    if not parts.path.strip("/"):
        raise ConfigError(f"{without_password(text)[:100]!r} names no database; {rule}")
    return text


def without_password(address: str) -> str:
    """The address as it may be shown; the driver then takes the password from PGPASSWORD or ~/.pgpass."""
    if "://" not in address:
        return address
    try:
        parts = urlsplit(address)
    except ValueError:
        return address.partition("://")[0] + "://..."
    user, separator, host = parts.netloc.rpartition("@")
    query = [
        (name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True) if not is_secret(name)
    ]
    netloc = f"{user.partition(':')[0]}{separator}{host}"
    return urlunsplit((parts.scheme, netloc, parts.path, urlencode(query), ""))


def passwords_of(address: str) -> tuple[str, ...]:
    """Every form in which the address's secrets could turn up in a message."""
    if "://" not in address:
        return ()
    parts = urlsplit(address)
    secrets = [value for name, value in parse_qsl(parts.query) if is_secret(name)]
    secrets.append(parts.netloc.rpartition("@")[0].partition(":")[2])
    forms = {
        form for text in secrets if text for form in (text, unquote(text), quote(unquote(text), safe=""))
    }
    return tuple(sorted(forms, key=len, reverse=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyStorage:
    """One run's study: where it is and under which name. `address` may hold a password.

    `say` gets a line for the user; `should_stop` ends the waiting for a lost server, which lasts at most
    `patience_s`. `remake` is what a lost study is made again from: the trials' `folders`, where the same
    plans would be proposed again in the same order, the `log` of the trials in events.jsonl, or `nothing`.
    """

    folder: Path
    run: str
    address: str = SQLITE
    say: Callable[[str], None] = lambda _: None
    should_stop: Callable[[], bool] = lambda: False
    patience_s: float = PATIENCE_S
    remake: Remake = "folders"
    sleep: Callable[[float], None] = time.sleep

    @property
    def file(self) -> Path | None:
        """The study's file in the run folder; None where a server keeps it."""
        names = {SQLITE: SQLITE_NAME, JOURNAL: JOURNAL_NAME}
        return self.folder / names[self.address] if self.address in names else None

    @property
    def shown(self) -> str:
        """The address that other Optuna tools take, without a password."""
        if self.address == SQLITE:
            return f"sqlite:///{self.file}"
        return str(self.file) if self.address == JOURNAL else without_password(self.address)

    @property
    def tool_line(self) -> str:
        """The line that says how other tools show the study while it runs."""
        if self.address.startswith("grpc:"):
            return f"study {self.study_name} at {self.shown}: optuna-dashboard opens the proxy's own storage"
        named = "" if self.file else f"study {self.study_name}: "
        return f"{named}`optuna-dashboard {self.shown}` shows the study in a browser"

    @property
    def study_name(self) -> str:
        """The study's name. On a server that other runs share it ends in a mark of its own."""
        if self.file is not None:
            return self.run
        try:
            content = read_json(self.folder / STUDY_NAME)
        except ConfigError as error:
            if (self.folder / STUDY_NAME).exists():
                raise
            raise StorageError(f"{self.folder / STUDY_NAME}: missing; the run has no study yet") from error
        name = content.get("study_name") if isinstance(content, dict) else None
        if not isinstance(name, str) or not 0 < len(name) <= 200:
            raise ConfigError(f"{self.folder / STUDY_NAME}: study_name: must be the study's name")
        return name

    @property
    def exists(self) -> bool:
        """Whether a study may be there: made to its end or not."""
        return (self.file or self.folder / STUDY_NAME).exists()

    def begin(self) -> None:
        """Leave nothing of a study that was not made to its end, and choose the name of a new one."""
        if self.file is not None:
            for path in (self.file, Path(f"{self.file}.lock")):
                path.unlink(missing_ok=True)
        elif not self.exists:
            name = f"{self.run}-{secrets.token_hex(4)}"
            content = {"schema_version": 1, "study_name": name, "storage": self.shown}
            write_json_atomic(self.folder / STUDY_NAME, content)

    def import_libraries(self) -> None:
        """Import the libraries of `connect`: most of the time in which a process opens its first study."""
        import optuna.storages  # noqa: F401
        import sqlalchemy.engine  # noqa: F401

        if self.address == SQLITE:
            import alembic.command  # noqa: F401

    def connect(self) -> Any:
        """Optuna's storage. Raises ConfigError where its driver is missing, StorageError when it is lost."""
        import optuna
        from sqlalchemy.engine import URL

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with self.errors(), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            if self.address == SQLITE:
                url = URL.create("sqlite", database=str(_plain(self.file)))
                return optuna.storages.RDBStorage(_for_optuna(url.render_as_string()))
            if self.address == JOURNAL:
                backend = optuna.storages.journal.JournalFileBackend(str(_plain(self.file)))
                return optuna.storages.JournalStorage(backend)
            if self.address.startswith("grpc:"):
                return self._proxy()
            return self._server()

    def check(self) -> None:
        """Raise StorageError where the study's file is damaged; cheap, and without a server's help."""
        path = self.file
        if path is None or not path.exists():
            return
        with self.errors():
            if self.address == JOURNAL:
                content = _plain(path).read_bytes()
                num_valid, num_records = _valid_journal(content)
                if num_valid < len(content) and b"\n" not in content[num_valid:]:
                    self.sleep(_APPEND_S)  # its tuner may be writing the last record
                    content = _plain(path).read_bytes()
                    num_valid, num_records = _valid_journal(content)
                if num_valid < len(content):
                    cure = self._journal_cure(content, num_valid)
                    raise StorageError(f"{path}: record {num_records + 1} is damaged; {cure}")
                return
            if damage := _damage_of(_plain(path)):
                raise StorageError(f"{path}: damaged: {damage}; {self._file_cure()}")
            try:
                with _read_only(_plain(path)) as file:
                    file.execute("SELECT COUNT(*) FROM trials").fetchone()
            except sqlite3.OperationalError as error:
                # Then its tuner is writing, or was killed in a transaction, which --resume takes back.
                if not any(word in str(error) for word in ("locked", "readonly")):
                    raise StorageError(f"{path}: not a study: {error}") from error

    def _journal_cure(self, content: bytes, num_valid: int) -> str:
        """How a journal that is damaged after its valid bytes is repaired, for the user."""
        if self.remake == "folders" or _is_torn(content, num_valid):
            return "`quartet tune --resume` truncates the file there"
        if self.remake == "log":
            return self._file_cure()
        return f"{_NO_REPLAY}; `quartet repair {self.folder}` keeps the records before it"

    def _file_cure(self) -> str:
        """How an unreadable file is repaired, for the user."""
        if self.remake == "nothing":
            return f"{_NO_REPLAY}; put a copy back, or start another run with --from {self.folder}"
        words = _REMAKE_WORDS[self.remake]
        return f"`quartet tune --resume` renames it and rebuilds the study from {words}"

    def _proxy(self) -> Any:
        import optuna

        _need("grpc", purpose="grpc://")
        parts = urlsplit(self.address)
        storage = optuna.storages.GrpcStorageProxy(host=parts.hostname or "", port=parts.port or 0)
        storage.wait_server_ready(timeout=_CONNECT_S)
        return storage

    def _server(self) -> Any:
        import optuna

        _need("psycopg", purpose="postgresql://")
        url = self.address.replace("postgresql://", "postgresql+psycopg://", 1)
        # Of a database in SQL_ASCII psycopg would give bytes where SQLAlchemy waits for text.
        arguments = {"connect_timeout": _CONNECT_S, "client_encoding": "utf8"}
        options = {"pool_pre_ping": True, "connect_args": arguments}
        return optuna.storages.RDBStorage(_for_optuna(url), engine_kwargs=options)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn the errors of Optuna and its drivers into StorageError, one line without the password."""
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import SQLAlchemyError

        kinds: tuple[type[Exception], ...] = (StorageInternalError, SQLAlchemyError, OSError)
        if "grpc" in sys.modules:
            kinds += (sys.modules["grpc"].RpcError,)
        try:
            yield
        except QuartetError:
            raise
        except Exception as error:
            if not isinstance(error, kinds) and not (self.address == JOURNAL and _is_of_journal(error)):
                raise
            raise StorageError(
                f"{self.file or self.shown}: cannot be read or written: {self._reason(error)}"
            ) from error

    def _reason(self, error: Exception) -> str:
        detail = getattr(error, "details", None)
        text = str(detail() if callable(detail) else error.__cause__ or error)
        if self.address == JOURNAL and isinstance(error, ValueError):
            text = "a record is damaged; run `quartet status` for the fix"
        return (self.scrubbed(text).splitlines() or [""])[0][:200]

    def scrubbed(self, text: str) -> str:
        """`text` without the address's password and other secrets."""
        for password in passwords_of(self.address):
            text = text.replace(password, MASK) if len(password) > 2 else text
        return masked(text)

    def patiently[T](self, action: Callable[[bool], T]) -> T:
        """`action(is_again)`, again and again while the server is lost.

        A file that fails does so for a reason that waiting does not mend. Raises the last StorageError, or
        InterruptedByUserError when asked to stop.
        """
        waited_s, wait_s = 0.0, _FIRST_WAIT_S
        while True:
            try:
                return action(waited_s > 0)
            except StorageError as error:
                if self.file is not None or waited_s >= self.patience_s:
                    raise
                if waited_s == 0:
                    self.say(f"{error}; retrying for {self.patience_s / 60:.0f} min")
            end_s = min(waited_s + wait_s, self.patience_s)
            while waited_s < end_s:
                if self.should_stop():
                    raise InterruptedByUserError(
                        "stopped while the study's storage was lost; all measurements are kept: "
                        "the same command with --resume continues"
                    )
                slice_s = min(0.5, end_s - waited_s)
                self.sleep(slice_s)
                waited_s += slice_s
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def mend(self) -> None:
        """Make a damaged file one that can be gone on with, and keep the damaged one; only under the lease.

        A journal is cut behind its last whole record: one without its end is what a killed writer leaves, and
        with it every reader fails for ever. A damaged SQLite file is put aside. What is lost with either is
        read again from the trials' folders. Raises StorageError for damage that would lose trials.
        """
        path = self.file
        if path is None or not path.exists():
            return
        with self.errors():
            if self.address == JOURNAL:
                _release_stale_lock(Path(f"{path}.lock"))
                content = path.read_bytes()
                num_valid, num_records = _valid_journal(content)
                if num_valid == len(content):
                    return
                if self.remake == "folders" or _is_torn(content, num_valid):
                    self._cut(path, num_valid, content)
                elif self.remake == "log":
                    self.put_aside("has a damaged record in the middle")
                else:
                    cure = self._journal_cure(content, num_valid)
                    raise StorageError(
                        f"{path}: record {num_records + 1} is damaged and others follow it; {cure}"
                    )
            elif damage := _damage_of(_plain(path)):
                if self.remake == "nothing":
                    raise StorageError(f"{path}: damaged: {damage}; {self._file_cure()}")
                self.put_aside(f"is damaged ({damage})")

    def repair(self) -> int:
        """Keep the journal's valid records up to the first damage; how many bytes were cut off.

        Records that are cut off are read again from the trials' folders when the run is resumed. Raises
        ConfigError where the study is no journal.
        """
        path = self.file
        if self.address != JOURNAL or path is None:
            raise ConfigError(f"study.storage: {without_password(self.address)}; only a journal is repaired")
        with self.errors():
            content = path.read_bytes()
            num_valid, _ = _valid_journal(content)
            if num_valid < len(content):
                self._cut(path, num_valid, content)
        return len(content) - num_valid

    def put_aside(self, why: str) -> None:
        """Rename the study's file, where it has one, and say why and what the study is rebuilt from."""
        path = self.file
        words = f"study {self.shown} {why}; "
        if path is not None:
            aside = _free_name(path, "damaged")
            for ending in ("", "-journal", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{path}{ending}").rename(f"{aside}{ending}")
            words = f"{path.name} {why}; renamed to {aside.name}, "
        else:
            # A server's study stays where it is, and the new one gets a name of its own.
            name = self.folder / STUDY_NAME
            name.rename(_free_name(name, "damaged"))
        self.say(f"{words}rebuilding the study from {_REMAKE_WORDS[self.remake]}")

    def _cut(self, path: Path, num_valid: int, content: bytes) -> None:
        copy = _free_name(path, "torn")
        shutil.copyfile(path, copy)
        with path.open("r+b") as file:
            file.truncate(num_valid)
        lost = len(content) - num_valid
        self.say(
            f"{path.name}: {_whereabouts(content, num_valid)}; removed {lost} bytes (copy: {copy.name}); "
            "removed trials are restored from their folders"
        )


def close(storage: Any) -> None:
    """Let go of the file or the connection of Optuna's `storage`."""
    storage.remove_session()
    for owner, end in ((getattr(storage, "engine", None), "dispose"), (storage, "close")):
        if hasattr(owner, end):
            getattr(owner, end)()


def _read_only(path: Path) -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True))


def _damage_of(path: Path) -> str | None:
    """How a SQLite file is damaged; None where it is not, or cannot be read now."""
    try:
        with _read_only(path) as file:
            findings = file.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError:
        return None
    except sqlite3.DatabaseError as error:
        return str(error)
    return None if findings == ("ok",) else str(findings[0])[:200]


def _free_name(path: Path, word: str) -> Path:
    """The first of NAME.WORD-1, NAME.WORD-2, ... that nothing has."""
    return next(
        name for number in itertools.count(1) if not (name := Path(f"{path}.{word}-{number}")).exists()
    )


def _whereabouts(content: bytes, num_valid: int) -> str:
    """Where a journal is damaged: in its last record, or before it."""
    is_torn = _is_torn(content, num_valid)
    return "the last record is incomplete" if is_torn else "a record in the middle is damaged"


def _is_torn(content: bytes, num_valid: int) -> bool:
    """Whether the bytes after the valid records are a single record, or the beginning of one."""
    return content.find(b"\n", num_valid) in (-1, len(content) - 1)


def _for_optuna(url: str) -> str:
    """The address as Optuna takes it, which fills in what stands in braces."""
    return url.replace("{", "{{").replace("}", "}}")


def _plain(path: Path | None) -> Path:
    assert path is not None
    if path.is_symlink():
        raise StorageError(f"{path}: a link; a study must be a file of its own")
    return path.absolute()


def _need(module: str, *, purpose: str) -> None:
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise ConfigError(
            f"study.storage: {purpose} needs {module}, which is not installed; "
            "pip install 'quartet-plugin[cluster]'"
        )


def _is_of_journal(error: Exception) -> bool:
    """Whether Optuna's reader of journals raised it: a record that it cannot read is a plain ValueError."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return isinstance(error, ValueError) and any(
        module.startswith("optuna.storages.journal") for module in modules
    )


def _release_stale_lock(lock: Path) -> None:
    """Remove the lock of a writer that was killed; Optuna itself would wait half a minute for it."""
    end = time.monotonic() + _STALE_LOCK_S
    while lock.is_symlink() or lock.exists():
        if time.monotonic() > end:
            lock.unlink(missing_ok=True)
            return
        time.sleep(0.05)


def _valid_journal(content: bytes) -> tuple[int, int]:
    """The number of bytes from the start that are whole records, and the number of those records."""
    start = num_records = 0
    while (end := content.find(b"\n", start)) >= 0:
        try:
            record = json.loads(content[start:end])
        except ValueError:
            break
        if not isinstance(record, dict):
            break
        start = end + 1
        num_records += 1
    return start, num_records
