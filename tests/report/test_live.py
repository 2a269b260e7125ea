"""A run on the screen: plain lines for pipes, a table for terminals."""

import fcntl
import io
import os
import pty
import re
import struct
import termios
from dataclasses import replace

import pytest
from rich.console import Console

from quartet_plugin.model.launch import LaunchPosition, LaunchRecord, Phase
from quartet_plugin.report.live import WIDE, LiveTable, PlainLines, reporter
from tests.model.plans import PLAN


def play(shown: PlainLines | LiveTable) -> None:
    """A baseline and two trials, one of which does not fit."""
    shown.message("hello [bold]world")
    shown.plan_started("0", None, phase="baseline", time_left_s=None)
    shown.progressed("init", iteration=0, num_iterations=13)
    own = LaunchRecord(
        label="0", plan=None, outcome="OK", iteration_s=0.5, tokens_per_s=1000.0, versus_baseline=1.0
    )
    shown.plan_finished(own)
    shown.plan_started(
        "1", PLAN, phase="search", time_left_s=125.0, position=LaunchPosition(index=1, count=10)
    )
    shown.progressed("measure", iteration=4, num_iterations=13)
    shown.progressed("measure", iteration=5, num_iterations=13)
    shown.plan_finished(
        replace(own, label="1", plan=PLAN, iteration_s=0.4, tokens_per_s=1250.0, versus_baseline=1.25)
    )
    shown.plan_started("2", PLAN, phase="final", time_left_s=30.0)
    shown.plan_finished(
        LaunchRecord(label="2", plan=PLAN, outcome="INFEASIBLE", reason="out of memory [red]")
    )


def test_plain_lines_are_one_an_event() -> None:
    lines: list[str] = []
    now = [0.0]
    with PlainLines(lines.append, clock=lambda: now[0]) as shown:
        play(shown)
    assert all("\n" not in line for line in lines)
    assert "trial 0: your command: 0.500 s/iteration, 1,000 tokens/s, 1.00x as fast as the baseline" in lines
    assert "trial 1, 1 of 10: measure 4/13, 0 s; about 2 min 05 s left" in lines
    assert "the baseline: launch, 0 s" in lines
    words = "PP 2 · MB 4 · split 6+2 · 1f1b · ranks 1,0"
    assert f"trial 1, 1 of 10: {words}: launch, 0 s; about 2 min 05 s left" in lines
    assert sum("measure" in line for line in lines) == 1
    assert any(words in line and "1.25x" in line for line in lines)
    assert "INFEASIBLE: out of memory [red]" in lines[-1]


def test_a_launch_that_begins_says_what_share_of_the_time_measured() -> None:
    words = "37 % of the time so far spent in measured iterations"
    lines: list[str] = []
    PlainLines(lines.append).plan_started("3", None, phase="search", time_left_s=30.0, measured_share=0.372)
    assert lines == [f"trial 3: launch, 0 s; about 30 s left; {words}"]
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24, color_system=None)
    table = LiveTable(console)
    table.plan_started("3", PLAN, phase="search", time_left_s=30.0, measured_share=0.372)
    with console.capture() as captured:
        console.print(table.render())
    assert [line.rstrip() for line in captured.get().splitlines()[-2:]] == [
        words,
        "trial 3: launch, 0 s; about 30 s left",
    ]


def test_a_terminal_gets_a_table_that_stays() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=140, height=40)
    shown = reporter(console)
    assert isinstance(shown, LiveTable)
    with shown:
        play(shown)
        shown.plan_started("3", PLAN, phase="search", time_left_s=None)
        with console.capture() as captured:
            console.print(shown.render())
        now = captured.get()
        assert "trial 3: launch" in now
        assert any(
            line.startswith("3 ") and PLAN.layout.label in line and "running" in line
            for line in now.splitlines()
        )
        assert "1.25x" in now
        assert "6+2" in now
    assert "hello [bold]world" in screen.getvalue()
    assert "out of memory [red]" in screen.getvalue()


@pytest.mark.parametrize(
    ("label", "phase", "position", "words"),
    [
        ("0", "baseline", None, "the baseline"),
        ("0 again", "control", None, "the baseline again"),
        ("7", "search", LaunchPosition.of_trial(3, num_asked=10), "trial 7, 4 of 10"),
        ("7", "search", LaunchPosition.of_trial(12, num_asked=10), "trial 7, 10 of 10"),
        ("7 depth proxy", "cropped", None, "a depth proxy of trial 7"),
        ("7 parity check", "parity", None, "a parity check of trial 7"),
        ("7 round 2", "final", LaunchPosition.of_round(1, num_rounds=5), "final round 2 of 5, trial 7"),
        ("0 round 6", "final", LaunchPosition.of_round(5, num_rounds=5), "final round 6 of 10, the baseline"),
    ],
)
def test_a_launch_says_which_of_how_many_it_is(
    label: str, phase: Phase, position: LaunchPosition | None, words: str
) -> None:
    lines: list[str] = []
    PlainLines(lines.append).plan_started(label, None, phase=phase, time_left_s=None, position=position)
    assert lines == [f"{words}: launch, 0 s"]


def test_several_launches_say_the_place_of_the_latest() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140, height=40, color_system=None)
    table = LiveTable(console)
    for index in (4, 5):
        place = LaunchPosition(index=index, count=12)
        table.plan_started(str(index), PLAN, phase="search", time_left_s=60.0, position=place)
    with console.capture() as captured:
        console.print(table.render())
    assert captured.get().splitlines()[-1].startswith("trials 4, 5, 5 of 12: 0 s; about 1 min 00 s left")


def test_a_pipe_gets_lines() -> None:
    assert isinstance(reporter(Console(file=io.StringIO())), PlainLines)


@pytest.mark.parametrize(("width", "height"), [(50, 24), (60, 24), (80, 24), (100, 40), (116, 24), (140, 50)])
def test_the_table_fits_the_screen_and_cuts_no_number(width: int, height: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    shown = LiveTable(console)
    own = LaunchRecord(
        label="0", plan=None, outcome="OK", iteration_s=1.234, tokens_per_s=1e6, versus_baseline=1.0
    )
    shown.plan_finished(own)
    for number in range(1, 60):
        shown.plan_finished(replace(own, label=f"{number} round 1", plan=PLAN))
    shown.plan_finished(replace(own, label="60", plan=PLAN, versus_baseline=1.31, drift=0.72))
    shown.plan_started("61", PLAN, phase="search", time_left_s=90.0, measured_share=0.41)
    with console.capture() as captured:
        console.print(shown.render())
    lines = captured.get().splitlines()
    assert len(lines) <= height - 1
    assert all(len(line) <= width for line in lines)
    assert lines[-1].startswith("trial 61: launch")
    note = next(index for index, line in enumerate(lines) if line.startswith("* speedup over"))
    assert " ".join(line.strip() for line in lines[note:-1]) == (
        "* speedup over the baseline remeasured at 0.72x of its first speed "
        "41 % of the time so far spent in measured iterations"
    )
    assert lines[note - 1].startswith("61 ")
    assert lines[note - 1].rstrip().endswith("running")
    assert "1.31x*" in lines[note - 2]
    assert "1.234" in lines[note - 2]
    assert "your " in lines[1]
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)


def test_the_table_fits_a_terminal_that_is_resized_between_its_drawings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The size is asked for at each drawing, of a terminal that becomes narrower and wider again."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("LINES", raising=False)
    controller, terminal = pty.openpty()
    try:
        with os.fdopen(terminal, "w", encoding="utf-8") as file:
            console = Console(file=file, force_terminal=True, color_system=None)
            # The tests' own output is no terminal: only the one that is drawn on has a size.
            monkeypatch.setattr(os, "get_terminal_size", lambda _: size_of(terminal))
            shown = LiveTable(console)
            own = LaunchRecord(
                label="0", plan=None, outcome="OK", iteration_s=1.234, tokens_per_s=1e6, versus_baseline=1.0
            )
            shown.plan_finished(own)
            for number in range(1, 30):
                shown.plan_finished(replace(own, label=str(number), plan=PLAN, drift=0.72))
            shown.plan_started("30", PLAN, phase="search", time_left_s=90.0, measured_share=0.41)
            for columns, rows in ((140, 40), (80, 24), (50, 12), (80, 24), (140, 40)):
                fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
                with console.capture() as captured:
                    console.print(shown.render())
                lines = captured.get().splitlines()
                assert console.size == (columns, rows)
                assert max(map(len, lines)) <= columns
                assert len(lines) < rows
                assert "41 % of the time so far" in captured.get()
                assert ("tokens/s" in lines[0]) == (columns >= WIDE)
    finally:
        os.close(controller)


def size_of(terminal: int) -> os.terminal_size:
    rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(terminal, termios.TIOCGWINSZ, b"\0" * 8))
    return os.terminal_size((columns, rows))


@pytest.mark.parametrize("wants_colours", [True, False])
def test_no_colour_is_written_where_the_reader_wants_none(
    wants_colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`NO_COLOR` stops colours alone: the table still moves the cursor, and bold and dim stay."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not wants_colours:
        monkeypatch.setenv("NO_COLOR", "1")
    screen = io.StringIO()
    shown = reporter(Console(file=screen, force_terminal=True, width=80, height=24))
    assert isinstance(shown, LiveTable)
    with shown:
        play(shown)
        shown.plan_started("3", PLAN, phase="search", time_left_s=30.0, measured_share=0.5)
        shown._console.print(shown.render())
    codes = {code for words in re.findall(r"\x1b\[([\d;]*)m", screen.getvalue()) for code in words.split(";")}
    colours = {code for code in codes if code.isdecimal() and int(code) >= 30}
    assert bool(colours) == wants_colours
