"""The product form of a batch: a job for each combination of values, such as models x clusters x sizes.

Placeholders `{axis}` and `{axis.field}` are filled into the words of a command, never into a line that
is split afterwards, so that no value can become several words but a list of words that stands alone.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from quartet_plugin.batch.words import split_words
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.batch import MAX_JOBS
from quartet_plugin.model.files import shown
from quartet_plugin.model.schema import unknown_key
from quartet_plugin.model.sections import Section

MAX_AXES = 16
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}", re.ASCII)
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
_KEPT = ("priority", "max_minutes", "trials")
# Keys whose values may hold placeholders; all but a job's sections are text.
_FILLED = ("name", "command", "job", "config", "like")
_AS_TEXT = (": command", ": name", ": config", ": like")


def _axis_name(value: str) -> str:
    if not _AXIS.fullmatch(value):
        raise ValueError("an axis and a field are letters, digits and '_', beginning with a letter")
    return value


_Name = Annotated[str, AfterValidator(_axis_name)]
Scalar = str | int | float
FieldValue = Scalar | list[str]
# A value of an axis: itself, or a name with fields.
Value = Scalar | dict[_Name, FieldValue]


class MatrixConfig(Section):
    """Jobs for every combination of the axes' values, but those that `exclude` names."""

    axes: dict[_Name, Annotated[list[Value], Field(min_length=1, max_length=MAX_JOBS)]] = Field(
        min_length=1, max_length=MAX_AXES
    )
    name: str | None = None
    command: str | list[Any] | None = None
    job: str | dict[str, Any] | None = None
    config: str | None = None
    like: str | None = None
    priority: int = 0
    max_minutes: float | None = None
    trials: int | None = None
    exclude: list[dict[_Name, Scalar]] = Field(default=[])


def expanded(matrix: MatrixConfig, *, where: str) -> Iterator[dict[str, Any]]:
    """The sections of every job. Raises ConfigError, naming the placeholder or the axis."""
    sizes = [len(values) for values in matrix.axes.values()]
    count = 1
    for size in sizes:
        count *= size
    if count > MAX_JOBS:
        raise ConfigError(f"{where}: {' x '.join(map(str, sizes))} jobs; must be at most {MAX_JOBS}")
    axes = {
        axis: [_fields(value, axis, where=where) for value in values] for axis, values in matrix.axes.items()
    }
    _check_excluded(matrix, axes, where=where)
    template = {key: getattr(matrix, key) for key in _FILLED if getattr(matrix, key) is not None}
    template.setdefault("name", "-".join(f"{{{axis}}}" for axis in axes))
    if isinstance(template.get("command"), str):
        template["command"] = _split(template["command"], where=where)
    kept = {key: getattr(matrix, key) for key in _KEPT if getattr(matrix, key) is not None}
    for combination in product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        if not any(_is_excluded(rule, chosen) for rule in matrix.exclude):
            known = {key: value for axis, fields in chosen.items() for key, value in _keys(axis, fields)}
            yield {
                **kept,
                **{key: _filled(value, known, where=f"{where}: {key}") for key, value in template.items()},
            }


def _split(line: str, *, where: str) -> list[str]:
    """The words of the line, their placeholders whole: none is split at a blank of its value."""
    try:
        return split_words(line)
    except ValueError as error:
        raise ConfigError(f"{where}: command: {shown(line)}: {error}") from error


def _fields(value: Any, axis: str, *, where: str) -> dict[str, Any]:
    """A value's fields; a plain value is its own name."""
    if not isinstance(value, dict):
        return {"name": value}
    if isinstance(value.get("name"), str | int | float):
        return value
    raise ConfigError(f"{where}: axes.{axis}: {shown(value)}: a value with fields must have a `name`")


def _keys(axis: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        yield f"{axis}.{name}", value
    yield axis, fields["name"]


def _filled(value: Any, known: Mapping[str, Any], *, where: str) -> Any:
    """`value` with its placeholders filled, inside of lists and objects too."""
    if isinstance(value, dict):
        return {key: _filled(item, known, where=where) for key, item in value.items()}
    if isinstance(value, list):
        words: list[Any] = []
        for item in value:
            new = _filled(item, known, where=where)
            words += new if isinstance(new, list) and isinstance(item, str) else [new]
        return words
    if not isinstance(value, str):
        return value
    whole = _PLACEHOLDER.fullmatch(value)
    if whole is not None and whole[1] is not None:
        content = _value_of(whole[1], known, where=where)
        # In a command every word is text; elsewhere a number stays one.
        return str(content) if where.endswith(_AS_TEXT) and not isinstance(content, list) else content
    return _PLACEHOLDER.sub(lambda match: _text_of(match, known, where=where), value)


def _text_of(match: re.Match[str], known: Mapping[str, Any], *, where: str) -> str:
    if match[1] is None:
        return match[0][0]
    content = _value_of(match[1], known, where=where)
    if isinstance(content, list):
        raise ConfigError(f"{where}: {{{match[1]}}}: a list of words; it must be a word by itself")
    return str(content)


def _value_of(name: str, known: Mapping[str, Any], *, where: str) -> Any:
    if name not in known:
        rule = unknown_key(name, known=known).replace("unknown key", "unknown placeholder")
        raise ConfigError(f"{where}: {shown('{' + name + '}')}: {rule}; a brace is written {{{{ or }}}}")
    return known[name]


def _is_excluded(rule: Mapping[str, Any], chosen: Mapping[str, Mapping[str, Any]]) -> bool:
    return all(str(chosen[axis]["name"]) == str(value) for axis, value in rule.items())


def _check_excluded(matrix: MatrixConfig, axes: Mapping[str, list[dict[str, Any]]], *, where: str) -> None:
    for rule in matrix.exclude:
        for axis, value in rule.items():
            if axis not in axes:
                raise ConfigError(f"{where}: exclude: {axis}: {unknown_key(axis, known=axes)}")
            names = [str(fields["name"]) for fields in axes[axis]]
            if str(value) not in names:
                raise ConfigError(
                    f"{where}: exclude: {axis}: {shown(value)}: none of {', '.join(names)[:200]}"
                )
        if not rule:
            raise ConfigError(f"{where}: exclude: an empty rule would leave out every job; remove it")
