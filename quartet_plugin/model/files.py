"""Reading untrusted JSON, and writing files so that a reader sees the old or the new one, never half.

Every refusal is one ConfigError line that names the file, the place, the value and the rule.
"""

import contextlib
import errno
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quartet_plugin.errors import ConfigError, StorageError

MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_DEPTH = 32

_LINE_WIDTH = 140
_MAY_OVERFLOW = re.compile(r"[eE]\+?[0-9]{3}|[0-9]{200}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}:,]|[^\s\[\]{}:,"]+', re.DOTALL)
_USERS_FAULT = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ELOOP,
}


class _RefusedError(Exception):
    """A rule of this program's files, broken inside the JSON parser, which does not tell the position."""


def read_json(
    path: str | os.PathLike[str], *, max_bytes: int = MAX_FILE_BYTES, max_depth: int = MAX_DEPTH
) -> Any:
    """The value in the JSON file `path`.

    Raises ConfigError, naming path, line and column, for a file that cannot be read, is longer than
    `max_bytes`, is not UTF-8 or not JSON, nests deeper than `max_depth` objects and arrays, repeats a key
    of an object, or holds a number that is not finite.
    """
    return parse_json(_read_bytes(path, max_bytes=max_bytes), where=path, max_depth=max_depth)


def parse_json(content: bytes, *, where: str | os.PathLike[str], max_depth: int = MAX_DEPTH) -> Any:
    """The JSON value in the bytes of the file `where`. Raises ConfigError as `read_json` does."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        byte = content[error.start]
        raise ConfigError(f"{where}:{line}:{column}: byte {byte:#04x}: the file must be UTF-8") from error
    # Only a long exponent, or very many digits, make a number infinite: a hook for each number is slow.
    parse_float = _finite if _MAY_OVERFLOW.search(text) else None
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=parse_float
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    except UnicodeEncodeError as error:
        character = error.object[error.start]
        raise ConfigError(f"{where}: {character!a}: text must be UTF-8, so no lone surrogate") from error
    except (_RefusedError, RecursionError, ValueError) as error:
        fault = _first_fault(text, max_depth=max_depth) or f"1:1: {error}"
        raise ConfigError(f"{where}:{fault}") from error
    if _depth_exceeds(value, max_depth):
        raise ConfigError(f"{where}:{_first_fault(text, max_depth=max_depth)}")
    return value


def write_json_atomic(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as readable JSON (short rows on one line, keys in their order), atomically.

    Raises ConfigError for a value that is not JSON, NaN and infinity included, or a place that cannot be
    written; StorageError when the disk fails.
    """
    try:
        content = ("".join(_formatted(value, "")) + "\n").encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: the value is not JSON: {error}") from error
    write_bytes_atomic(path, content)


def remove_torn(folder: Path) -> None:
    """Remove the temporary files of writers in `folder` that were killed before the rename."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as UTF-8; otherwise as `write_bytes_atomic`."""
    write_bytes_atomic(path, text.encode("utf-8"))


def write_bytes_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a temporary file in the same folder, flush it to the disk and rename it to `path`.

    A new file gets the mode the umask gives, an existing one keeps its own (so 0600 stays 0600). A link is
    followed; what is not a regular file, like a pipe, is written directly. Raises ConfigError when the
    place cannot be written, StorageError when the disk fails.
    """
    try:
        mode = _mode_of(path)
        if mode is not None and not stat.S_ISREG(mode):
            Path(path).write_bytes(content)
        else:
            _replace(Path(os.path.realpath(path)), content, mode)
    except OSError as error:
        kind = ConfigError if error.errno in _USERS_FAULT else StorageError
        raise kind(
            f"{path}: cannot be written: {error.strerror}; name a file in a writable folder"
        ) from error


def field_path(parts: Sequence[str | int]) -> str:
    """A place in a JSON value the way one writes it: `layers[3].forward_s`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{_inline(part)}" for part in parts)
    return text.removeprefix(".")


def shown(value: Any, *, limit: int = 60) -> str:
    """`value` for one line of a message: on one line, without control characters, cut to `limit`."""
    text = _inline(repr(value[:limit] if isinstance(value, str | list | tuple) else value))
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _inline(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[:200])


def _read_bytes(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{shown(os.fspath(path))}: not a path: {error}") from error
    if len(content) > max_bytes:
        raise ConfigError(f"{path}: longer than {max_bytes} bytes; no file of this program is longer")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _RefusedError("a key appears twice in one object")
    return result


def _refuse_constant(name: str) -> float:
    raise _RefusedError(f"{name}: numbers must be finite")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _RefusedError(f"{shown(text)}: numbers must be finite")
    return number


def _depth_exceeds(value: Any, max_depth: int) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(max_depth):
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return bool(level)


def _first_fault(text: str, *, max_depth: int) -> str | None:
    """`line:column: value: rule` of the first place that breaks a rule; slow, for messages only."""
    keys: list[set[str] | None] = []
    previous = ""
    for match in _TOKEN.finditer(text):
        piece, rule = match[0], None
        if piece in "[{":
            keys.append(set() if piece == "{" else None)
            if len(keys) > max_depth:
                rule = f"nested deeper than {max_depth} objects and arrays"
        elif piece in "]}":
            if keys:
                keys.pop()
        elif piece == ":" and keys and keys[-1] is not None:
            if previous in keys[-1]:
                rule = "the key appears twice in one object"
            keys[-1].add(previous)
        elif piece[0] not in '":,':
            rule = _number_fault(piece)
        if rule is not None:
            line = text.count("\n", 0, match.start()) + 1
            column = match.start() - text.rfind("\n", 0, match.start())
            return f"{line}:{column}: {_inline(previous if piece == ':' else piece)[:60]}: {rule}"
        previous = piece
    return None


def _number_fault(text: str) -> str | None:
    if text in ("NaN", "Infinity", "-Infinity"):
        return "numbers must be finite"
    with contextlib.suppress(ValueError):
        if not math.isfinite(float(text)):
            return "numbers must be finite"
        if len(text) > 4_000:
            return "a number has at most 4000 digits"
    return None


def _formatted(value: Any, indent: str) -> list[str]:
    """JSON text in pieces: what fits on a line, and a list of plain values, stays on one line."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    is_row = isinstance(value, list | tuple) and not any(isinstance(v, dict | list | tuple) for v in value)
    if len(indent) + len(text) <= _LINE_WIDTH or is_row or not isinstance(value, dict | list | tuple):
        return [text]
    inner = indent + " "
    pieces: list[str] = []
    if isinstance(value, dict):
        for key, item in value.items():
            pieces += [f",\n{inner}", json.dumps(key, ensure_ascii=False), ": ", *_formatted(item, inner)]
        opening, closing = "{", "}"
    else:
        for item in value:
            pieces += [f",\n{inner}", *_formatted(item, inner)]
        opening, closing = "[", "]"
    pieces[0] = f"{opening}\n{inner}"
    return [*pieces, f"\n{indent}{closing}"]


def _mode_of(path: str | os.PathLike[str]) -> int | None:
    try:
        return Path(path).stat().st_mode
    except FileNotFoundError:
        return None


def _replace(target: Path, content: bytes, mode: int | None) -> None:
    temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666 if mode is None else 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, stat.S_IMODE(mode))
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable; some file systems cannot, and the file is complete without it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
