"""Reading untrusted JSON, and writing files so that a reader sees the old or the new one, never half.

Every refusal is one ConfigError line that names the file, the place, the value and the rule.
"""

import contextlib
import errno
import itertools
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
from quartet_plugin.model.printable import escaped

# A written-out order of 5 million actions, the longest that is read, takes so much.
MAX_FILE_BYTES = 64 * 1024 * 1024
# Python needs some ten times a file's bytes where each value is short. These are the most that a legitimate
# file has: actions of a schedule; entries of 200,000 iterations; rows of links, iterations or slots.
MAX_VALUES = 8_000_000
MAX_KEYS = 2**20
MAX_CONTAINERS = 2**20
MAX_DEPTH = 32
MAX_INTEGER = 2**64

_LINE_WIDTH = 140
# The search for the place of a fault reads word by word; in a longer file the fault is named without it.
_MAX_SEARCHED_BYTES = 4 * 1024 * 1024
_INTEGER_RULE = "integers must lie between -2^64 and 2^64"
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789E", b"000000000e")
_INTEGER = re.compile(r"-?[0-9]+", re.ASCII)
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
    `max_bytes`, is not UTF-8 or not JSON, holds more values than any file of this program, nests deeper than
    `max_depth` objects and arrays, repeats a key of an object, or holds a number that is not finite or an
    integer of over 64 bits.
    """
    return parse_json(read_bytes(path, max_bytes=max_bytes), where=path, max_depth=max_depth)


def parse_json(content: bytes, *, where: str | os.PathLike[str], max_depth: int = MAX_DEPTH) -> Any:
    """The JSON value in the bytes of the file `where`. Raises ConfigError as `read_json` does."""
    _check_counts(content, where=where)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        byte = content[error.start]
        raise ConfigError(f"{where}:{line}:{column}: byte {byte:#04x}: the file must be UTF-8") from error
    # Only a long exponent, or very many digits, make a number too large: a hook for each number is slow.
    digits = content.translate(_DIGITS_AS_ZEROS)
    may_overflow = any(word in digits for word in (b"e000", b"e+000", b"0" * 200))
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite if may_overflow else None,
            parse_int=_integer if b"0" * 20 in digits else None,
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    except UnicodeEncodeError as error:
        character = error.object[error.start]
        raise ConfigError(f"{where}: {character!a}: text must be UTF-8, so no lone surrogate") from error
    except (_RefusedError, RecursionError, ValueError) as error:
        fault = _first_fault(text, max_depth=max_depth) or f" {error}"
        raise ConfigError(f"{where}:{fault}") from error
    if _depth_exceeds(value, max_depth):
        fault = _first_fault(text, max_depth=max_depth) or f" {_depth_rule(max_depth)}"
        raise ConfigError(f"{where}:{fault}")
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
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{_inline(str(part))}" for part in parts)
    return text.removeprefix(".")


def shown(value: Any, *, limit: int = 60) -> str:
    """`value` for one line of a message: on one line, without control characters, cut to `limit`."""
    text = _inline(repr(_beginning(value, limit)))
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _beginning(value: Any, limit: int, *, depth: int = 3) -> Any:
    """The first entries of a value, of a size that can be written out."""
    if isinstance(value, str):
        return value[:limit]
    if not isinstance(value, dict | list | tuple):
        return value
    if depth == 0:
        return ...
    if isinstance(value, dict):
        first = itertools.islice(value.items(), limit)
        return {_beginning(k, limit): _beginning(v, limit, depth=depth - 1) for k, v in first}
    return type(value)([_beginning(item, limit, depth=depth - 1) for item in value[:limit]])


def _inline(text: str) -> str:
    return escaped(text[:200])


def read_bytes(
    path: str | os.PathLike[str], *, max_bytes: int, rule: str = "no file of this kind is longer"
) -> bytes:
    """The content of a file of at most `max_bytes`.

    Raises ConfigError where it cannot be read, or is longer: the message ends in `rule`.
    """
    try:
        with Path(path).open("rb") as file:
            # What is too long is not read; what has no size, such as a pipe, is read up to the limit.
            num_bytes = os.fstat(file.fileno()).st_size
            content = b"" if num_bytes > max_bytes else file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{shown(os.fspath(path))}: not a path: {error}") from error
    if max(num_bytes, len(content)) > max_bytes:
        raise ConfigError(f"{path}: longer than {max_bytes} bytes; {rule}")
    return content


def _check_counts(content: bytes, *, where: str | os.PathLike[str]) -> None:
    """Refuse what would need gigabytes, before it is parsed; separators inside of text count, too."""
    num_containers = content.count(b"[") + content.count(b"{")
    for word, count, most in (
        ("keys", content.count(b":"), MAX_KEYS),
        ("objects and arrays", num_containers, MAX_CONTAINERS),
        ("values", content.count(b",") + num_containers, MAX_VALUES),
    ):
        if count > most:
            raise ConfigError(f"{where}: about {count} {word}; a file must have at most {most}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _RefusedError(f"{shown(twice)}: the key appears twice in one object")
    return result


def _refuse_constant(name: str) -> float:
    raise _RefusedError(f"{name}: numbers must be finite")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _RefusedError(f"{text[:60]}: numbers must be finite")
    return number


def _integer(text: str) -> int:
    # Python itself refuses to read thousands of digits.
    if len(text) > 21 or abs(int(text)) >= MAX_INTEGER:
        raise _RefusedError(f"{text[:60]}: {_INTEGER_RULE}")
    return int(text)


def _depth_rule(max_depth: int) -> str:
    return f"nested deeper than {max_depth} objects and arrays"


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
    """`line:column: field: value: rule` of the first place that breaks a rule; slow, for messages only."""
    if len(text) > _MAX_SEARCHED_BYTES:
        return None
    keys: list[set[str] | None] = []
    names: list[str | int] = []
    previous = ""
    for match in _TOKEN.finditer(text):
        piece, rule = match[0], None
        if piece in "[{":
            keys.append(set() if piece == "{" else None)
            names.append("" if piece == "{" else 0)
            if len(keys) > max_depth:
                rule = _depth_rule(max_depth)
        elif piece in "]}":
            if keys:
                keys.pop()
                names.pop()
        elif piece == ",":
            if names and isinstance(names[-1], int):
                names[-1] += 1
        elif piece == ":" and keys and keys[-1] is not None:
            if previous in keys[-1]:
                rule = "the key appears twice in one object"
            keys[-1].add(previous)
            names[-1] = previous[1:-1]
        elif piece[0] not in '":,' and (rule := _number_fault(piece)) is not None:
            return _place(text, match.start(), f"{_field_of(names)}{_inline(piece)[:60]}: {rule}")
        if rule is not None:
            return _place(text, match.start(), f"{_inline(previous if piece == ':' else piece)[:60]}: {rule}")
        previous = piece
    return None


def _place(text: str, start: int, words: str) -> str:
    line = text.count("\n", 0, start) + 1
    column = start - text.rfind("\n", 0, start)
    return f"{line}:{column}: {words}"


def _field_of(names: Sequence[str | int]) -> str:
    """`field: ` for a message; nothing in arrays outside of any object."""
    return f"{field_path(names)}: " if any(isinstance(name, str) for name in names) else ""


def _number_fault(text: str) -> str | None:
    if text in ("NaN", "Infinity", "-Infinity"):
        return "numbers must be finite"
    if _INTEGER.fullmatch(text):
        return _INTEGER_RULE if len(text) > 21 or abs(int(text)) >= MAX_INTEGER else None
    with contextlib.suppress(ValueError):
        if not math.isfinite(float(text)):
            return "numbers must be finite"
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
