"""Hashes of the functions of Transformer Engine that tests/twins/engine stands for, from a source tree.

    python tools/engine_hashes.py RELEASE=FOLDER ... > tests/twins/engine_hashes.json

FOLDER has the package `transformer_engine` of that release. A hash is of a definition's syntax tree without
docstrings: comments and layout do not count. A changed hash asks for a look at what changed at the boundary:
which tensors a layer keeps, what its backward returns, what `backward_dw` sets and calls.
"""

import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

_MODULES = "transformer_engine/pytorch/module"
# File, and the names that the function has had, the latest first.
FUNCTIONS = (
    (f"{_MODULES}/linear.py", ("_linear_backward", "_Linear.backward")),
    (f"{_MODULES}/layernorm_linear.py", ("_LayerNormLinear.backward",)),
    (f"{_MODULES}/_common.py", ("WeightGradStore",)),
    (f"{_MODULES}/base.py", ("TransformerEngineBaseModule.backward_dw",)),
)
_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def hashes_of(folder: Path) -> dict[str, str]:
    """The sha256 of each function in a source tree, by `FILE:NAME`.

    Raises FileNotFoundError or KeyError where one is missing.
    """
    hashes = {}
    for file, names in FUNCTIONS:
        definitions = dict(_definitions(ast.parse((folder / file).read_text(encoding="utf-8"))))
        name = next((name for name in names if name in definitions), names[0])
        hashes[f"{file}:{name}"] = _hash(definitions[name])
    return hashes


def _definitions(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, _DEFINITIONS[1:]):
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node, f"{node.name}.")


def _hash(tree: ast.AST) -> str:
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def main(arguments: list[str]) -> None:
    """Print the hashes of every release as JSON."""
    trees = dict(argument.split("=", 1) for argument in arguments)
    print(json.dumps({release: hashes_of(Path(folder)) for release, folder in trees.items()}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
