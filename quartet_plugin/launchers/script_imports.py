"""The adapter that a Python script needs, read from its imports without running it."""

import ast
from pathlib import Path

_MAX_BYTES = 2**20
_BRIDGE = "megatron.bridge"


def trains_with_bridge(path: Path) -> bool:
    """Whether the script imports Megatron-Bridge, at its top or inside of its functions.

    False for a file that cannot be read as Python.
    """
    try:
        with path.open("rb") as file:
            tree = ast.parse(file.read(_MAX_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(_is_bridge(name) for node in ast.walk(tree) for name in _imported(node))


def _imported(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [name.name for name in names]
        case ast.ImportFrom(module=str(module), names=names, level=0):
            return [f"{module}.{name.name}" for name in names]
    return []


def _is_bridge(name: str) -> bool:
    return name == _BRIDGE or name.startswith(f"{_BRIDGE}.")
