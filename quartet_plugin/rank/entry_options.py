"""The command of the drop-in entry: the plugin's few flags, and the user's program, run as python would."""

import argparse
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from quartet_plugin.errors import QuartetError, UsageError
from quartet_plugin.protocol.program_words import end_of_options
from quartet_plugin.protocol.terminal import terminal_line

Device = Literal["auto", "cpu", "cuda"]

USAGE = "python -m quartet_plugin.megatron [-m MODULE | SCRIPT] ARGS..."
_DEVICES = ("auto", "cpu", "cuda")
_HELP = {
    "plan": ("FILE", "apply this plan: shape, layout, split, schedule and rank mapping"),
    "device": ("{auto,cpu,cuda}", "the device to train on; without a GPU auto uses the CPU, in trials only"),
    "trial": ("FILE", "a trial.json: measure a few iterations, write the results beside it, and stop"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryOptions:
    """The values of the `--quartet-*` flags."""

    plan: Path | None = None
    device: Device = "auto"
    trial: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryCommand:
    """The program to run as __main__, its arguments without the plugin's flags, and their values."""

    target: str
    is_module: bool
    arguments: tuple[str, ...]
    options: EntryOptions


def read_command(words: Sequence[str], *, usage: str = USAGE) -> EntryCommand | None:
    """The command line behind `-m quartet_plugin.ADAPTER`; None when it asks for the entry's help.

    Raises UsageError for a missing program, an unknown `--quartet-*` flag or a wrong value.
    """
    options, rest = take_options(words)
    if rest[:1] in (["-h"], ["--help"]):
        return None
    is_module = rest[:1] == ["-m"]
    rest = rest[1:] if is_module else rest
    if not rest or rest[0].startswith("-"):
        missing = "module follows -m" if is_module else "script to run"
        raise UsageError(f"no {missing}; usage: {usage}")
    return EntryCommand(target=rest[0], is_module=is_module, arguments=tuple(rest[1:]), options=options)


def command_of_process(words: Sequence[str], *, usage: str = USAGE) -> EntryCommand | None:
    """Return what `read_command` does; words that it refuses end this process in one line."""
    try:
        return read_command(words, usage=usage)
    except QuartetError as error:
        print(f"quartet: {terminal_line(str(error))}", file=sys.stderr)
        raise SystemExit(int(error.exit_code)) from None


def take_options(words: Sequence[str]) -> tuple[EntryOptions, list[str]]:
    """The plugin's flags anywhere before a `--`, and all other words in their order."""
    values: dict[str, str] = {}
    rest: list[str] = []
    end = end_of_options(words)
    flags = iter(words[:end])
    for word in flags:
        if not word.startswith("--quartet-"):
            rest.append(word)
            continue
        flag, has_value, value = word.partition("=")
        name = flag.removeprefix("--quartet-")
        if name not in _HELP:
            raise UsageError(f"{flag}: unknown; quartet has {', '.join(f'--quartet-{n}' for n in _HELP)}")
        if not has_value:
            value = next(flags, "--")
            if value == "--":
                raise UsageError(f"{flag}: a value must follow: {_HELP[name][0]}")
        values[name] = value
    rest += words[end:]
    device = values.get("device", "auto")
    if device not in _DEVICES:
        raise UsageError(f"--quartet-device: {device!r}; must be one of {', '.join(_DEVICES)}")
    options = EntryOptions(
        plan=_path(values, "plan"), device=cast(Device, device), trial=_path(values, "trial")
    )
    return options, rest


def _path(values: dict[str, str], name: str) -> Path | None:
    if name not in values:
        return None
    if not values[name]:
        raise UsageError(f"--quartet-{name}: the file's name is empty")
    return Path(values[name])


def add_group(parser: argparse.ArgumentParser, options: EntryOptions) -> None:
    """Show the flags in `--help`, and their values among the parsed arguments.

    The entry has already taken the words out of sys.argv, so the values come in as defaults.
    """
    group = parser.add_argument_group("quartet", "the plugin's own flags (quartet_plugin)")
    for name, (metavar, text) in _HELP.items():
        value = getattr(options, name)
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


def place_on_path(command: EntryCommand) -> None:
    """Set sys.path[0] as python does for a script: its own folder, where a tree may bring its framework."""
    if not command.is_module and not sys.flags.safe_path:
        sys.path[0] = str(Path(command.target).resolve().parent)


def run_program(command: EntryCommand, arguments: list[str]) -> None:
    """Run a script or module as __main__, with sys.argv and sys.path[0] as python sets them."""
    sys.argv = [command.target, *arguments]
    if command.is_module:
        # `python -m` puts the current folder first, and so did the one that started the entry.
        runpy.run_module(command.target, run_name="__main__", alter_sys=True)
        return
    place_on_path(command)
    runpy.run_path(command.target, run_name="__main__")
