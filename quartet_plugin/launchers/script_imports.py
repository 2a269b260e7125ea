"""What a Python script imports and starts, read from its code without running it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_MAX_BYTES = 2**20
_BRIDGE = "megatron.bridge"
_MODULES = re.compile(
    r"torch\.distributed\.(run|launch)|accelerate\.commands\.launch|deepspeed\.launcher(\..+)?"
)
# A word of an argument list, or a shell line: assignments may stand before a program.
_PROGRAM = re.compile(r"\s*((\w+=\S*|env|exec)\s+)*(\S*/)?(torchrun|ft_launcher)(\s|$)")
_MODULE = re.compile(rf"(.*\s-m\s+)?({_MODULES.pattern})(\s|$)", re.DOTALL)


def starts_launcher(path: Path) -> bool:
    """Whether the script imports a launcher, or has a string that starts one; what it only explains is none.

    Such a script trains in no process of its own. False for a file that cannot be read as Python.
    """
    nodes = list(_nodes(path))
    # A string that is a statement explains something.
    explained = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return any(id(node) not in explained and _names_launcher(node) for node in nodes)


def trains_with_bridge(path: Path) -> bool:
    """Whether the script imports Megatron-Bridge, at its top or inside of its functions.

    False for a file that cannot be read as Python.
    """
    return any(_is_bridge(name) for node in _nodes(path) for name in _imported(node))


def _nodes(path: Path) -> Iterator[ast.AST]:
    """Every node of the script's code; none where it cannot be read as Python."""
    try:
        with path.open("rb") as file:
            tree = ast.parse(file.read(_MAX_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return iter(())
    return ast.walk(tree)


def _names_launcher(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=str(text)):
            return _PROGRAM.match(text) is not None or _MODULE.match(text) is not None
        case ast.Import(names=names):
            return any(_MODULES.fullmatch(name.name) for name in names)
        case ast.ImportFrom(module=str(module), names=names):
            return any(_MODULES.fullmatch(word) for word in (module, *(f"{module}.{n.name}" for n in names)))
    return False


def _imported(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [name.name for name in names]
        case ast.ImportFrom(module=str(module), names=names, level=0):
            return [f"{module}.{name.name}" for name in names]
    return []


def _is_bridge(name: str) -> bool:
    return name == _BRIDGE or name.startswith(f"{_BRIDGE}.")
