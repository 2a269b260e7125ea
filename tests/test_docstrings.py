"""Every docstring says what is done or what is returned.

The docstring of a function without a result has an imperative ("Write the plan") or a verb with its subject
("The launch has ended"). A function with a result names it ("Seconds of a forward") or says what it does. The
docstring of a module has a verb in any form. No docstring says only what the names beside it say already.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docstring_words import (
    has_clause,
    has_verb,
    is_fragment,
    num_content_words,
    repeats,
    sentences_of,
)
from tests.test_names import ROOT, trees

WITHOUT_RESULT = frozenset({"None", "Never", "NoReturn"})


class Documented(NamedTuple):
    """A function or class with its place, the names that lead to it, and its docstring."""

    place: str
    names: tuple[str, ...]
    node: ast.FunctionDef | ast.ClassDef
    text: str

    @property
    def is_action(self) -> bool:
        """Whether it is a function without a result."""
        if not isinstance(self.node, ast.FunctionDef):
            return False
        return self.node.returns is None or ast.unparse(self.node.returns) in WITHOUT_RESULT

    @property
    def is_public(self) -> bool:
        """Whether no name that leads to it is private."""
        return not any(name.startswith("_") for name in self.names)


def fault_of(thing: Documented) -> str | None:
    """What is wrong with a docstring; None where nothing is."""
    if not thing.text:
        return "has no docstring" if thing.is_public else None
    if thing.is_public and num_content_words(thing.text) < 2:
        return "has one word"
    if repeats(thing.text, *thing.names):
        return "says no more than its name"
    if thing.is_action and not has_clause(thing.text):
        return "has no result and no verb that says what it does"
    if isinstance(thing.node, ast.FunctionDef) and is_fragment(sentences_of(thing.text)[0]):
        return "begins with a fragment"
    return None


def is_setter(node: ast.FunctionDef) -> bool:
    """Whether a function sets a property, whose docstring stands at its getter."""
    return any(ast.unparse(decorator).endswith(".setter") for decorator in node.decorator_list)


def documented(path: Path, node: ast.AST, names: tuple[str, ...] = ()) -> Iterator[Documented]:
    """The functions and classes below a node, without those inside of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and is_setter(child):
            continue
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = (*names, child.name)
            place = f"{path.relative_to(ROOT)}:{child.lineno}: {child.name}"
            yield Documented(place, inner, child, ast.get_docstring(child) or "")
            if isinstance(child, ast.ClassDef):
                yield from documented(path, child, inner)
        elif not isinstance(child, ast.expr):
            yield from documented(path, child, names)


def test_docstrings_say_what_is_done_or_returned() -> None:
    wrong = [
        f"{thing.place} {fault}: {thing.text[:70]!r}"
        for path, tree in trees().items()
        for thing in documented(path, tree)
        if (fault := fault_of(thing)) is not None
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_of_modules_have_a_verb() -> None:
    texts = {str(path.relative_to(ROOT)): ast.get_docstring(tree) or "" for path, tree in trees().items()}
    without = [f"{path}: {text!r}" for path, text in texts.items() if not text or not has_verb(text)]
    assert not without, "a module's docstring needs a verb:\n" + "\n".join(without)


def first_of(code: str) -> Documented:
    """The first function or class of a source text."""
    return next(documented(ROOT / "example.py", ast.parse(code)))


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (
            "def stop() -> None: 'SIGTERM to the launcher alone.'",
            "has no result and no verb that says what it does",
        ),
        ("def prepare() -> None: 'Nothing to clean up.'", "has no result and no verb that says what it does"),
        ("def stop() -> None: 'Stop.'", "has one word"),
        ("def path() -> str: 'Its folder.'", "has one word"),
        ("def plan_digest() -> str: 'The digest of the plan.'", "says no more than its name"),
        ("class PlanReader: 'Reads a plan.'", "says no more than its name"),
        ("def price() -> int: 'As the other one, faster.'", "begins with a fragment"),
        ("def price() -> int: ''", "has no docstring"),
        ("def _price() -> int: return 1", None),
        ("def stop() -> None: 'Send SIGTERM to the launcher alone.'", None),
        ("def ended() -> None: 'The launch has ended.'", None),
        ("def __init__(self) -> None: '`costs` are those of one microbatch.'", None),
        ("def plan_digest() -> str: 'The sha256 of the plan, 64 hex digits.'", None),
        ("def seconds() -> float: 'Seconds of a forward.'", None),
    ],
)
def test_what_counts_as_a_fault(code: str, fault: str | None) -> None:
    assert fault_of(first_of(code)) == fault


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Axis 2: layers to stages.", False),
        ("The axes of a plan.", False),
        ("Axis 2: divides the layers between the stages.", True),
        ("A schedule's timeline, drawn as SVG.", True),
        ("Tensor parallelism: the devices that share each layer.", True),
        ("Ranks plans under the iteration model.", True),
    ],
)
def test_what_counts_as_a_verb_of_a_module(text: str, expected: bool) -> None:
    assert has_verb(text) is expected
