"""Runs of pytest whose results are kept, so that a run that was ended goes on with the tests that are left.

A folder has what pytest printed, a log a run, and each run adds one. A test has the state of its last run; an
empty folder begins anew.
"""

import datetime
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_STATES = r"(PASSED|FAILED|ERROR|SKIPPED)"
_ID = r"(tests/\S+?\.py::.+?)"
# With workers the state comes first, without them the test.
_RESULT = re.compile(rf"\b{_STATES} {_ID}\s*$|^{_ID} {_STATES}\b")
_BEGIN = "%Y%m%d-%H%M%S"
_TIMEOUT_S = 900
_WORKERS = ("--numprocesses", "2", "--dist", "worksteal")


def collected(*words: str) -> list[str]:
    """The tests that pytest finds with these words, by its own names of them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", *words]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line for line in printed.splitlines() if re.fullmatch(_ID, line)]


def states_of(tests: Iterable[str], logs: Iterable[str]) -> dict[str, str]:
    """The last state of every test in logs, the oldest first: pytest's word, or empty if it has not run."""
    states = dict.fromkeys(tests, "")
    for line in (line for log in logs for line in log.splitlines()):
        match = _RESULT.search(line)
        if match is not None:
            test, state = match[2] or match[3], match[1] or match[4]
            if test in states:
                states[test] = state
    return states


def is_left(state: str) -> bool:
    """Whether a test of that state has to run."""
    return state not in ("PASSED", "SKIPPED")


def logs_in(folder: Path) -> list[Path]:
    """The logs of a folder, the oldest first."""
    return sorted(folder.glob("*.log"))


def kept_states(tests: Iterable[str], folder: Path) -> dict[str, str]:
    """The last state of every test in the logs of a folder."""
    return states_of(tests, (path.read_text(errors="replace") for path in logs_in(folder)))


def run_left(tests: Sequence[str], folder: Path, *, most: int | None) -> None:
    """Run the tests that have not passed in the logs of a folder, `most` of them; None: all."""
    left = [test for test, state in kept_states(tests, folder).items() if is_left(state)]
    if left:
        run(left[:most], folder=folder, timeout_s=_TIMEOUT_S)


def run(tests: Sequence[str], *, folder: Path, timeout_s: int) -> None:
    """Run tests, two at a time, into a log of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "", "--verbose", "--timeout", str(timeout_s), *_WORKERS]
    with (folder / f"{datetime.datetime.now():{_BEGIN}}.log").open("xb") as log:
        print(f"{len(tests)} tests into {log.name}", flush=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([*command, *tests], cwd=ROOT, stdout=log, stderr=log, env=environment)
        try:
            process.wait()
        except KeyboardInterrupt:
            process.wait()  # the terminal interrupts pytest, too, which ends what its tests have started
            raise


def time_of(log: Path) -> tuple[datetime.datetime, float]:
    """When a run began, and its length in s."""
    begin = datetime.datetime.strptime(log.stem, _BEGIN)
    return begin, log.stat().st_mtime - begin.timestamp()
