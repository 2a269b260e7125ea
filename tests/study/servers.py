"""A PostgreSQL server and an Optuna gRPC proxy of the tests' own, on loopback, gone when the tests are."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.ports import free_port

PASSWORD = "s3cret/p@ss:word"  # needs quoting in a URL
ADVICE = "run `bash tools/system_packages.sh`, which installs what the tests need"
_START_S = 60.0


def postgres_program(name: str) -> str:
    """The newest installed program of PostgreSQL."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: path.parts[4])
    program = str(found[-1]) if found else shutil.which(name)
    assert program is not None, f"{name} is not installed: {ADVICE}"
    return program


@dataclass
class Postgres:
    """A server with its data in `folder`; it refuses to run as root, so an ordinary user runs it."""

    folder: Path
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        """With the password."""
        return f"postgresql://tuner:{quote(PASSWORD, safe='')}@127.0.0.1:{self.port}/postgres"

    def make(self) -> None:
        """Make the data, with a password for every connection."""
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        self._give(self.folder)
        self._give(secret)
        words = ["--username=tuner", f"--pwfile={secret}", "--auth=scram-sha-256", "--no-sync", "--locale=C"]
        self._run([postgres_program("initdb"), "-D", str(self.folder / "data"), *words])

    def start(self) -> None:
        """Start it and wait until it answers."""
        words = [postgres_program("postgres"), "-D", str(self.folder / "data"), "-p", str(self.port)]
        for setting in (
            "listen_addresses=127.0.0.1",
            f"unix_socket_directories={self.folder}",
            "fsync=off",
            "shared_buffers=16MB",
            "max_connections=20",
        ):
            words += ["-c", setting]
        self.process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", **_ordinary_user()
        )
        wait_for_port(self.port, self.process)
        self._wait_until_ready()

    def stop(self) -> None:
        """End it at once, as a machine that is lost would."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(timeout=_START_S)
            self.process = None

    def _wait_until_ready(self) -> None:
        import psycopg

        end = time.monotonic() + _START_S
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def _run(self, words: list[str]) -> None:
        done = subprocess.run(words, capture_output=True, text=True, cwd="/", timeout=120, **_ordinary_user())
        assert done.returncode == 0, done.stderr

    def _give(self, path: Path) -> None:
        user = _ordinary_user().get("user")
        if user is not None:
            shutil.chown(path, user=str(user))


def _ordinary_user() -> dict[str, Any]:
    """Keywords that start a process as another user, where this one is root."""
    return {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """A server that runs."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="quartet-pg-", dir=parent))
    server = Postgres(folder=folder)
    try:
        server.make()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Proxy:
    """Optuna's gRPC proxy in a process of its own, over a SQLite file or a URL."""

    storage: str
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        """The address for `study.storage`."""
        return f"grpc://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it listens."""
        code = (
            "import sys, optuna; from optuna.storages import get_storage, run_grpc_proxy_server as run; "
            "run(get_storage(sys.argv[1]), host='127.0.0.1', port=int(sys.argv[2]))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, self.storage, str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for_port(self.port, self.process)

    def stop(self) -> None:
        """End it at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=_START_S)
            self.process = None


def wait_for_port(port: int, process: "subprocess.Popen[bytes]") -> None:
    """Wait until something listens."""
    end = time.monotonic() + _START_S
    while True:
        assert process.poll() is None, f"{process.args!r} ended with {process.returncode}"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert time.monotonic() < end, f"nothing listened on port {port}"
        time.sleep(0.05)
