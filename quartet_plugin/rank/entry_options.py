"""The few flags of the drop-in entry, read before anything heavy is imported."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from quartet_plugin.errors import UsageError

Device = Literal["auto", "cpu", "cuda"]

USAGE = "python -m quartet_plugin.megatron [-m MODULE | SCRIPT] ARGS..."
_DEVICES = ("auto", "cpu", "cuda")
_HELP = {
    "plan": ("FILE", "apply this plan: shape, layout, split, schedule and rank mapping"),
    "device": ("{auto,cpu,cuda}", "where to train; auto takes the CPU when the machine has no GPU"),
    "trial": ("FILE", "a trial.json: measure a few iterations, write them beside it and stop"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryOptions:
    """What the `--quartet-*` flags say."""

    plan: Path | None = None
    device: Device = "auto"
    trial: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryCommand:
    """The program to run as __main__, its arguments without ours, and our options."""

    target: str
    is_module: bool
    arguments: tuple[str, ...]
    options: EntryOptions


def read_command(words: Sequence[str], *, usage: str = USAGE) -> EntryCommand | None:
    """The command line behind `-m quartet_plugin.ADAPTER`; None when it asks for our own help.

    Raises UsageError for a missing program, an unknown `--quartet-*` flag or a wrong value.
    """
    options, rest = take_options(words)
    if rest[:1] in (["-h"], ["--help"]):
        return None
    is_module = rest[:1] == ["-m"]
    rest = rest[1:] if is_module else rest
    if not rest or rest[0].startswith("-"):
        what = "module follows -m" if is_module else "script to run"
        raise UsageError(f"no {what}; usage: {usage}")
    return EntryCommand(target=rest[0], is_module=is_module, arguments=tuple(rest[1:]), options=options)


def take_options(words: Sequence[str]) -> tuple[EntryOptions, list[str]]:
    """Our flags anywhere before a `--`, and all other words in their order."""
    found: dict[str, str] = {}
    rest: list[str] = []
    at = 0
    while at < len(words) and words[at] != "--":
        word = words[at]
        at += 1
        if not word.startswith("--quartet-"):
            rest.append(word)
            continue
        flag, has_value, value = word.partition("=")
        name = flag.removeprefix("--quartet-")
        if name not in _HELP:
            raise UsageError(f"{flag}: unknown; ours are {', '.join(f'--quartet-{n}' for n in _HELP)}")
        if not has_value:
            if at == len(words):
                raise UsageError(f"{flag}: a value must follow: {_HELP[name][0]}")
            value = words[at]
            at += 1
        found[name] = value
    rest += words[at:]
    device = found.get("device", "auto")
    if device not in _DEVICES:
        raise UsageError(f"--quartet-device: {device!r}; must be one of {', '.join(_DEVICES)}")
    options = EntryOptions(
        plan=_path(found, "plan"), device=cast(Device, device), trial=_path(found, "trial")
    )
    return options, rest


def _path(found: dict[str, str], name: str) -> Path | None:
    if name not in found:
        return None
    if not found[name]:
        raise UsageError(f"--quartet-{name}: the file's name is empty")
    return Path(found[name])


def add_group(parser: argparse.ArgumentParser, options: EntryOptions) -> None:
    """Show the flags in `--help`, and their values among the parsed arguments.

    The entry has already taken the words out of sys.argv, so the values come in as defaults.
    """
    group = parser.add_argument_group("quartet", "the plugin's own flags (quartet_plugin)")
    values = {"plan": options.plan, "device": options.device, "trial": options.trial}
    for name, (metavar, text) in _HELP.items():
        value = values[name]
        group.add_argument(
            f"--quartet-{name}", default=None if value is None else str(value), metavar=metavar, help=text
        )
    _mend_help(parser)


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Let `--help` work: a bare % in one of Megatron's own help texts makes argparse raise instead."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")
