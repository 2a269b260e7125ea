"""Every command of `quartet`: under poor encodings, on narrow terminals, with Ctrl-C, and into `head -1`.

The commands are taken from the command line itself: one without an entry in `CALLS` fails the first test.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from quartet_plugin.cli.main import build_app
from tests.cli.command_cases import Case, Result, run_cases
from tests.cli.quartet_schedule import PROGRESS
from tests.cli.test_plan import write_job
from tests.cli.test_trace import attempt
from tests.cost.runs import PIPELINE

GOLDEN = Path(__file__).parents[1] / "golden"
CODES = {0, 1, 2, 3, 4, 5, 6, 7, 130, 141}
# Each command with the words behind it, and its exit code. What would start a framework is called in a way
# that is refused before.
CALLS: dict[str, tuple[str, int]] = {
    "tune": ("--config missing.yaml -- torchrun pretrain_gpt.py", 2),
    "batch run": ("jobs.yaml --plan-only --batch-dir missing/batches", 2),
    "batch status": ("batch", 0),
    "init": ("written.yaml", 2),
    "knobs": ("run", 0),
    "work": ("nowhere", 2),
    "status": ("run", 0),
    "trials": ("run", 0),
    "repair": ("run", 2),
    "report": ("run -o page.html", 0),
    "train": ("--plan plan.json", 2),
    "check": ("plan.json", 2),
    "doctor": ("--against missing.whl", 2),
    "recheck": ("missing.json", 2),
    "convert": ("nowhere", 2),
    "show": ("plan.json", 0),
    "export": ("plan.json", 0),
    "schedule search": ("costs.json -o found.json --evaluations 100", 0),
    "schedule named": ("1f1b costs.json -o named.json", 0),
    "schedule list": ("--devices 4 --microbatches 8", 0),
    "schedule simulate": ("costs.json schedule.json", 0),
    "schedule bound": ("costs.json", 0),
    "schedule export": ("schedule.json --format text -o schedule.txt", 0),
    "partition list": ("", 0),
    "partition show": ("P2x2", 0),
    "partition search": ("--hidden 1024 --heads 8 --batch 4 --tokens 1024 --devices 4", 0),
    "partition price": ("--hidden 1024 --tokens 1024 --devices 4", 0),
    "rehearse": ("missing.json", 2),
    "trace": ("attempt -o trace.json", 0),
    "predict": ("rows.json -o predictions.json", 0),
    "plan": ("job.yaml -o planned.json", 0),
    "layout": ("--model gpt3-6.7b --pp 2 --tp 4 --microbatches 4", 0),
    "explain": ("plan.json", 0),
    "probe": ("-o /nonexistent/cluster.json", 2),
    "profile": ("", 2),
    "calibrate": ("run", 2),
}
# The encoding and the error handler of Python's streams; C is the locale.
ENCODINGS = {
    "ascii": ("ascii", "strict"),
    "latin-1": ("latin-1", "strict"),
    "C": ("ascii", "surrogateescape"),
}
WIDE = 240
# Ends of lines, boxes and bullets of a help text, in every encoding's form.
_FRAME = re.compile(r"[│╭╮╰╯─|+*\[\]]|-{2,}(?![a-z])")


def commands_of(group: object, words: tuple[str, ...] = ()) -> Iterator[str]:
    """Every command, a group's own with the group's name before it."""
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            yield from commands_of(command, (*words, name))
        else:
            yield " ".join((*words, name))


def words_of(command: str) -> tuple[str, ...]:
    return (*command.split(), *CALLS[command][0].split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read."""
    path = tmp_path_factory.mktemp("commands")
    shutil.copytree(GOLDEN / "run_0.1.0", path / "run")
    shutil.copytree(GOLDEN / "batch_0.1.0", path / "batch")
    for source, name in (
        ("plan.json", "plan.json"),
        ("schedule_costs_minimal.json", "costs.json"),
        ("schedule_costs.json", "larger.json"),
        ("schedule_1f1b.json", "schedule.json"),
    ):
        shutil.copy(GOLDEN / source, path / name)
    (path / "attempt").mkdir()
    attempt(path / "attempt")
    write_job(path)
    (path / "rows.json").write_text(json.dumps([PIPELINE]))
    (path / "written.yaml").write_text("")
    return path


def assert_well_ended(case: Case, result: Result, *codes: int) -> None:
    """A documented exit code, no traceback, and at most one line of errors."""
    shown = f"{case}: {result}"
    assert result.code in codes, shown
    assert "Traceback" not in result.output + result.error, shown
    assert "internal error" not in result.error, shown
    lines = [line for line in result.error.splitlines() if not PROGRESS.match(line)]
    assert len(lines) <= (result.code not in (0, 141)), shown


def test_every_command_is_here() -> None:
    assert set(commands_of(typer.main.get_command(build_app()))) == set(CALLS)
    assert {code for _, code in CALLS.values()} <= CODES


EVERY_FORM = tuple((name, columns) for name in ENCODINGS for columns in (60, 80))


@pytest.mark.parametrize(
    "forms",
    [
        pytest.param((("ascii", 60), ("latin-1", 80), ("C", 60)), id="each encoding and width"),
        pytest.param(EVERY_FORM, id="each pair of them", marks=pytest.mark.nightly),
    ],
)
def test_every_command_under_poor_encodings_and_on_narrow_terminals(
    forms: tuple[tuple[str, int], ...], folder: Path
) -> None:
    calls = [case_of(command, False, columns, name) for command in CALLS for name, columns in forms]
    helps = [case_of(command, True, columns, name) for command in CALLS for name, columns in forms]
    wide = [case_of(command, True, WIDE, name) for command in CALLS for name in ENCODINGS]
    cases = [*calls, *helps, *wide]
    results = dict(zip(cases, run_cases(cases, folder=folder), strict=True))
    for case, result in results.items():
        assert_well_ended(case, result, code_of(case))
    for case in helps:
        whole = results[replace(case, columns=WIDE)].output
        assert not broken_words(results[case].output, whole), (case, results[case].output)


def case_of(command: str, is_help: bool, columns: int, name: str) -> Case:
    words = (*command.split(), "--help") if is_help else words_of(command)
    encoding, errors = ENCODINGS[name]
    return Case(words=words, columns=columns, encoding=encoding, errors=errors)


def code_of(case: Case) -> int:
    """The exit code of a case that nothing interrupts."""
    command = next(name for name in CALLS if case.words[: len(name.split())] == tuple(name.split()))
    return 0 if case.words[-1] == "--help" else CALLS[command][1]


def broken_words(narrow: str, wide: str) -> list[str]:
    """The words that a narrow terminal shows and a wide one does not: pieces of words, and cut numbers."""
    known = set(_FRAME.sub(" ", wide).split())
    return [word for word in _FRAME.sub(" ", narrow).split() if word not in known]


@pytest.mark.parametrize("interrupt_s", [0.05, pytest.param(0.2, marks=pytest.mark.nightly), 1.0])
def test_every_command_ends_at_ctrl_c(interrupt_s: float, folder: Path) -> None:
    """Either it was done before, or it says so in one line; what runs long is among them."""
    calls = {command: words_of(command) for command in CALLS}
    calls["schedule search"] = ("schedule", "search", "larger.json", "-o", "long.json", "--time-limit", "30")
    calls["status"] = ("status", "run", "--watch", "30")
    calls["probe"] = ("probe", "-o", "probed.json")
    cases = [Case(words=words, interrupt_s=interrupt_s) for words in calls.values()]
    results = run_cases(cases, folder=folder)
    for command, case, result in zip(calls, cases, results, strict=True):
        assert_well_ended(case, result, 130, CALLS[command][1])
        if result.code == 130:
            assert result.error.splitlines()[-1] == "quartet: interrupted", result.error


def test_every_command_into_head(folder: Path) -> None:
    cases = [Case(words=words_of(command), is_head=True) for command in CALLS]
    cases += [Case(words=(*command.split(), "--help"), is_head=True) for command in CALLS]
    results = run_cases(cases, folder=folder)
    for case, result in zip(cases, results, strict=True):
        assert_well_ended(case, result, 141, code_of(case))
        assert len(result.output.splitlines()) <= 1
