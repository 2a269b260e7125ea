"""Writes the matrix of docs/support.md from what the tests of tests/megatron/test_releases.py left.

    python tools/support_matrix.py FOLDER [--date YYYY-MM-DD]

FOLDER has a file a release: the states of its axes. The table stands between the two marks of the document.
"""

import argparse
import datetime
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- matrix: made by tools/support_matrix.py -->", "<!-- end of the matrix -->"
AXES = ("split", "degrees", "micro_batch", "mapping", "custom_schedules")


def table(states: dict[str, dict[str, str]], *, date: str) -> str:
    """The matrix as Markdown; an axis that no trial of the test changed is a dash."""
    lines = [
        f"Made on {date} by the tests that ran.",
        "",
        f"| Megatron | {' | '.join(axis.replace('_', ' ') for axis in AXES)} |",
        f"|---|{'---|' * len(AXES)}",
    ]
    for release, axes in sorted(states.items()):
        lines.append(f"| {release} | {' | '.join(axes.get(axis, '-') for axis in AXES)} |")
    return "\n".join(lines)


def main() -> None:
    """Replace the table of the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    options = parser.parse_args()
    states = {path.stem: json.loads(path.read_text()) for path in options.folder.glob("*.json")}
    if not states:
        raise SystemExit(
            f"{options.folder}: holds no result; run the tests with QUARTET_MATRIX={options.folder}"
        )
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}\n{table(states, date=options.date)}\n{END}{after}"
    DOCUMENT.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
