"""README and docs: their length and width, their links, their commands, and figures that stand twice."""

import re
from pathlib import Path

import pytest

from tests.cli.test_every_command import CALLS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
DOCUMENTS = (*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")))
WIDTH, README_LINES = 100, 120


def prose_of(path: Path) -> list[str]:
    """The lines of a document that are neither code nor rows of a table."""
    lines, is_code = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith(("    ", "|")):
            lines.append(line)
    return lines


def anchor_of(heading: str) -> str:
    """The anchor that a page of the repository gives to a heading."""
    words = re.sub(r"[^\w\s-]", "", heading.lower().replace("`", ""))
    return re.sub(r"\s", "-", words.strip())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_wrapped(path: Path) -> None:
    long = [line for line in prose_of(path) if len(line) > WIDTH and not has_long_word(line)]
    assert not long


def has_long_word(line: str) -> bool:
    """Whether a line holds what cannot be broken: a link, or a long span of code."""
    words = re.sub(r"`[^`]*`", lambda span: span[0].replace(" ", "_"), line).split()
    return max(map(len, words)) > WIDTH - 40


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= README_LINES


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        headings = (
            re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        )
        if not target.exists() or (anchor and anchor not in map(anchor_of, headings)):
            broken.append(link)
    assert not broken


def test_the_readmes_figures_stand_in_the_benchmarks() -> None:
    figures = re.compile(r"[0-9]+\.[0-9]+(?: \([^)]*\))?")
    rows = {
        line.split("|")[1].partition(":")[0].strip(): figures.findall(line)
        for line in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    }
    text = README.read_text(encoding="utf-8")
    shown = [line for line in text.splitlines() if line.startswith("| ") and figures.search(line)]
    assert len(shown) >= 3
    for line in shown:
        assert figures.findall(line) == rows[line.split("|")[1].strip()][: len(figures.findall(line))], line


def test_the_page_of_commands_has_every_command() -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert [name for name in {call.split()[0] for call in CALLS} if f"quartet {name}" not in text] == []
