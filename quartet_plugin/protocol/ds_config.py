"""The ds_config of a DeepSpeed command, and its section `quartet`, which tuner and ranks read."""

import base64
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
_MAX_LABEL = 200


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


def config_argument(words: Sequence[str]) -> str | None:
    """The last value of `--deepspeed_config` in a script's arguments; None where there is none."""
    argument = None
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        flag, has_value, value = word.partition("=")
        if flag in _FLAGS:
            argument = (value if has_value else following) or None
    return argument


def config_label(argument: str) -> str:
    """The value of `--deepspeed_config` in a message: base64 may be long, or have line ends."""
    is_short = len(argument) <= _MAX_LABEL and argument.isprintable()
    return argument if is_short else shown(argument)


def load_config(argument: str | Path, *, folder: Path = Path()) -> dict[str, Any] | None:
    """The ds_config that DeepSpeed makes of a file's path, from `folder`, or of a text in base64.

    None for a text that is neither. Raises ConfigError where the content is no object.
    """
    path = folder / argument
    if _is_file(path):
        return read_config(path)
    text = str(argument)
    content = _decoded(text)
    if content is None:
        return None
    return _parse_config(content, where=f"{config_label(text)} (no such file, so read as base64)")


def _is_file(path: Path) -> bool:
    """Whether a file has this path; a text in base64 may be too long for a path."""
    with suppress(OSError):
        return path.is_file()
    return False


def _decoded(text: str) -> bytes | None:
    """The bytes of a text in base64, decoded as DeepSpeed does; None where it has none, or none of UTF-8."""
    try:
        content = base64.urlsafe_b64decode(text)
        content.decode("utf-8")
    except ValueError:
        return None
    return content or None


def read_config(path: Path) -> dict[str, Any]:
    """The content of a ds_config file, which may have comments and trailing commas where hjson is installed.

    Raises ConfigError where that is no object.
    """
    return _parse_config(read_bytes(path, max_bytes=_MAX_BYTES), where=str(path))


def _parse_config(content: bytes, *, where: str) -> dict[str, Any]:
    """The object in the bytes of a ds_config. Raises ConfigError, which begins with `where`."""
    try:
        data = parse_json(content, where=where)
    except ConfigError as error:
        if not isinstance(error.__cause__, json.JSONDecodeError):
            raise
        data = _parse_hjson(content, where=where, fault=error)
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: a ds_config is a JSON object; this is a {type(data).__name__}")
    return data


def _parse_hjson(content: bytes, *, where: str, fault: ConfigError) -> Any:
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
