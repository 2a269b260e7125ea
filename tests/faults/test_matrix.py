"""docs/faults.md: a line for every row, and every test that it names is there."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUM_ROWS = 44
_ROW = re.compile(r"^- \*\*(\d+)\. (.+?)\*\*: (.+?) \*Shown by\* (.+?)$", re.MULTILINE)
_TEST = re.compile(r"`([a-z_0-9/]+)::([a-z_0-9A-Z]+)`")


@cache
def names_in(path: Path) -> frozenset[str]:
    """The functions, classes and names of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in tree.body:
        places = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        names |= {place.id for place in places if isinstance(place, ast.Name)}
    return frozenset(names)


def rows() -> dict[int, tuple[str, str, str]]:
    """The list of docs/faults.md: fault, answer and tests of each row."""
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").replace("\n  ", " ")
    return {int(match[1]): (match[2], match[3], match[4]) for match in _ROW.finditer(text)}


def test_every_row_has_a_line() -> None:
    assert list(rows()) == list(range(1, NUM_ROWS + 1))


def test_every_line_names_its_tests_or_why_there_is_none() -> None:
    for number, (_, _, shown) in rows().items():
        assert _TEST.search(shown) or shown.startswith("not here: "), number


def test_every_test_that_is_named_exists() -> None:
    found = [(number, *pair) for number, row in rows().items() for pair in _TEST.findall(row[2])]
    assert len(found) >= NUM_ROWS
    for number, file, name in found:
        path = ROOT / "tests" / f"{file}.py"
        assert path.is_file(), f"row {number}: {file}"
        assert name in names_in(path), f"row {number}: {file}::{name}"
