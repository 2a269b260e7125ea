"""A q.yaml that lists every key with its default and its meaning, as comments."""

from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from quartet_plugin.model.sections import Section
from quartet_plugin.space.config import FamilyConfig, ScalingConfig, SearchConfig
from quartet_plugin.tuner.config import TuneConfig

_HEAD = """\
# What `quartet tune --config FILE` searches. Every key may be left out; those here have their defaults.
# To change one, take the # away from it and from the section above it.
# In `search`, auto is tuned, a value is fixed, and a list like [1, 2, 4] is searched: docs/search.md.

"""
# Where nothing is the default, a value that shows the form.
_EXAMPLES = {
    "run": "my-model",
    "cluster": "cluster.json",
    "calibration": "calibration.json",
    "site": "site.yaml",
    "nodes": "16",
}
# The sections of `search` that are absent by default.
_SECTIONS: dict[str, type[Section]] = {"scaling": ScalingConfig, "schedule_family": FamilyConfig}
_COLUMN = 44


def config_text() -> str:
    """The file's text."""
    lines: list[str] = []
    for name, known in TuneConfig.model_fields.items():
        if isinstance(known.default, Section):
            lines += ["", f"# {name}:{' ' * (_COLUMN - len(name) - 3)}# {known.description}"]
            lines += _section(type(known.default), indent="  ")
        else:
            lines.append(_line(name, known, indent="", is_axis=False))
    return _HEAD + "\n".join(lines) + "\n"


def _section(kind: type[Section], *, indent: str) -> Iterator[str]:
    for name, known in kind.model_fields.items():
        if name in _SECTIONS:
            yield f"# {indent}{name}:".ljust(_COLUMN) + f"# {known.description}"
            yield from _section(_SECTIONS[name], indent=f"{indent}  ")
        else:
            yield _line(name, known, indent=indent, is_axis=kind in (SearchConfig, *_SECTIONS.values()))


def _line(name: str, known: FieldInfo, *, indent: str, is_axis: bool) -> str:
    value = "auto" if is_axis and known.default is None else _written(name, known.default)
    return f"# {indent}{name}: {value}".ljust(_COLUMN - 1) + f" # {known.description}"


def _written(name: str, value: Any) -> str:
    if value is None:
        return _EXAMPLES[name]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple) and len(value) == 1:
        return str(value[0])
    return "[]" if value == () else str(value)
