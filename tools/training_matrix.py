"""Writes the matrix of docs/gpu.md from the log of tests/megatron/runtime/test_training.py.

    python tools/training_matrix.py CASES LOG [--date YYYY-MM-DD]

CASES is what `pytest --collect-only -q` prints, LOG what `pytest --verbose` prints, also of a run that was
ended early. The table stands between the two marks of the document.
"""

import argparse
import datetime
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- matrix: made by tools/training_matrix.py -->", "<!-- end of the matrix -->"
_CASE = re.compile(r"test_training\.py::(test_\w+)\[([^\]]+)\]")
_STATE = re.compile(r"\b(PASSED|FAILED|ERROR)\b")


def states_of(cases: str, log: str) -> dict[tuple[str, str], str]:
    """The state of every case, by process groups and name: PASSED, FAILED, ERROR, or empty if not run."""
    states = {_key(*match.groups()): "" for match in _CASE.finditer(cases)}
    for line in log.splitlines():
        case, state = _CASE.search(line), _STATE.search(line)
        if case is not None and state is not None and _key(*case.groups()) in states:
            states[_key(*case.groups())] = state[1]
    return states


def _key(test: str, name: str) -> tuple[str, str]:
    return ("as strict as NCCL" if "nccl" in test else "gloo"), name


def table(states: dict[tuple[str, str], str], *, date: str) -> str:
    """The matrix as Markdown, and a line with the cases that failed."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for (group, name), state in states.items():
        layers = "Transformer Engine's, as a stand-in" if "engine" in name else "Megatron's local"
        rows.setdefault((layers, group), Counter())[state] += 1
    lines = [
        f"Made on {date} by `make training-matrix`.",
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


def main() -> None:
    """Replace the table of the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    options = parser.parse_args()
    states = states_of(options.cases.read_text(), options.log.read_text(errors="replace"))
    if not any(states.values()):
        raise SystemExit(f"{options.log}: no case has run; see what pytest printed there")
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}\n{table(states, date=options.date)}\n{END}{after}"
    DOCUMENT.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
