"""Trains the cases of tests/megatron/runtime/test_training.py, and writes the matrix of docs/gpu.md.

    python tools/training_matrix.py FOLDER [--run] [--most N]

FOLDER has what pytest printed, a log a run. With `--run` the cases that have not passed in one of them run
first, N of them at most, so that a run that was ended goes on; an empty FOLDER begins anew. The table stands
between the two marks of the document. Exits 1 while a case has not passed.
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "gpu.md"
TESTS = "tests/megatron/runtime/test_training.py"
BEGIN, END = "<!-- matrix: made by tools/training_matrix.py -->", "<!-- end of the matrix -->"
_CASE = re.compile(r"\S*test_training\.py::(test_\w+)\[([^\]]+)\]")
_STATE = re.compile(r"\b(PASSED|FAILED|ERROR)\b")
_WORKERS = ("--numprocesses", "2", "--dist", "worksteal")

# Process groups and name of a case.
type Case = tuple[str, str]


def cases_of(collected: str) -> dict[Case, str]:
    """Every case of what `pytest --collect-only -q` prints, with its words for pytest."""
    return {_case(match): match[0] for match in _CASE.finditer(collected)}


def states_of(cases: Iterable[Case], logs: Iterable[str]) -> dict[Case, str]:
    """The last state of every case in logs, the oldest first: PASSED, FAILED, ERROR, or empty if not run."""
    states = dict.fromkeys(cases, "")
    for line in (line for log in logs for line in log.splitlines()):
        case, state = _CASE.search(line), _STATE.search(line)
        if case is not None and state is not None and _case(case) in states:
            states[_case(case)] = state[1]
    return states


def _case(match: re.Match[str]) -> Case:
    return ("as strict as NCCL" if "nccl" in match[1] else "gloo"), match[2]


def table(states: Mapping[Case, str], *, days: Sequence[str]) -> str:
    """The matrix as Markdown, and a line with the cases that failed; `days` are those of the runs."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for (group, name), state in states.items():
        layers = "Transformer Engine's, as a stand-in" if "engine" in name else "Megatron's local"
        rows.setdefault((layers, group), Counter())[state] += 1
    lines = [
        f"Made on {' to '.join(sorted({min(days), max(days)}))} by `make training-matrix`.",
        "",
        "| layers | process groups | cases | passed | failed | not run |",
        "|---|---|---|---|---|---|",
    ]
    for (layers, group), counts in sorted(rows.items()):
        failed = counts["FAILED"] + counts["ERROR"]
        lines.append(
            f"| {layers} | {group} | {counts.total()} | {counts['PASSED']} | {failed} | {counts['']} |"
        )
    failed_cases = [
        f"{name} ({group})" for (group, name), state in states.items() if state in ("FAILED", "ERROR")
    ]
    if failed_cases:
        lines += ["", f"Failed: {', '.join(failed_cases)}."]
    return "\n".join(lines)


def collected() -> str:
    """What pytest says of the cases."""
    words = [sys.executable, "-m", "pytest", "-m", "", "--collect-only", "--quiet", TESTS]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def logs_in(folder: Path) -> list[Path]:
    """The logs of a folder, the oldest first."""
    return sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)


def run(words: Sequence[str], *, folder: Path) -> None:
    """Train cases, two at a time, into a log of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "", "--verbose", "--timeout", "900", *_WORKERS, *words]
    with (folder / f"{datetime.datetime.now():%Y%m%d-%H%M%S}.log").open("xb") as log:
        print(f"{len(words)} cases into {log.name}", flush=True)
        subprocess.run(
            command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
        )


def main() -> None:
    """Train what has not passed, and replace the table of the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--most", type=int, metavar="N", help="of the cases that are left; all by default")
    options = parser.parse_args()
    cases = cases_of(collected())

    def states() -> dict[Case, str]:
        return states_of(cases, (path.read_text(errors="replace") for path in logs_in(options.folder)))

    left = [words for case, words in cases.items() if states()[case] != "PASSED"]
    if options.run and left:
        run(left[: options.most], folder=options.folder)
    found, logs = states(), logs_in(options.folder)
    if not any(found.values()):
        raise SystemExit(f"{options.folder}: no case has run; see what pytest printed there")
    days = [datetime.date.fromtimestamp(path.stat().st_mtime).isoformat() for path in logs]
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table(found, days=days)}\n{END}{after}", encoding="utf-8")
    counts = Counter(state or "not run" for state in found.values())
    print(", ".join(f"{count} {state.lower()}" for state, count in sorted(counts.items())))
    raise SystemExit(int(counts["PASSED"] < len(found)))


if __name__ == "__main__":
    main()
