"""Tunes and trains every release, and writes the matrix of docs/support.md from what the tests saw.

    python tools/support_matrix.py FOLDER [--run] [--release NAME ...]

FOLDER has a file a release: the states of its axes and the day. With `--run` the tests of
tests/megatron/test_releases.py are run first, one release after the other, but for those that FOLDER has. The
table stands between the two marks of the document; a row that FOLDER has nothing newer for is kept.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "support.md"
TESTS = "tests/megatron/test_releases.py"
BEGIN, END = "<!-- matrix: made by tools/support_matrix.py -->", "<!-- end of the matrix -->"
AXES = ("split", "degrees", "micro_batch", "mapping", "custom_schedules")
COLUMNS = (*AXES, "date")


def run_release(name: str, *, has_gate: bool, folder: Path) -> bool:
    """Run the tests of one release; its file appears where all of them have passed."""
    tests = [f"{TESTS}::test_it_is_tuned_over_native_axes_and_trains_with_a_plan[{name}]"]
    if has_gate:
        tests.append(f"{TESTS}::test_custom_schedules_pass_the_gate[{name}]")
    part = folder / "running"
    part.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "pytest", "-m", "nightly", "--timeout", "7200", *tests]
    code = subprocess.run(
        words, cwd=ROOT, env={**os.environ, "QUARTET_MATRIX": str(part)}, check=False
    ).returncode
    result = part / f"{name}.json"
    if code == 0 and result.exists():
        result.replace(folder / result.name)
    return code == 0


def table(rows: dict[str, list[str]]) -> str:
    """The matrix as Markdown; an axis that no trial of the test changed is a dash."""
    lines = [
        "Made by the tests that ran on the day of each row.",
        "",
        f"| Megatron | {' | '.join(column.replace('_', ' ') for column in COLUMNS)} |",
        f"|---|{'---|' * len(COLUMNS)}",
    ]
    lines += [f"| {release} | {' | '.join(cells)} |" for release, cells in sorted(rows.items())]
    return "\n".join(lines)


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of a table, by release."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| ") and len(cells) == len(COLUMNS) + 1 and cells[0] != "Megatron":
            rows[cells[0]] = cells[1:]
    return rows


def update(text: str, states: dict[str, dict[str, str]]) -> str:
    """The document with the rows of `states` in its table."""
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    new = {name: [state.get(column, "-") for column in COLUMNS] for name, state in states.items()}
    return f"{before}{BEGIN}\n{table({**rows_of(old), **new})}\n{END}{after}"


def main() -> None:
    """Run what is asked for, and replace the table of the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--release", action="append", help="these alone, again where they have run")
    options = parser.parse_args()
    failed = []
    if options.run:
        sys.path.insert(0, str(ROOT))
        from tests.megatron.clones import VARIANTS

        for name in options.release or VARIANTS:
            if options.release or not (options.folder / f"{name}.json").exists():
                has_gate = VARIANTS[name].state == "works"
                if not run_release(name, has_gate=has_gate, folder=options.folder.resolve()):
                    failed.append(name)
    states = {path.stem: json.loads(path.read_text()) for path in options.folder.glob("*.json")}
    if states:
        DOCUMENT.write_text(update(DOCUMENT.read_text(encoding="utf-8"), states), encoding="utf-8")
    if failed or not states:
        raise SystemExit(f"{options.folder}: without a result: {', '.join(failed) or 'every release'}")


if __name__ == "__main__":
    main()
