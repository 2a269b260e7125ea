"""Frozen records to and from JSON, strictly: a record's annotations are the format of its file.

The standard library alone is needed, so that a training process reads plans without loading more. Fields are
int, float, str, bool, None, Literal, Any, unions, tuple[T, ...], dict[str, T] and records, narrowed by
Annotated with `Bounds`, `Length` and `Matches`. Unknown keys, missing ones and other types are refused; a
bool is no int, an int is a float, and floats are finite.
"""

import difflib
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from quartet_plugin.errors import ConfigError, QuartetError
from quartet_plugin.model.files import MAX_FILE_BYTES, field_path, read_json, shown, write_json_atomic

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# A float with the words for what JSON lacks: NaN and the infinities. float() takes it.
Number = float | Literal["nan", "inf", "-inf"]

_Decoder = Callable[[Any], Any]
_PLAIN = frozenset({int, float, str, bool, NoneType})
_TYPE_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean"}
# Metadata of fields that were added to files which have digests: left out where they are None or an empty
# tuple, so that the digest of older content stays what it was.
ADDED = {"is_added": True}


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record[T](cls: type[T]) -> type[T]:
    """A class of values: frozen, with slots and keyword-only fields."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


@record
class Bounds:
    """The range of a number: `ge` and `le` lie inside, `gt` and `lt` outside."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def broken_rule(self, value: float) -> str | None:
        """The rule that `value` breaks, in words; None where it breaks none."""
        if self.ge is not None and not value >= self.ge:
            return f"should be greater than or equal to {self.ge}"
        if self.gt is not None and not value > self.gt:
            return f"should be greater than {self.gt}"
        if self.le is not None and not value <= self.le:
            return f"should be less than or equal to {self.le}"
        if self.lt is not None and not value < self.lt:
            return f"should be less than {self.lt}"
        return None

    def holds_for_all(self, values: Sequence[float]) -> bool:
        """Whether no value of a sequence that is not empty breaks a rule."""
        return self.broken_rule(min(values)) is None and self.broken_rule(max(values)) is None


@record
class Length:
    """How many characters a text, or how many items a list or an object has."""

    least: int = 0
    most: int | None = None

    def broken_rule(self, value: Sequence[Any] | Mapping[str, Any]) -> str | None:
        """The rule that `value` breaks, in words; None where it breaks none."""
        unit = "characters" if isinstance(value, str) else "items"
        if len(value) < self.least:
            return f"should have at least {self.least} {unit}, not {len(value)}"
        if self.most is not None and len(value) > self.most:
            return f"should have at most {self.most} {unit}, not {len(value)}"
        return None

    def holds_for_all(self, values: Sequence[Any]) -> bool:
        """Whether no value of a sequence that is not empty breaks a rule."""
        return (
            self.broken_rule(min(values, key=len)) is None and self.broken_rule(max(values, key=len)) is None
        )


@record
class Matches:
    """A text that the regular expression `pattern` matches from its beginning to its end."""

    pattern: str

    def broken_rule(self, value: str) -> str | None:
        """The rule that `value` breaks, in words; None where it breaks none."""
        is_match = re.fullmatch(self.pattern, value, re.ASCII)
        return None if is_match else f"should match {self.pattern}"

    def holds_for_all(self, values: Sequence[str]) -> bool:
        """Whether no value of a sequence breaks the rule."""
        return all(map(re.compile(self.pattern, re.ASCII).fullmatch, values))


def as_number(value: float) -> Number:
    """A float as JSON can hold it."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


class _FieldError(Exception):
    """A value that breaks a rule; `path` leads to it from the record that is being read."""

    def __init__(self, value: Any, rule: str) -> None:
        super().__init__(rule)
        self.path: list[str | int] = []
        self.rule = rule
        self._value = value

    def __str__(self) -> str:
        """`field: value: rule`."""
        value = "" if self._value is MISSING else f" {shown(self._value)}:"
        return f"{field_path(self.path) or 'the file'}:{value} {self.rule}"


def parse[T](kind: type[T], data: object, *, where: str) -> T:
    """Data that was read from `where` as a checked record.

    Raises ConfigError in one line that names `where`, the field, the value and the rule; what the record
    itself raises where its fields contradict each other is raised with `where` before it.
    """
    try:
        content: T = _decoder_of(cast(Any, kind))(data)
    except _FieldError as error:
        raise ConfigError(f"{where}: {error}") from error
    except QuartetError as error:
        raise type(error)(f"{where}: {error}") from error
    return content


def read_record[T](kind: type[T], path: str | os.PathLike[str], *, max_bytes: int = MAX_FILE_BYTES) -> T:
    """The record in the JSON file `path`. Raises ConfigError in one line: field, value and rule."""
    return parse(kind, read_json(path, max_bytes=max_bytes), where=os.fspath(path))


def write_record(value: "DataclassInstance", *, path: str | os.PathLike[str]) -> None:
    """Write a record as a JSON file, whole or not at all."""
    write_json_atomic(path, dump(value))


def dump(value: "DataclassInstance") -> dict[str, Any]:
    """A record as plain data, nested ones included: the inverse of `parse`."""
    content = ((name, getattr(value, name), is_added) for name, is_added in _fields_of(type(value)))
    return {
        name: _plain(item)
        for name, item, is_added in content
        if not is_added or (item is not None and item != ())
    }


@functools.cache
def _fields_of(kind: "type[DataclassInstance]") -> tuple[tuple[str, bool], ...]:
    """The names of a record's fields, and whether each was added to its file."""
    return tuple((known.name, known.metadata == ADDED) for known in fields(kind))


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        # Long rows of numbers and texts are plain already.
        is_flat = all(issubclass(kind, str | int | float | NoneType) for kind in set(map(type, value)))
        return value if is_flat else type(value)(map(_plain, value))
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return dump(value) if is_dataclass(value) and not isinstance(value, type) else value


@functools.cache
def _decoder_of(hint: Any) -> _Decoder:
    """The function that checks a value of JSON against a type hint."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if hint in _TYPE_NAMES:
        return functools.partial(_scalar, hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return _record_decoder(hint)
    if origin is Annotated:
        return _narrowed(_decoder_of(arguments[0]), arguments[1:])
    if origin is Literal:
        return _literal_decoder(arguments)
    if origin in (Union, UnionType):
        return _union_decoder(arguments)
    if origin is tuple and arguments[1:] == (...,):
        return _array_decoder(arguments[0])
    if origin in (dict, Mapping):
        return _object_decoder(*map(_decoder_of, arguments))
    raise TypeError(f"{hint}: no type that a record can have")


def _scalar(kind: type, value: Any) -> Any:
    if type(value) is kind and kind is not float:
        return value
    if kind is not float or type(value) not in (int, float):
        raise _FieldError(value, f"should be a valid {_TYPE_NAMES[kind]}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _FieldError(value, "should be a finite number")
    return number


def _narrowed(decode: _Decoder, constraints: Sequence[Any]) -> _Decoder:
    rules = [constraint.broken_rule for constraint in constraints]

    def decode_narrowed(value: Any) -> Any:
        content = decode(value)
        for broken_rule in rules:
            if rule := broken_rule(content):
                raise _FieldError(value, rule)
        return content

    return decode_narrowed


def _literal_decoder(values: Sequence[Any]) -> _Decoder:
    allowed = {(type(value), value) for value in values}
    words = [repr(value) for value in values]
    rule = f"should be {', '.join(words[:-1])} or {words[-1]}" if words[1:] else f"must be {words[0]}"

    def decode(value: Any) -> Any:
        if isinstance(value, str | int) and (type(value), value) in allowed:
            return value
        raise _FieldError(value, rule)

    return decode


def _union_decoder(hints: Sequence[Any]) -> _Decoder:
    decoders = [_decoder_of(hint) for hint in hints if hint is not NoneType]
    takes_none = NoneType in hints

    def decode(value: Any) -> Any:
        if value is None and takes_none:
            return None
        if len(decoders) == 1:
            return decoders[0](value)
        rules = []
        for decode_option in decoders:
            try:
                return decode_option(value)
            except _FieldError as error:
                rules.append(error.rule)
        raise _FieldError(value, ", or ".join(rules))

    return decode


def _array_decoder(hint: Any) -> _Decoder:
    decode_item = _decoder_of(hint)
    kind, *constraints = get_args(hint) if get_origin(hint) is Annotated else (hint,)

    def is_plain_row(values: Sequence[Any]) -> bool:
        """Whether all values are right, found without looking at each from Python: rows have millions."""
        if kind not in _TYPE_NAMES or not values or set(map(type, values)) != {kind}:
            return False
        if kind is float and not all(map(math.isfinite, values)):
            return False
        return all(constraint.holds_for_all(values) for constraint in constraints)

    def decode(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise _FieldError(value, "should be a valid list")
        if is_plain_row(value):
            return tuple(value)
        items = []
        try:
            for item in value:
                items.append(decode_item(item))
        except _FieldError as error:
            error.path.insert(0, len(items))
            raise
        return tuple(items)

    return decode


def _object_decoder(decode_key: _Decoder, decode_item: _Decoder) -> _Decoder:
    def decode(value: Any) -> dict[str, Any]:
        content = {}
        for key, item in _object(value).items():
            try:
                content[decode_key(key)] = decode_item(item)
            except _FieldError as error:
                error.path.insert(0, str(key))
                raise
        return content

    return decode


def _record_decoder(kind: type) -> _Decoder:
    hints = get_type_hints(kind, include_extras=True)
    decoders = {known.name: _decoder_of(hints[known.name]) for known in fields(kind)}
    required = [
        known.name for known in fields(kind) if known.default is MISSING and known.default_factory is MISSING
    ]

    def decode(value: Any) -> Any:
        data = _object(value)
        content = {}
        name = ""
        try:
            for name, decode_field in decoders.items():
                if name in data:
                    content[name] = decode_field(data[name])
            # A key that is missing is mostly one that is misspelt.
            for name in data:
                if name not in decoders:
                    raise _FieldError(data[name], unknown_key(name, known=decoders))
            for name in required:
                if name not in content:
                    raise _FieldError(MISSING, "missing; the key is required")
        except _FieldError as error:
            error.path.insert(0, name)
            raise
        return kind(**content)

    return decode


def unknown_key(name: object, *, known: Iterable[str]) -> str:
    """The rule that a key breaks which nothing reads, with the known key that is spelled most like it."""
    return f"unknown key{nearest_word(str(name), known=known) or '; remove it'}"


def nearest_word(value: object, *, known: Iterable[str]) -> str:
    """`; did you mean X?` with the known word that is spelled most like `value`; "" where none is.

    Capitals, dashes and underscores do not count.
    """
    if not isinstance(value, str):
        return ""
    by_plain = {_spelling(word): word for word in reversed(list(known))}
    near = difflib.get_close_matches(_spelling(value[:100]), list(by_plain), n=1)
    return f"; did you mean {by_plain[near[0]]}?" if near else ""


def _spelling(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _FieldError(value, f"must be a JSON object; this is a {type(value).__name__}")
    return value
