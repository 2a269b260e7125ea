"""Looks for what was replaced: a reference that somebody kept would go on calling the original.

Module globals are rebound by the installation itself. What it cannot see are copies inside of containers,
classes, default arguments and partial calls; those are searched for afterwards, and refused.
"""

import functools
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

# Large, and none of them knows Megatron.
_LEFT_OUT = frozenset(
    {*sys.stdlib_module_names, "torch", "numpy", "triton", "numba", "scipy", "quartet_plugin", "transformers"}
) - {"__main__"}


def leftovers(originals: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Every original that a loaded module still holds, with the place."""
    wanted = {id(original): original for original in originals}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] not in _LEFT_OUT:
            for key, value in list(vars(module).items()):
                yield from _in_global(wanted, f"{name}.{key}", value, name)


def _in_global(wanted: dict[int, Any], place: str, value: Any, module: str) -> Iterator[tuple[Any, str]]:
    if id(value) in wanted:
        yield wanted[id(value)], place
    elif isinstance(value, type):
        if value.__module__ == module:
            for key, inner in list(vars(value).items()):
                yield from _held(wanted, f"{place}.{key}", inner)
    else:
        yield from _held(wanted, place, value)


def _held(wanted: dict[int, Any], place: str, value: Any) -> Iterator[tuple[Any, str]]:
    """The originals that a value is, or holds at its first level."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    inside: list[Any] = [value]
    if isinstance(value, (list, tuple, set, frozenset)):
        inside = list(value)
    elif isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        inside += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    for one in inside:
        if id(one) in wanted:
            yield wanted[id(one)], place
