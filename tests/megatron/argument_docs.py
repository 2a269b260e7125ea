"""The descriptions of Megatron's arguments, read once for all ranks that a server forks.

Megatron parses the source of its configuration classes for them whenever it makes its parser, twice a rank.
"""

import inspect
import re
import sys
from typing import Any


def keep_argument_docs() -> None:
    """Read them, and keep them for the parsers of forked ranks.

    The parser itself is not made here: its defaults are read from a rank's variables.
    """
    from megatron.training import argument_utils, arguments

    factory: Any = argument_utils.ArgumentGroupFactory
    read = factory._get_field_docstrings
    kept: dict[type, dict[str, str]] = {}

    def read_once(self: Any, source: type) -> dict[str, str]:
        if source not in kept:
            kept[source] = read(self, source)
        return dict(kept[source])

    factory._get_field_docstrings = read_once
    names = set(re.findall(r"ArgumentGroupFactory\((\w+)", inspect.getsource(arguments)))
    maker = factory.__new__(factory)
    for source in _classes_of_megatron():
        if source.__name__ in names:
            read_once(maker, source)


def _classes_of_megatron() -> list[type]:
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "megatron"]
    values = [value for module in modules for value in vars(module).values()]
    return [value for value in values if isinstance(value, type)]
