"""The `quartet` section of a ds_config, and where a command line names its ds_config."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import Field

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import read_json
from quartet_plugin.model.sections import Section, validate

SECTION = "quartet"
AUTO = "auto"
_FLAGS = ("--deepspeed_config", "--deepspeed-config")
MAX_BYTES = 16 * 2**20


class _PlanSection(Section):
    plan: str | None = Field(default=None, min_length=1, max_length=4096)
    schedule: str | None = Field(default=None, min_length=1, max_length=4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The user's choice: a plan file, or a schedule file with its split and placement; `is_auto`: a trial's.

    A schedule file replaces the plan's schedule and split.
    """

    plan: Path | None = None
    schedule: Path | None = None
    is_auto: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked for."""
        return self.plan is None and self.schedule is None and not self.is_auto


def parse_settings(config: Mapping[str, Any], *, where: str = "ds_config") -> Settings:
    """The section of a ds_config; empty where it has none.

    Raises ConfigError in one line for an unknown key or a wrong value.
    """
    if SECTION not in config:
        return Settings()
    data = config[SECTION]
    if not isinstance(data, Mapping):
        raise ConfigError(f'{where}: {SECTION}: must be an object like {{"plan": "plan.json"}}')
    section = validate(_PlanSection, dict(data), where=f"{where}: {SECTION}")
    if section.plan is None and section.schedule is None:
        raise ConfigError(f"{where}: {SECTION}: names nothing; give plan, the file of a plan, or auto")
    return Settings(
        plan=None if section.plan in (None, AUTO) else Path(section.plan),
        schedule=None if section.schedule is None else Path(section.schedule),
        is_auto=section.plan == AUTO,
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


def read_config(path: Path) -> dict[str, Any]:
    """A ds_config file. Raises ConfigError where it is no JSON object."""
    data = read_json(path, max_bytes=MAX_BYTES)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a ds_config is a JSON object; this is a {type(data).__name__}")
    return data


def as_config(value: Any) -> dict[str, Any] | None:
    """A config argument of `deepspeed.initialize` as a copied dictionary; None if no file or mapping.

    Raises ConfigError for a file that cannot be read.
    """
    if isinstance(value, Mapping):
        return copy.deepcopy(dict(value))
    if isinstance(value, str | Path) and Path(value).is_file():
        return read_config(Path(value))
    return None
