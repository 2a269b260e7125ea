"""The functions of a framework whose changed source the user accepts, as ACCEPT_CHANGED_SOURCE holds them.

The option `--accept-changed-source` accepts every function. A run that is resumed without the option, and its
best/command.sh, accept the sources of its earlier sessions alone: each function is a text `path@source`, in
which `source` is the hash of its source.
"""

from collections.abc import Iterable

# The variable's value for every function, whatever its source.
EVERY_FUNCTION = "1"

_MARK, _BETWEEN = "@", ","


def function_text(path: str, source: str) -> str:
    """The text of the function at the dotted `path` with the hash `source`, empty where it has no source."""
    return f"{path}{_MARK}{source}"


def accepted_text(functions: Iterable[str]) -> str:
    """The variable's value that accepts these functions alone."""
    return _BETWEEN.join(sorted(set(functions)))


def paths_of(functions: Iterable[str]) -> list[str]:
    """The dotted paths of functions, each once."""
    return list(dict.fromkeys(function.partition(_MARK)[0] for function in functions))


def accepts(text: str | None, functions: Iterable[str]) -> bool:
    """Whether the variable's value `text`, None where it is not set, accepts every one of `functions`."""
    if not text:
        return False
    return _MARK not in text or set(functions) <= set(text.split(_BETWEEN))
