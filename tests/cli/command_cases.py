"""Runs `quartet` many times from one process that has its modules already: a fork a case, several at once.

It is started as a program: cases come as JSON on the standard input, results go as JSON to its output.
"""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NUM_AT_ONCE = 3
WARM = (
    ("schedule", "list", "--devices", "2", "--microbatches", "2"),
    ("schedule", "search", "costs.json", "-o", "warm.json", "--evaluations", "20"),
    ("explain", "plan.json"),
    ("trials", "run"),
    ("report", "run", "-o", "warm.html"),
    ("plan", "job.yaml", "-o", "warm.json"),
    ("predict", "rows.json", "-o", "warm-predictions.json"),
    ("partition", "list"),
    ("tune", "--help"),
)
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call: its words, the encoding and error handler of its streams, the columns of its terminal.

    It gets a Ctrl-C `interrupt_s` after it has begun, but not before its own answer to one is in place; with
    `is_head` its reader leaves after the first line.
    """

    words: tuple[str, ...]
    encoding: str = "utf-8"
    errors: str = "strict"
    columns: int = 80
    interrupt_s: float | None = None
    is_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The exit code of a case, and what it wrote, as text of its encoding."""

    code: int
    output: str
    error: str


def run_cases(cases: Sequence[Case], *, folder: Path) -> list[Result]:
    """The results of the cases, each run in `folder`."""
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps([asdict(case) for case in cases]),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "NO_COLOR": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [Result(**result) for result in json.loads(done.stdout)]


@dataclass(slots=True, kw_only=True)
class _Child:
    case: Case
    pid: int
    output: io.FileIO
    error: io.FileIO
    reading: int | None
    began_s: float
    is_interrupted: bool = False


def _begin(case: Case, folder: Path, index: int) -> _Child:
    output, error = (io.FileIO(folder / f"{index}.{name}", "w+") for name in ("out", "err"))
    reading, writing = os.pipe() if case.is_head else (None, output.fileno())
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pid = os.fork()
    if not pid:
        if reading is not None:
            os.close(reading)
        _call(case, writing, error.fileno())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if reading is not None:
        os.close(writing)
    began_s = time.monotonic()
    return _Child(case=case, pid=pid, output=output, error=error, reading=reading, began_s=began_s)


def _call(case: Case, output: int, error: int) -> None:
    """The child's whole life: `quartet` as its console script calls it."""
    code: Any = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(error, 2)
        os.environ["COLUMNS"] = str(case.columns)
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb"), encoding=case.encoding, errors=case.errors)
        sys.stderr = io.TextIOWrapper(
            os.fdopen(2, "wb"), encoding=case.encoding, errors="backslashreplace", line_buffering=True
        )
        sys.argv = ["quartet", *case.words]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _unblock_at_next_handler()
        from quartet_plugin.cli.main import entry

        entry()
    except SystemExit as ended:
        # A Ctrl-C that comes now is raised by the next call, and changes nothing.
        code = ended.code
        sys.stderr.flush()
    except BaseException as failure:
        os.write(2, f"Traceback: {failure!r}\n".encode())
    finally:
        try:
            os._exit(code)
        finally:
            os._exit(1)


def _unblock_at_next_handler() -> None:
    """Let a Ctrl-C in as soon as `entry` has its handler: this process may have to wait long before that."""
    install = signal.signal

    def installing(signalnum: int, handler: Any) -> Any:
        signal.signal = install
        before = install(signalnum, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return before

    signal.signal = installing


def _look(child: _Child) -> Result | None:
    """The result of a child that has ended; sends what is due."""
    case, elapsed_s = child.case, time.monotonic() - child.began_s
    if child.reading is not None:
        first = b""
        while not first.endswith(b"\n") and (more := os.read(child.reading, 1)):
            first += more
        os.close(child.reading)
        child.reading = None
        child.output.write(first)
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if pid:
        texts = []
        for stream in (child.output, child.error):
            stream.seek(0)
            texts.append(stream.read().decode(case.encoding, errors="surrogateescape"))
            stream.close()
        return Result(code=os.waitstatus_to_exitcode(status), output=texts[0], error=texts[1])
    if case.interrupt_s is not None and not child.is_interrupted and elapsed_s >= case.interrupt_s:
        child.is_interrupted = True
        os.kill(child.pid, signal.SIGINT)
    if elapsed_s > DEADLINE_S:
        os.kill(child.pid, signal.SIGKILL)
    return None


def _next_case(waiting: list[tuple[int, Case]], running: dict[int, _Child]) -> tuple[int, Case] | None:
    """The first case whose words no running one has: a command may hold a lease on what it reads."""
    busy = {child.case.words for child in running.values()}
    return next((entry for entry in waiting if entry[1].words not in busy), None)


def _main() -> None:
    import contextlib
    import tempfile

    from quartet_plugin.cli.main import main

    # Modules and compiled functions are loaded here, once.
    for words in WARM:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            main(list(words))
    cases = [Case(**{**case, "words": tuple(case["words"])}) for case in json.load(sys.stdin)]
    results: dict[int, Result] = {}
    running: dict[int, _Child] = {}
    waiting = list(enumerate(cases))
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while len(running) < NUM_AT_ONCE and (due := _next_case(waiting, running)):
                waiting.remove(due)
                running[due[0]] = _begin(due[1], Path(folder), due[0])
            for index in list(running):
                result = _look(running[index])
                if result is not None:
                    results[index] = result
                    del running[index]
            time.sleep(0.002)
    print(json.dumps([asdict(results[index]) for index in range(len(cases))]))


if __name__ == "__main__":
    _main()
