"""Trains the cases of tests/megatron/runtime/test_training.py, and writes the matrix of docs/gpu.md.

    python -m tools.training_matrix FOLDER [--run] [--most N]

FOLDER has what pytest printed, a log a run. With `--run` the cases that have not passed in one of them run
first, N of them at most, so that a run that was ended goes on; an empty FOLDER begins anew. The table stands
between the two marks of the document. Exits 1 while a case has not passed.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tools.kept_tests import ROOT, collected, kept_states, logs_in, run_left, time_of

DOCUMENT = ROOT / "docs" / "gpu.md"
TESTS = "tests/megatron/runtime/test_training.py"
BEGIN, END = "<!-- matrix: made by tools/training_matrix.py -->", "<!-- end of the matrix -->"
_CASE = re.compile(r".*::(test_\w+)\[(.+)\]")


def cases_of(tests: Iterable[str]) -> list[str]:
    """The trainings among the tests of the file."""
    return [test for test in tests if _CASE.fullmatch(test)]


def _case(test: str) -> tuple[str, str]:
    """Process groups and name of a case."""
    match = _CASE.fullmatch(test)
    assert match is not None
    return ("as strict as NCCL" if "nccl" in match[1] else "gloo"), match[2]


def table(states: Mapping[str, str], *, days: Sequence[str]) -> str:
    """The matrix as Markdown, and a line with the cases that failed; `days` are those of the runs."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for test, state in states.items():
        group, name = _case(test)
        layers = "Transformer Engine's, as a stand-in" if "engine" in name else "Megatron's local"
        rows.setdefault((layers, group), Counter())[state] += 1
    lines = [
        f"Made on {' to '.join(sorted({min(days), max(days)}))} by `make training-matrix`.",
        "",
        "| layers | process groups | cases | passed | failed | not run |",
        "|---|---|---|---|---|---|",
    ]
    for (layers, group), counts in sorted(rows.items()):
        num_failed = counts["FAILED"] + counts["ERROR"]
        lines.append(
            f"| {layers} | {group} | {counts.total()} | {counts['PASSED']} | {num_failed} | {counts['']} |"
        )
    failed = [_case(test) for test, state in states.items() if state in ("FAILED", "ERROR")]
    if failed:
        lines += ["", f"Failed: {', '.join(f'{name} ({group})' for group, name in failed)}."]
    return "\n".join(lines)


def main() -> None:
    """Train what has not passed, and replace the table of the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--most", type=int, metavar="N", help="of the cases that are left; all by default")
    options = parser.parse_args()
    cases = cases_of(collected("-m", "", TESTS))
    if options.run:
        run_left(cases, options.folder, most=options.most)
    found, logs = kept_states(cases, options.folder), logs_in(options.folder)
    if not any(found.values()):
        raise SystemExit(f"{options.folder}: no case has run; see what pytest printed there")
    days = [f"{time_of(path)[0]:%Y-%m-%d}" for path in logs]
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table(found, days=days)}\n{END}{after}", encoding="utf-8")
    counts = Counter(state or "not run" for state in found.values())
    print(", ".join(f"{count} {state.lower()}" for state, count in sorted(counts.items())))
    raise SystemExit(int(counts["PASSED"] < len(found)))


if __name__ == "__main__":
    main()
