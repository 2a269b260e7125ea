"""Functions of a framework as its source files have them: nothing is imported, so any tree can be read.

Functions are compared without their decorators: a release that traces its functions is the same release.
"""

import ast
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True)
class KnownFunction:
    """A function of one release.

    `parameters` are names with spaces between, none for a class; `source` is `node_hash`. `is_tried`: what
    replaces the function has trained with the release.
    """

    parameters: str
    source: str
    is_tried: bool = True


@dataclass(frozen=True, slots=True)
class SourceTree:
    """The package files below `roots`, which are what would stand on sys.path, in that order."""

    roots: tuple[Path, ...]
    _parsed: dict[str, ast.Module | None] = field(default_factory=dict)

    def definition(self, module: str, name: str) -> Definition | None:
        """The definition of `function`, `Class` or `Class.method`; None where the tree has none.

        Raises SyntaxError for a file that this Python cannot parse.
        """
        if module not in self._parsed:
            file = self.file(module)
            self._parsed[module] = None if file is None else ast.parse(file.read_text(encoding="utf-8"))
        tree = self._parsed[module]
        return None if tree is None else find_definition(tree, name)

    def file(self, module: str) -> Path | None:
        """The file of a module; None where the tree has none."""
        paths = [root.joinpath(*module.split(".")) for root in self.roots]
        files = (file for path in paths for file in (path / "__init__.py", path.with_suffix(".py")))
        return next((file for file in files if file.is_file()), None)

    def function(self, module: str, name: str) -> KnownFunction | None:
        """Parameters and hash of a function or class; None where the tree has none."""
        definition = self.definition(module, name)
        if definition is None:
            return None
        return KnownFunction(parameters=parameters_of(definition), source=node_hash(definition))


def find_definition(tree: ast.Module, name: str) -> Definition | None:
    """The definition of `function`, `Class` or `Class.method` at the top of a file; None if absent."""
    body: list[ast.stmt] = tree.body
    definition: Definition | None = None
    for part in name.split("."):
        definition = next((n for n in body if isinstance(n, _DEFINITIONS) and n.name == part), None)
        if definition is None:
            return None
        body = definition.body
    return definition


def parameters_of(definition: Definition) -> str:
    """The names of a function's parameters with spaces between; none for a class."""
    if isinstance(definition, ast.ClassDef):
        return ""
    args = definition.args
    named = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    return " ".join(argument.arg for argument in named if argument is not None)


def node_hash(definition: ast.AST) -> str:
    """The hash of a definition as sixteen hex digits; comments, layout, docstrings, decorators do not count.

    Of a class its methods' decorators do not count either. `definition` loses what does not count.
    """
    for outer in (definition, *(definition.body if isinstance(definition, ast.ClassDef) else ())):
        if isinstance(outer, _DEFINITIONS):
            outer.decorator_list = []
    for inner in ast.walk(definition):
        if isinstance(inner, _DEFINITIONS) and ast.get_docstring(inner, clean=False) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(definition).encode()).hexdigest()[:16]
