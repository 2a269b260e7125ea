"""README and docs: their length and width, their links, their commands, and figures that stand twice."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from quartet_plugin.cli.main import build_app
from tests.cli.test_every_command import CALLS
from tests.test_names import EMPTY_PHRASES, RELATIVE_CLAUSES, retired_names

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
DOCUMENTS = (*sorted(ROOT.glob("*.md")), ROOT / "patches" / "README.md", *sorted(DOCS.rglob("*.md")))
# What every programmer reads without a glossary, and names that are written in capitals.
COMMON = {"API", "CPU", "CSV", "CUDA", "GB", "GPU", "HTML", "HTTP", "JSON", "JWT", "LLM", "MPI", "SVG", "URL"}
COMMON |= {"UTF", "YAML", "SIGHUP", "SIGINT", "SIGKILL", "SIGTERM", "SIGUSR"}
NAMES = {"BLOOM", "DGX", "GPT", "JAX", "NVIDIA", "OPT"}
WIDTH, CELL, README_LINES = 100, 80, 120


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


def cells_of(line: str) -> list[str]:
    """The cells of a table's row as a reader sees them: without the addresses of links and marks of code."""
    cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    return [re.sub(r"\]\([^)]*\)", "]", cell).replace("`", "").strip(" []") for cell in cells]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_cell_of_a_table_is_wide(path: Path) -> None:
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    wide = [cell for row in rows for cell in cells_of(row) if len(cell) > CELL]
    assert not wide, f"cells of more than {CELL} characters: use another row, or a sentence"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_document_has_an_empty_phrase_or_a_retired_name(path: Path) -> None:
    text = path.read_text(encoding="utf-8").partition("## Retired names")[0]
    names = {name for name in retired_names() if re.search(rf"`{name}`", text)}
    assert not names
    joined = " ".join(text.split())
    assert not EMPTY_PHRASES.findall(joined)
    assert not RELATIVE_CLAUSES.findall(joined)


def has_long_word(line: str) -> bool:
    """Whether a line holds what cannot be broken: a link, or a long span of code."""
    words = re.sub(r"`[^`]*`", lambda span: span[0].replace(" ", "_"), line).split()
    return max(map(len, words)) > WIDTH - 40


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= README_LINES


def abbreviations_in(text: str) -> set[str]:
    """The words of two capitals or more in the prose and tables of a page, without plurals and numbers."""
    text = re.sub(r"```.*?```|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|\w+\.(?:yaml|json|md)\b|\w+://\S+", " ", text)
    return set(re.findall(r"(?<![\w/-])[A-Z]{2,}(?=s?\b|\d)", text))


def placeholders() -> set[str]:
    """The words that stand for an argument in the commands and file names of the documents."""
    texts = [path.read_text(encoding="utf-8") for path in DOCUMENTS]
    said = [word for path in DOCUMENTS for word in commands_in(path)]
    said += [name for text in texts for name in re.findall(r"\b[A-Z]+\.(?:yaml|json)\b", text)]
    return {word for line in said for word in re.findall(r"[A-Z]{2,}", line)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_abbreviation_is_in_the_glossary_or_spelled_out(path: Path) -> None:
    glossary = (DOCS / "glossary.md").read_text(encoding="utf-8")
    defined = abbreviations_in(" ".join(re.findall(r"\*\*([^*]+)\*\*", glossary)))
    text = path.read_text(encoding="utf-8")
    unknown = abbreviations_in(text) - defined - COMMON - NAMES - placeholders()
    assert {word for word in unknown if not re.search(rf"\({word}\)|\b{word} \([a-z]", text)} == set()


def test_an_undefined_abbreviation_is_seen() -> None:
    text = "The WXYs of `QRS` and [a](LINK.md) page, GPT-175B on TP2.\n\n    VUT\n\n| KLM | |\n"
    assert abbreviations_in(text) == {"WXY", "GPT", "TP", "KLM"}


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


def test_the_page_of_commands_has_every_command() -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert [name for name in {call.split()[0] for call in CALLS} if f"quartet {name}" not in text] == []


def commands_in(path: Path) -> list[str]:
    """Every `quartet ...` of a document: the lines of its code, and its spans of code."""
    text = path.read_text(encoding="utf-8")
    spans = [" ".join(span.split()) for span in re.findall(r"`(quartet [^`]+)`", text)]
    lines = [line.strip() for line in text.splitlines() if line.startswith(("    ", "quartet "))]
    # What follows a literal -- is another program's, and a remark or a pipe is the shell's.
    said = [*spans, *(line for line in lines if line.startswith("quartet "))]
    return [re.split(r" -- | --$|  +#| \| (?!\w+\])| && ", command)[0] for command in said]


@cache
def options_by_command() -> dict[str, set[str]]:
    """The long and short options of each command."""
    group: Any = typer.main.get_command(build_app())
    common = {"--help", "-h", "--debug"}
    known = {"": common | {option for parameter in group.params for option in parameter.opts}}
    for name in {call.split()[0] for call in CALLS}:
        command = group.commands[name]
        for path, found in [(name, command), *_below(name, command)]:
            known[path] = common | {option for parameter in found.params for option in parameter.opts}
            known[path] |= {option for parameter in found.params for option in parameter.secondary_opts}
    return known


def _below(name: str, group: Any) -> list[tuple[str, Any]]:
    return [(f"{name} {word}", command) for word, command in getattr(group, "commands", {}).items()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_document_have_their_options(path: Path) -> None:
    known, wrong = options_by_command(), []
    for command in commands_in(path):
        words = command.split()[1:]
        name = next((name for name in (" ".join(words[:2]), " ".join(words[:1])) if name in known), "")
        # Of a group named alone, and of several commands at once, every option below it counts.
        taken = set().union(
            *(known[other] for other in known if other == name or other.startswith(f"{name} "))
        )
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join(words)))
        if words and not name and re.fullmatch(r"[a-z]+", words[0]):
            wrong.append(f"{command}: no such command")
        wrong += [f"{command}: {option}" for option in sorted(named - taken)]
    assert not wrong, "\n".join(wrong)


def test_the_list_of_nightly_tests_has_every_file_with_one() -> None:
    text = (DOCS / "contributing" / "index.md").read_text(encoding="utf-8")
    _, _, text = text.partition("## What runs nightly\n")
    listed = set(re.findall(r"`([\w/]+)`", text.partition("\n## ")[0]))
    tests = ROOT / "tests"
    marked = {
        str(path.relative_to(tests).with_suffix(""))
        for path in tests.rglob("test_*.py")
        if re.search(r"mark\.nightly", path.read_text(encoding="utf-8"))
    }
    assert marked - listed == set()
    assert {name for name in listed if "/" in name and not (tests / f"{name}.py").is_file()} == set()
