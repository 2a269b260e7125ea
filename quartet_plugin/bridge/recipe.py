"""Trains a recipe of Megatron-Bridge by its name.

    torchrun ... -m quartet_plugin.bridge.recipe --recipe NAME [SECTION.FIELD=VALUE ...]

The recipe is a function of that name in `megatron.bridge.perf_recipes` or `megatron.bridge.recipes`; words
behind it change fields of its configuration. The script `run_recipe.py` of the Bridge's repository does more.
"""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from quartet_plugin.errors import ConfigError, QuartetError
from quartet_plugin.protocol.terminal import terminal_line

PACKAGES = ("megatron.bridge.perf_recipes", "megatron.bridge.recipes")


def configuration_of(name: str) -> Any:
    """The configuration of a recipe. Raises ConfigError where there is none of this name."""
    if name.isidentifier() and not name.startswith("_"):
        for module in _modules_with(name):
            return getattr(importlib.import_module(module), name)()
    raise ConfigError(f"--recipe {name[:100]!r}: no recipe of {' or '.join(PACKAGES)}")


def _modules_with(name: str) -> Iterator[str]:
    """The modules of the packages that define a function, read without an import of them."""
    for package in PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            spec = None
        for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
            for file in sorted(folder.rglob("*.py")):
                if f"\ndef {name}(" in file.read_text(encoding="utf-8"):
                    parts = file.relative_to(folder).with_suffix("").parts
                    yield ".".join((package, *(part for part in parts if part != "__init__")))


def override(config: Any, words: Sequence[str]) -> None:
    """Set fields by `SECTION.FIELD=VALUE`. Raises ConfigError for a field that is not there, or no value."""
    for word in words:
        path, has_value, text = word.partition("=")
        section_name, has_field, field = path.partition(".")
        section = getattr(config, section_name, None) if has_value and has_field else None
        if section is None or field not in vars(section):
            raise ConfigError(
                f"{word[:100]!r}: must be SECTION.FIELD=VALUE, with a field of the configuration"
            )
        try:
            value = _number(yaml.safe_load(text), present=getattr(section, field))
        except yaml.YAMLError as error:
            raise ConfigError(f"{word[:100]!r}: its value cannot be read as YAML") from error
        except ValueError as error:
            kind = "true or false" if isinstance(getattr(section, field), bool) else "a number"
            raise ConfigError(f"{word[:100]!r}: must be {kind}, as the recipe's value is") from error
        setattr(section, field, value)


def _number(value: Any, *, present: Any) -> Any:
    """The value; of a field that holds a number a text such as `1e-4`, which YAML 1.1 reads as text, is one.

    Raises ValueError where it is another text, and for a switch that gets anything but true, false or null.
    """
    if isinstance(present, bool) and not (value is None or isinstance(value, bool)):
        raise ValueError(value)
    is_number = isinstance(present, int | float) and not isinstance(present, bool)
    if not isinstance(value, str) or not is_number:
        return value
    number = float(value)
    return int(number) if isinstance(present, int) and number.is_integer() else number


def main(words: Sequence[str]) -> None:
    """Train the recipe that the words name."""
    parser = argparse.ArgumentParser(prog="python -m quartet_plugin.bridge.recipe")
    parser.add_argument("--recipe", required=True, metavar="NAME")
    options, changes = parser.parse_known_args(list(words))
    try:
        config = configuration_of(options.recipe)
        override(config, changes)
    except QuartetError as error:
        print(f"quartet: {terminal_line(str(error))}", file=sys.stderr)
        raise SystemExit(int(error.exit_code)) from None
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    pretrain(config, forward_step)


if __name__ == "__main__":
    main(sys.argv[1:])
