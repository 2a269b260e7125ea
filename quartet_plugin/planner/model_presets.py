"""Models by the names that people use: the `model` section of a job for each, with its source."""

import difflib
import functools
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import read_json, shown
from quartet_plugin.model.huggingface import model_section


@functools.cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Every preset by name: its `source` and its `model` section."""
    with resources.as_file(resources.files("quartet_plugin.planner") / "models.json") as path:
        content: dict[str, dict[str, Any]] = read_json(path)
    return content


def preset_named(name: str) -> dict[str, Any]:
    """The `model` section of a preset; dashes, dots and capitals do not count.

    Raises ConfigError for an unknown name, with the names that are spelled most like it.
    """
    by_plain = {_plain(known): known for known in presets()}
    known = by_plain.get(_plain(name[:100]))
    if known is not None:
        return dict(presets()[known]["model"])
    near = [by_plain[plain] for plain in difflib.get_close_matches(_plain(name[:100]), list(by_plain), n=2)]
    advice = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(presets())}"
    raise ConfigError(f"model {shown(name)}: unknown; {advice}")


def with_preset(model: Any, *, folder: Path | None = None) -> Any:
    """A `model` section in full: of a preset's `name`, or of the HuggingFace config.json under `hf`.

    Other keys of the section go before theirs; a text alone is a name. A relative path starts at `folder`.
    Raises ConfigError for an unknown name, or a config.json that no section can hold.
    """
    if isinstance(model, str):
        return preset_named(model)
    if not isinstance(model, dict):
        return model
    if isinstance(model.get("hf"), str):
        path = Path(model["hf"])
        return {**model_section(path if folder is None else folder / path), **_without(model, "hf")}
    if isinstance(model.get("name"), str):
        return {**preset_named(model["name"]), **_without(model, "name")}
    return model


def _without(section: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name != key}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
