"""The laws of docs/glossary.md that a program can hold, over the syntax tree of every file of the package."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "quartet_plugin"
# Words that say nothing of what they name.
WITHOUT_CONTENT = frozenset({"found", "one", "at", "it", "own", "what", "told", "mine", "ours"})
# Phrases after which a reader asks which one, who, or how many; "that one" where no noun or clause follows,
# "us" but for microseconds.
EMPTY_PHRASES = re.compile(
    r"\b(?:so many|our|ours|we|that one(?=[.,;:)]|$)|(?:until|than|as) that one)\b|(?<=[a-z] )us\b",
    re.IGNORECASE,
)
# Of documents also "what ... where ..." in one clause.
RELATIVE_CLAUSES = re.compile(r"\bwhat (?:[\w`'-]+ ){1,8}where\b", re.IGNORECASE)
# Parts that both adapters have, under one name.
ADAPTER_TWINS = frozenset({"WeightGradients", "ParityMeter", "Seam"})
ADAPTERS = ("megatron", "deepspeed")


@cache
def trees() -> dict[Path, ast.Module]:
    """Every file of the package with its syntax tree."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def defined_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name that a file gives to a variable, parameter, function, class or attribute, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield (node.id if isinstance(node, ast.Name) else node.attr), node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def retired_names() -> set[str]:
    """The left column of the glossary's table of retired names."""
    table = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Retired names")[2]
    rows = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_names_have_content() -> None:
    without = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in trees().items()
        for name, line in defined_names(tree)
        if name.strip("_") in WITHOUT_CONTENT
    ]
    assert not without, "\n".join(without)


def test_public_classes_are_defined_once() -> None:
    places: dict[str, list[str]] = {}
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    several = {name: paths for name, paths in places.items() if len(paths) > 1}
    twins = {name: several.pop(name) for name in ADAPTER_TWINS & set(several)}
    assert not several
    for name, paths in twins.items():
        assert {path.split("/")[0] for path in paths} == set(ADAPTERS), name


def test_the_listed_twins_are_twins() -> None:
    names = [node.name for tree in trees().values() for node in tree.body if isinstance(node, ast.ClassDef)]
    assert {name for name in ADAPTER_TWINS if names.count(name) != 2} == set()


def test_retired_names_are_not_defined() -> None:
    retired = retired_names()
    assert len(retired) > 20
    defined = {
        node.name: path.relative_to(ROOT)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in retired
    }
    assert not defined


@pytest.mark.parametrize(
    "document", sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
)
def test_documents_name_files_that_are_there(document: str) -> None:
    """A path of the package or of its tests, benchmarks and tools in backquotes is a file or a folder."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    rooms = "|".join(
        sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name.isidentifier())
    )
    paths = re.findall(rf"`((?:{rooms})/[\w/.]*)`", text)
    places = (PACKAGE, ROOT / "tests")
    missing = [
        path
        for path in paths
        if not any((folder / name).exists() for folder in places for name in (path, f"{path}.py"))
    ]
    assert not missing


def texts_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every docstring and every other text of several words of a file, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def test_no_text_has_an_empty_phrase() -> None:
    empty = [
        f"{path.relative_to(ROOT)}:{line}: {EMPTY_PHRASES.findall(text)}"
        for path, tree in trees().items()
        for line, text in texts_of(tree)
        if EMPTY_PHRASES.search(text)
    ]
    assert not empty, "\n".join(empty)


def test_an_empty_phrase_is_seen() -> None:
    for wrong in ("it waits until that one has ended", "Take that one.", "so many layers", "without us"):
        assert EMPTY_PHRASES.search(wrong), wrong
    for right in ("bytes that one device sends", "iterations that one of them needs", "up to 50 us"):
        assert not EMPTY_PHRASES.search(right), right
    assert RELATIVE_CLAUSES.search("It prints what a layer keeps where it can.")
    assert not RELATIVE_CLAUSES.search("It says what a layer keeps; where it can, it prints.")


def test_every_public_thing_has_a_docstring() -> None:
    """Each module, public class and public function of a module: two words or more, and an end."""
    wrong = []
    for path, tree in trees().items():
        public = [
            node
            for node in tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        ]
        for node in (tree, *public):
            text = ast.get_docstring(node) or ""
            first = text.split("\n\n")[0].strip()
            if not re.match(r"[\w`\"(*\[]", first) or len(first.split()) < 2 or first[-1] not in ".:;!?)`":
                wrong.append(f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}: {first[:60]!r}")
    assert not wrong, "\n".join(wrong)
