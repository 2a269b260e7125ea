"""The ds_config of a DeepSpeed command, and its section `quartet`, which tuner and ranks read."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import Field

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import parse_json, read_bytes, shown
from quartet_plugin.model.sections import Section, validate

SECTION = "quartet"
AUTO = "auto"
# A function of the script, or of a module: NAME, or MODULE:NAME.
FUNCTION = r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*:)?[A-Za-z_]\w*"
_FLAGS = ("--deepspeed_config", "--deepspeed-config")
_MAX_BYTES = 16 * 2**20


class _PlanSection(Section):
    plan: str | None = Field(default=None, min_length=1, max_length=4096)
    schedule: str | None = Field(default=None, min_length=1, max_length=4096)
    layer_builder: str | None = Field(default=None, pattern=f"^{FUNCTION}$", max_length=400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The `quartet` section: the files of a plan and of a schedule; `is_auto`: the plan is `auto`.

    A schedule file brings a split and a placement, which replace the plan's. `layer_builder` names the
    function that makes the layers of a model of another depth and width.
    """

    plan: Path | None = None
    schedule: Path | None = None
    is_auto: bool = False
    layer_builder: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the section names no file and no `auto`."""
        return self.plan is None and self.schedule is None and not self.is_auto

    def refuse_auto(self) -> None:
        """Raise ConfigError for the plan `auto`, which stands for a plan in trials only."""
        if self.is_auto:
            raise ConfigError(
                f"{SECTION}.plan: {AUTO!r} is for trials of `quartet tune`; name a plan file to train with it"
            )


def parse_settings(config: Mapping[str, Any], *, where: str = "ds_config") -> Settings:
    """The `quartet` section of a ds_config; empty settings where there is none.

    Raises ConfigError in one line for an unknown key or a wrong value.
    """
    if SECTION not in config:
        return Settings()
    data = config[SECTION]
    if not isinstance(data, Mapping):
        raise ConfigError(f'{where}: {SECTION}: must be an object like {{"plan": "plan.json"}}')
    section = validate(_PlanSection, dict(data), where=f"{where}: {SECTION}")
    if (section.plan, section.schedule, section.layer_builder) == (None, None, None):
        raise ConfigError(f"{where}: {SECTION}: names nothing; give plan, the file of a plan, or auto")
    return Settings(
        plan=None if section.plan in (None, AUTO) else Path(section.plan),
        schedule=None if section.schedule is None else Path(section.schedule),
        is_auto=section.plan == AUTO,
        layer_builder=section.layer_builder,
    )


def config_file_of(words: Sequence[str]) -> Path | None:
    """The ds_config that a script's arguments name; None where they name none. The last one counts."""
    path = None
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        flag, has_value, value = word.partition("=")
        if flag in _FLAGS:
            text = value if has_value else following
            path = Path(text) if text else None
    return path


def is_config_file(path: Path) -> bool:
    """Whether a file has this path; a ds_config in base64, which DeepSpeed takes too, may be too long."""
    with suppress(OSError):
        return path.is_file()
    return False


def read_config(path: Path) -> dict[str, Any]:
    """The content of a ds_config file, which may have comments and trailing commas where hjson is installed.

    Raises ConfigError where that is no object.
    """
    content = read_bytes(path, max_bytes=_MAX_BYTES)
    try:
        data = parse_json(content, where=path)
    except ConfigError as error:
        if not isinstance(error.__cause__, json.JSONDecodeError):
            raise
        data = _parse_hjson(content, where=path, fault=error)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a ds_config is a JSON object; this is a {type(data).__name__}")
    return data


def _parse_hjson(content: bytes, *, where: Path, fault: ConfigError) -> Any:
    """The value of a text as DeepSpeed reads it; `fault` is why it is not JSON.

    Raises ConfigError where hjson is not installed or refuses the text, or for a value that no JSON file may
    have.
    """
    try:
        import hjson
    except ImportError as error:
        raise ConfigError(f"{fault}; remove comments and trailing commas, or install hjson") from error
    try:
        text = json.dumps(hjson.loads(content.decode("utf-8"), object_pairs_hook=_distinct))
    except (ValueError, IndexError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{fault}; hjson: {error}") from error
    return parse_json(text.encode("utf-8"), where=where)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a file. Raises ValueError for a key that appears twice."""
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"{shown(twice[0])}: the key appears twice in one object")
    return dict(pairs)
