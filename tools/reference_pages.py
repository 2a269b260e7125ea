"""Writes the pages of docs/ that follow from the code, and the picture of the live table.

    python tools/reference_pages.py [--check]

Each page, or its part between two marks, is written whole. `--check` writes nothing and ends with exit code 1
where a page would change.
`tests/test_reference_pages.py` holds the committed pages to this.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from quartet_plugin.cli.main import build_app  # noqa: E402 - from this checkout
from quartet_plugin.cli.schedule_steps import at_uniform_costs  # noqa: E402
from quartet_plugin.errors import MEANINGS, QuartetError  # noqa: E402
from quartet_plugin.model.sections import Section  # noqa: E402
from quartet_plugin.schedule.named.registry import NAMED, Offer, named  # noqa: E402
from quartet_plugin.space.config import FamilyConfig, ScalingConfig  # noqa: E402
from quartet_plugin.space.knobs.registry import KNOBS, SETTINGS  # noqa: E402
from quartet_plugin.tuner.config import TuneConfig  # noqa: E402
from tools.live_table_picture import live_table_picture  # noqa: E402

WIDTH = 100
MADE, END = "<!-- made by tools/reference_pages.py -->", "<!-- end of what is made -->"
# Of the table of named schedules.
NUM_DEVICES, NUM_MICROBATCHES = 4, 8
# The page that says more of a command.
PAGES = {
    "tune": "tutorial.md",
    "batch": "batch.md",
    "knobs": "knobs.md",
    "work": "workers.md",
    "status": "report.md",
    "trials": "report.md",
    "report": "report.md",
    "repair": "storage.md",
    "check": "support.md#the-parity-gate-in-a-study",
    "convert": "support.md#checkpoints",
    "doctor": "support.md#which-megatron",
    "recheck": "support.md#which-megatron",
    "partition": "partitions.md",
    "schedule": "schedules.md",
    "rehearse": "schedules.md#a-rehearsal",
    "trace": "report.md",
    "predict": "cost-model.md",
    "plan": "planner.md",
    "explain": "planner.md",
    "layout": "planner.md#one-layout",
    "probe": "calibration.md",
    "profile": "calibration.md",
    "calibrate": "calibration.md",
}
OFFERS = {
    Offer.STOCK: "yes, by the framework",
    Offer.DEFAULT: "yes",
    Offer.REQUESTED: "when asked for",
    Offer.NEVER: "no",
}


def wrapped(text: str, *, first: str = "", indent: str = "") -> list[str]:
    """A paragraph at the documents' width."""
    return textwrap.wrap(
        " ".join(text.split()),
        WIDTH,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def item(name: str, text: str) -> list[str]:
    """An entry of a list: a name as code, and what it does."""
    return wrapped(f"`{name}`: {text}" if text else f"`{name}`", first="- ", indent="  ")


def commands_page() -> str:
    """`docs/commands.md`: every command with its words and options, as `--help` says them."""
    group = typer.main.get_command(build_app())
    lines = ["# Commands", "", MADE, ""]
    lines += wrapped(
        "Every command with its options, from the same parsers as `quartet COMMAND --help`; "
        "`--accept-changed-source` stands in the text of the commands that take it. What follows a "
        "literal `--` is your training command; it is never edited. `quartet --install-completion` "
        "completes commands and options in bash, zsh, fish and PowerShell; `quartet --show-completion` "
        "prints the script. Exit codes are in [exit-codes.md](exit-codes.md)."
    )
    lines.append("")
    for name, command in commands_of(group):
        link = f"[`quartet {name}`](#quartet-{name.replace(' ', '-')})"
        lines += wrapped(f"{link}: {summary_of(command)}", first="- ", indent="  ")
    lines += ["", "## Options of every command", ""]
    context = group.make_context("quartet", ["--", "list"], resilient_parsing=True)
    for parameter in group.params:
        lines += item(*words_of(parameter, context))
    for name, command in commands_of(group):
        lines += ["", f"## quartet {name}", "", *command_lines(name, command)]
    return "\n".join(lines) + "\n"


def commands_of(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command, those of a group with its name before theirs."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, (*words, name))
        else:
            yield " ".join((*words, name)), command


def summary_of(command: Any) -> str:
    """The first paragraph of a command's help."""
    return " ".join(command.help.split("\n\n")[0].split()).rstrip(".")


def command_lines(name: str, command: Any) -> list[str]:
    """Usage, help, words and options of a command."""
    context = command.make_context(f"quartet {name}", [], resilient_parsing=True)
    known = [
        (parameter, *words_of(parameter, context))
        for parameter in command.params
        if parameter.name != "help" and not getattr(parameter, "hidden", False)
    ]
    usage = [words.split()[0] for parameter, words, _ in known if parameter.param_type_name == "argument"]
    dashes = ["--", "COMMAND"] if "literal --" in (command.epilog or "") else []
    lines = [f"    {' '.join(['quartet', name, '[OPTIONS]', *usage, *dashes])}"]
    for paragraph in (command.help or "").split("\n\n"):
        lines += ["", *wrapped(paragraph)]
    if command.epilog:
        lines += ["", *wrapped(command.epilog.replace("literal --;", "literal `--`;"))]
    page = PAGES.get(name.split()[0])
    if page:
        lines += ["", f"More: [{page.partition('#')[0]}]({page})."]
    return [*lines, "", *(line for _, words, text in known for line in item(words, text))] if known else lines


def words_of(parameter: Any, context: Any) -> tuple[str, str]:
    """A word or option as it is written, and its help with the default."""
    words, text = parameter.get_help_record(context)
    text = re.sub(r"\s*\[default: (.*)\]$", r" Default: \1.", " ".join(text.split()))
    text = re.sub(r"\s*\[required\]$", " Required.", text)
    if parameter.param_type_name == "argument":
        first, *rest = words.split()
        words = " ".join([first if "[" in first or "." in first else first.upper(), *rest])
    return " ".join(words.split()), text


def q_yaml_page() -> str:
    """`docs/q-yaml.md`: every key with its default and meaning, from the schema."""
    lines = ["# q.yaml", "", MADE, ""]
    lines += wrapped(
        "Every key of the file that `quartet tune --config q.yaml` reads, from its schema. Every key may be "
        "left out; unknown keys are refused. In `search`, `auto` tunes an axis, a value fixes it and a list "
        "is searched. `stock`, the command's own value, is allowed where it is the default, and for "
        "`schedule`, `split` and `mapping` ([knobs.md](knobs.md) has each knob's rule). The "
        "[glossary](glossary.md#a-tuning-run) defines *parity gate*, *depth proxy* and other terms. "
        "`quartet init` writes the same as a file of comments. [tutorial.md](tutorial.md#the-configuration) "
        "has an example."
    )
    lines += ["", "## Top level", ""]
    sections = {}
    for name, known in TuneConfig.model_fields.items():
        if isinstance(known.default, Section):
            sections[name] = (type(known.default), known.description)
        else:
            lines += key_lines(name, known)
    for name, (kind, text) in sections.items():
        lines += ["", f"## {name}", "", *wrapped(f"{text}."), "", *section_lines(kind)]
    lines += ["", "## search.scaling", "", *wrapped(f"{(ScalingConfig.__doc__ or '').split(chr(10))[0]}"), ""]
    lines += section_lines(ScalingConfig)
    lines += [
        "",
        "## search.schedule_family",
        "",
        *wrapped(f"{(FamilyConfig.__doc__ or '').split(chr(10))[0]}"),
        "",
    ]
    return "\n".join([*lines, *section_lines(FamilyConfig)]) + "\n"


def section_lines(kind: type[Section]) -> list[str]:
    """The keys of a section."""
    return [line for name, known in kind.model_fields.items() for line in key_lines(name, known)]


def key_lines(name: str, known: Any) -> list[str]:
    """A key with its default and meaning."""
    default = known.default
    if default is None:
        default = "auto" if "auto" in str(known.description) or name in _AXES else "none"
    elif isinstance(default, tuple):
        default = default[0] if len(default) == 1 else list(default)
    elif isinstance(default, bool):
        default = str(default).lower()
    return item(f"{name}: {default}", known.description or "")


_AXES = set(type(TuneConfig.model_fields["search"].default).model_fields) - {"scaling"}


def exit_codes_page() -> str:
    """`docs/exit-codes.md`: every exit code, and the errors that end with it."""
    lines = ["# Exit codes", "", MADE, ""]
    lines += wrapped(
        "Every refusal is one line on stderr with the value, the rule and the fix, and one of these codes; "
        "`--debug` adds the traceback. A code of 1 is an error inside of quartet: please report it."
    )
    lines += ["", "| code | name | meaning |", "| --: | --- | --- |"]
    lines += [f"| {code.value} | `{code.name}` | {meaning} |" for code, meaning in MEANINGS.items()]
    lines += ["", "The errors of `quartet_plugin.errors` by code:", ""]
    for kind in QuartetError.__subclasses__():
        lines += item(f"{kind.__name__}, exit code {int(kind.exit_code)}", (kind.__doc__ or "").strip())
    lines.append("")
    lines += wrapped(
        "Under torchrun, whose own code is always 1, the rank prints the line and leaves the code in "
        "`rank-K.err.json`. What each fault leads to is in [faults.md](faults.md)."
    )
    return "\n".join(lines) + "\n"


def schedule_table_page() -> str:
    """`docs/schedule-table.md`: bubble and memory of each named schedule, by simulation at unit costs."""
    rows = [
        "| schedule | placement | backward | bubble | memory | tuned |",
        "| --- | --- | --- | --: | --: | --- |",
    ]
    for name, schedule in NAMED.items():
        simulation = at_uniform_costs(named(name, num_devices=NUM_DEVICES, num_microbatches=NUM_MICROBATCHES))
        placement = "two copies" if schedule.copies == 2 else schedule.placement.value
        rows.append(
            f"| `{name}` | {placement} | {'split' if schedule.split_backward else 'full'} "
            f"| {100 * simulation.bubble_fraction:.1f} % | {simulation.peak_activation_bytes.max():g} "
            f"| {OFFERS[schedule.offer]} |"
        )
    return put_into("schedule-table.md", rows)


def knobs_page() -> str:
    """`docs/knobs.md`: each knob as its descriptor says it."""
    lines = []
    for knob in KNOBS:
        names = ", ".join(f"`{name}`" for name in (knob.flag, knob.ds_key) if name)
        words = ", ".join(filter(None, (f"class {knob.change_class}", f"default {knob.default}", names)))
        lines += wrapped(
            f"`{knob.name}` ({words}): {knob.description}. *Legal:* {knob.rule}", first="- ", indent="  "
        )
    names = ", ".join(f"`{knob.name}`" for knob in SETTINGS)
    lines += ["", *wrapped(f"The settings of Megatron among them: {names}.")]
    return put_into("knobs.md", lines)


def support_page() -> str:
    """`docs/support.md`: the knobs of each class of change that a search keeps."""
    kept = [knob for knob in KNOBS if knob.default == "stock"]
    classes = []
    for change_class in ("A", "B"):
        names = ", ".join(f"`{knob.name}`" for knob in kept if knob.change_class == change_class)
        classes.append(f"class {change_class} {names}")
    text = f"As the command has it, unless `search` asks for it: {'; '.join(classes)}."
    return put_into("support.md", wrapped(text))


def put_into(name: str, lines: list[str]) -> str:
    """A page of docs/ whose part between the two marks is made."""
    before, _, rest = (ROOT / "docs" / name).read_text(encoding="utf-8").partition(f"{MADE}\n")
    return before + "\n".join([MADE, "", *lines, "", END]) + rest.partition(END)[2]


PAGES_MADE = {
    "commands.md": commands_page,
    "q-yaml.md": q_yaml_page,
    "exit-codes.md": exit_codes_page,
    "schedule-table.md": schedule_table_page,
    "knobs.md": knobs_page,
    "support.md": support_page,
    "img/live-table.svg": live_table_picture,
}


def main() -> None:
    """Write the pages and the picture, or say which would change."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    changed = []
    for name, make in PAGES_MADE.items():
        path, text = ROOT / "docs" / name, make()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            changed.append(name)
            if not is_check:
                path.write_text(text, encoding="utf-8")
    print(f"{'would change' if is_check else 'changed'}: {', '.join(changed) or 'nothing'}")
    sys.exit(1 if is_check and changed else 0)


if __name__ == "__main__":
    main()
