"""A run on the screen: plain lines for pipes, a table for terminals."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from quartet_plugin.model.launch import LaunchRecord
from quartet_plugin.report.live import LiveTable, PlainLines, reporter
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
    shown.plan_started("1", PLAN, phase="search", time_left_s=125.0)
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
    assert "trial 0: your own command: 0.500 s/iteration, 1,000 tokens/s, 1.00x the baseline" in lines
    assert "trial 1: measure 4/13, 0 s; about 2 min 05 s left" in lines
    words = f"{PLAN.shape.label}, {PLAN.layout.label}, 6+2, 1f1b, 1,0"
    assert f"trial 1: {words}: launch, 0 s; about 2 min 05 s left" in lines
    assert sum("measure" in line for line in lines) == 1
    assert any("6+2, 1f1b, 1,0" in line and "1.25x" in line for line in lines)
    assert "INFEASIBLE: out of memory [red]" in lines[-1]


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
    shown.plan_finished(replace(own, label="60", plan=PLAN, versus_baseline=1.31))
    shown.plan_started("61", PLAN, phase="search", time_left_s=90.0)
    with console.capture() as captured:
        console.print(shown.render())
    lines = captured.get().splitlines()
    assert len(lines) <= height - 1
    assert all(len(line) <= width for line in lines)
    assert lines[-1].startswith("trial 61: launch")
    assert lines[-2].startswith("61 ")
    assert lines[-2].rstrip().endswith("running")
    assert "1.31x" in lines[-3]
    assert "1.234" in lines[-3]
    assert "your own" in lines[1]
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)
