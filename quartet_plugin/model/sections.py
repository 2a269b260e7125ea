"""Sections of files that people write: read from YAML by a safe loader, checked by pydantic models."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import field_path, read_bytes, shown
from quartet_plugin.model.schema import nearest_word, unknown_key

# Written by hand, but for a cluster of 4,096 nodes inside; YAML takes 50 microseconds to read a value.
MAX_CONFIG_BYTES = 1 << 19
MAX_CONFIG_VALUES = 100_000
_SECTION = "must be a section, with keys of its own"
_CLUSTER_FILE = "a large cluster goes into a file of its own, `cluster: {file: cluster.json}`"


class Section(BaseModel):
    """One object of such a file, frozen; unknown keys, other types, NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def validate[M: BaseModel](model: type[M], data: Any, *, where: str) -> M:
    """`data` as a `model`; raises one ConfigError line, `where: field: value: rule`, for the first fault.

    A key that nothing reads goes before one that is missing: the second is mostly the first, misspelt.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = sorted(error.errors(include_url=False), key=lambda fault: fault["type"] == "missing")
        places = [_place(fault, data) for fault in faults]
        same = [fault for fault, place in zip(faults, places, strict=True) if place == places[0]]
        others = len(set(places)) - 1
        more = f" (and {others} more)" if others else ""
        line = _fault_line(same, places[0], model)
        if where.endswith(".json"):
            line = line.replace(_SECTION, "must be a JSON object")
        raise ConfigError(f"{where}: {line}{more}") from error


def _place(fault: ErrorDetails, data: Any) -> tuple[int | str, ...]:
    """The keys and indices of the data that lead to a fault, without pydantic's names of alternatives."""
    place: list[int | str] = []
    for part in fault["loc"]:
        is_key = isinstance(data, dict) and part in data
        if is_key or (isinstance(data, list) and isinstance(part, int) and part < len(data)):
            data = data[part]
            place.append(part)
    if fault["type"] == "missing":
        place.append(fault["loc"][-1])
    return tuple(place)


def _fault_line(faults: Sequence[ErrorDetails], place: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """`field: value: rule` of the faults at one place, one for each form that a value there may have.

    A validator of this package (type "rule") has written all three.
    """
    fault = faults[0]
    if fault["type"] == "rule":
        return fault["msg"]
    field = field_path(place) or "the file"
    if fault["type"] == "missing":
        return f"{field}: missing; the key is required"
    start = f"{field}: {shown(fault['input'])}"
    if fault["type"] == "extra_forbidden":
        return f"{start}: {unknown_key(place[-1], known=_keys(model, place[:-1]))}"
    if fault["type"] in ("model_type", "dict_type"):
        return f"{start}: {_SECTION}"
    words = [word for entry in faults for word in _words_of(entry)]
    # The validators of a request make a list of one value: its other form is `auto`.
    words += ["auto"] if any(entry["loc"][-1:] == (0,) != place[-1:] for entry in faults) else []
    rules = dict.fromkeys(_rule_of(entry) for entry in faults)
    return f"{start}: {', or '.join(rules)}{nearest_word(fault['input'], known=words)}"


def _words_of(fault: ErrorDetails) -> list[str]:
    """The words that a value may be, where the fault is that it is another one."""
    return re.findall("'([^']*)'", fault["ctx"]["expected"]) if fault["type"] == "literal_error" else []


def _rule_of(fault: ErrorDetails) -> str:
    rule = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{rule[:1].lower()}{rule[1:]}"


def _keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """The keys of the section that `path` leads to from `model`; none where its type is no section."""
    section: type[BaseModel] | None = model
    for part in path:
        known = None if section is None else section.model_fields.get(str(part))
        if known is not None:
            section = _section_in(known.annotation)
    return [] if section is None else list(section.model_fields)


def _section_in(hint: Any) -> type[BaseModel] | None:
    """The section that a type hint holds, be it in a union or a list."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return hint
    return next((section for part in get_args(hint) if (section := _section_in(part))), None)


def load_yaml(path: Path) -> Any:
    """The data in a short YAML file, read by a safe loader. Raises ConfigError in one line."""
    import yaml

    text = read_bytes(path, max_bytes=MAX_CONFIG_BYTES, rule=_CLUSTER_FILE)
    num_values = sum(map(text.count, (b",", b"\n", b"[", b"{", b"- ")))
    if num_values > MAX_CONFIG_VALUES:
        raise ConfigError(
            f"{path}: about {num_values} values; must be at most {MAX_CONFIG_VALUES}; {_CLUSTER_FILE}"
        )
    try:
        return yaml.load(text, Loader=_unique_loader())  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{position}: not YAML that is safe to read: {error.problem}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        words = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}: not YAML that is safe to read: {words}") from error


def _unique_loader() -> type[Any]:
    """A safe loader that refuses a key given twice, and aliases, which can blow a small file up."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
                raise yaml.constructor.ConstructorError(None, None, "aliases are not read", mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys: set[str] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue  # a list or a mapping, which is refused below
                if key.value in keys:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {str(key.value)[:60]!r} appears twice", key.start_mark
                    )
                keys.add(key.value)
            return super().construct_mapping(node, deep=deep)

    return Loader
