"""The source of a function or class as one number: what a seam is pinned to besides its signature.

Comments, layout and docstrings do not count; anything that runs does.
"""

import ast
import hashlib
import inspect
from typing import Any

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def source_hash(definition: Any) -> str:
    """Sixteen hex digits for a function or class that is loaded.

    Decorators on it count, as they stand in the source. Raises OSError where there is no source to read.
    """
    return node_hash(_parsed(inspect.getsource(definition)))


def node_hash(node: ast.AST) -> str:
    """The same for a definition out of a parsed file; `node` loses its docstrings."""
    for inner in ast.walk(node):
        if isinstance(inner, _DEFINITIONS) and ast.get_docstring(inner, clean=False) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(node).encode()).hexdigest()[:16]


def find_definition(tree: ast.Module, name: str) -> ast.AST | None:
    """The definition of `function`, `Class` or `Class.method` at the top of a file; None if absent."""
    definition: ast.AST = tree
    for part in name.split("."):
        body = getattr(definition, "body", [])
        inner = next((node for node in body if isinstance(node, _DEFINITIONS) and node.name == part), None)
        if inner is None:
            return None
        definition = inner
    return definition


def _parsed(source: str) -> ast.AST:
    # A method stands indented; taking the indentation away would change the strings in it.
    if source[:1].isspace():
        outer = ast.parse(f"if True:\n{source}").body[0]
        assert isinstance(outer, ast.If)
        return outer.body[0]
    return ast.parse(source).body[0]
