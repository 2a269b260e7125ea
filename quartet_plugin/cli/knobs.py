"""`quartet knobs`: what is tuned, within which values, and why a value is kept."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quartet_plugin.cli.command import RUNS, JsonSwitch, RunName, RunsFolder, find_run, invocation
from quartet_plugin.cli.output import show
from quartet_plugin.errors import ConfigError, InfeasibleError

if TYPE_CHECKING:
    from quartet_plugin.space.knob_table import KnobRow
    from quartet_plugin.space.knobs.knob import Knob
    from quartet_plugin.space.plan_space import Space


def knobs_command(
    ctx: typer.Context, run: RunName = None, run_dir: RunsFolder = RUNS, as_json: JsonSwitch = False
) -> None:
    """List every knob: what it sets, its class of change, its flag, and its legal values.

    With a RUN the list also has the value in that run's command, the values that its search may choose, and
    the reason where a value is kept. With a command after -- the list has these three by the command's flags
    alone.
    """
    from quartet_plugin.space.knob_table import NOT_ASKED, knob_rows

    words = invocation(ctx).user_command
    if run is not None and words is not None:
        raise ConfigError(f"{run}: both a run and a command are given; give only one")
    unknown = None
    if words is None:
        rows = knob_rows(None if run is None else _space_of(run, run_dir))
    else:
        rows, unknown = _rows_of_command(words)
    if as_json:
        typer.echo(json.dumps({"schema_version": 1, "knobs": [row.record() for row in rows]}, indent=1))
        return
    for row in rows:
        show(*_lines(row))
    if any(row.state == NOT_ASKED for row in rows):
        show("", f"{NOT_ASKED}: settings that rarely help, or with which a checkpoint no longer loads")
    if unknown is not None:
        show(
            "",
            f"why a value is kept is known after the baseline of a run (`quartet knobs RUN`): {unknown}",
        )


def _space_of(run: str, run_dir: Path) -> "Space":
    """The search space of a run, determined by its baseline."""
    from quartet_plugin.tuner.run_space import space_of_run

    return space_of_run(find_run(run, run_dir=run_dir))


def _rows_of_command(words: tuple[str, ...]) -> "tuple[list[KnobRow], str | None]":
    """The rows of a command, and why they have the flags' values alone; None where they have reasons too."""
    from quartet_plugin.launchers.command import parse_command
    from quartet_plugin.planner.command_space import space_of_command
    from quartet_plugin.space.knob_table import knob_rows

    try:
        return knob_rows(space_of_command(parse_command(words))), None
    except (ConfigError, InfeasibleError) as error:
        return _stated(knob_rows(), words), str(error)


def _stated(rows: "list[KnobRow]", words: tuple[str, ...]) -> "list[KnobRow]":
    """The rows, with the values that the command's flags set."""
    from dataclasses import replace

    from quartet_plugin.launchers.megatron_flags import flags_among

    given = dict(flags_among(words))
    return [replace(row, value=_stated_value(row.knob, given)) for row in rows]


def _stated_value(knob: "Knob", given: Mapping[str, Sequence[str]]) -> str | None:
    """The value that a command's flags set; None if they do not determine it."""
    from quartet_plugin.space.knobs.knob import SettingKnob

    if knob.kind == "switch" and knob.flag:
        is_on_without = isinstance(knob, SettingKnob) and knob.without_flag is True
        return knob.text(is_on_without != (knob.flag in given))
    values = given.get(knob.flag)
    if not values:
        return None
    if knob.kind == "word":
        # Several words are a set, as plans have it.
        return "+".join(sorted(set(values))) or None
    if knob.kind == "sizes":
        return "+".join(values)
    return values[0] or None


def _lines(row: "KnobRow") -> list[str]:
    knob = row.knob
    value = "" if row.value is None else f", now {row.value}"
    choices = f": {', '.join(row.choices)}" if len(row.choices) > 1 else ""
    named = " · ".join(filter(None, (knob.flag, knob.ds_key)))
    lines = [
        f"{knob.name}{value} (class {knob.change_class}; {row.state}{choices})",
        f"    {knob.description}",
        f"    {knob.rule}",
    ]
    lines += [f"    not in search.{knob.name}: {', '.join(row.left_out)}"] if row.left_out else []
    return [*lines, f"    {named}"] if named else lines
