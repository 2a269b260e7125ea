"""Each quantity that is shown in two places has one value, one form and one name.

One run is made: on a machine that slows down in its middle, watched by plain lines, by a live table and by
TensorBoard's file. What these, the closing lines and every command that looks at the run say is compared.
"""

import html
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quartet_plugin.cli.main import main
from quartet_plugin.cli.tune_summary import summary_lines
from quartet_plugin.model.history import RunHistory
from quartet_plugin.model.launch import LaunchPosition, LaunchRecord, Phase
from quartet_plugin.model.plan import Plan, read_plan
from quartet_plugin.report import formatting, live
from quartet_plugin.report.formatting import rate, size
from quartet_plugin.report.live import LiveTable, PlainLines
from quartet_plugin.report.tensorboard import FILE_NAME, Scalars
from quartet_plugin.report.trial_table import NUMBER_HEADS, drift_note_of, number_cells
from quartet_plugin.tuner.history import read_history
from quartet_plugin.tuner.tune_result import write_best
from tests.cli.runs import copy_of
from tests.report.test_tensorboard import records, scalars
from tests.short_searches import short_searches as short_searches
from tests.tuner.fakes import begin, tune
from tests.tuner.run_folders import WritingMachine, no_data_parallel

WIDTH = 240


class Watchers:
    """Shows a run to several observers."""

    def __init__(self, *observers: Any) -> None:
        self.observers = observers

    def message(self, text: str) -> None:
        for observer in self.observers:
            observer.message(text)

    def plan_started(
        self,
        label: str,
        plan: Plan | None,
        *,
        phase: Phase,
        time_left_s: float | None,
        position: LaunchPosition | None = None,
        measured_share: float | None = None,
    ) -> None:
        for observer in self.observers:
            observer.plan_started(
                label,
                plan,
                phase=phase,
                time_left_s=time_left_s,
                position=position,
                measured_share=measured_share,
            )

    def progressed(self, phase: str, *, iteration: int, num_iterations: int) -> None:
        for observer in self.observers:
            observer.progressed(phase, iteration=iteration, num_iterations=num_iterations)

    def plan_finished(self, launch: LaunchRecord) -> None:
        for observer in self.observers:
            observer.plan_finished(launch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A finished run and what its user has seen of it."""

    path: Path
    plan: Plan
    history: RunHistory
    closing: list[str]
    plain: list[str] = field(default_factory=list)
    table: list[str] = field(default_factory=list)
    points: dict[int, dict[str, float]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    memory = Path("/dev/shm")
    folder = Path(
        tempfile.mkdtemp(prefix="quartet-shown-", dir=memory if os.access(memory, os.W_OK) else None)
    )
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(live, "MAX_ROWS", 100)
            yield shown_in(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shown_in(folder: Path) -> Shown:
    """A run whose machine takes half as long again from its seventh launch on."""
    machine = WritingMachine(outcome=no_data_parallel)
    steady = machine.seconds
    machine.seconds = lambda plan: steady(plan) * (1.5 if len(machine.launched) > 6 else 1.0)
    plain: list[str] = []
    console = Console(file=io.StringIO(), force_terminal=True, width=WIDTH, height=200, color_system=None)
    table = LiveTable(console)
    watched = Scalars(Watchers(PlainLines(plain.append), table), folder / "tensorboard")
    run = begin(folder / "r", study={"trials": 14, "rounds": 3, "control": 8})
    result = tune(run, machine, observer=watched)
    plan = write_best(result, run=run)
    assert plan is not None
    with console.capture() as captured:
        console.print(table.render())
    bodies = records((folder / "tensorboard" / FILE_NAME).read_bytes())
    return Shown(
        path=run.folder.path,
        plan=read_plan(run.folder.best_plan),
        history=read_history(run.folder.path),
        closing=summary_lines(result, plan=plan, run=run),
        plain=plain,
        table=[line.rstrip() for line in captured.get().splitlines()],
        points=dict(scalars(body) for body in bodies),
    )


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out


@pytest.fixture
def page(shown: Shown, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    printed(capsys, "report", str(shown.path), "-o", str(tmp_path / "page.html"))
    return html.unescape((tmp_path / "page.html").read_text())


def page_rows(page: str, label: str = "Every trial") -> dict[str, list[str]]:
    """The cells of every row of a page's table, by the first cell."""
    table = page.partition(f'aria-label="{label}"')[2].partition("</table>")[0]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", table, re.DOTALL)
    cells = [
        [re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)]
        for row in rows
    ]
    return {row[0]: row for row in reversed(cells)}


# A trial's figures


def test_every_trials_figures(shown: Shown, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    history = shown.history
    table = printed(capsys, "trials", str(shown.path)).splitlines()
    of_trials = {line.split()[0]: line for line in reversed(table) if line.strip()}
    as_data = json.loads(printed(capsys, "trials", str(shown.path), "-f", "json"))["trials"]
    of_page, of_live = page_rows(page), {line.split()[0]: line for line in reversed(shown.table)}
    measured = [row for row in history.trials if row.is_measured]
    assert len(measured) > 5
    for row in measured:
        cells = [cell for cell in number_cells(row, history) if cell]
        assert all(cell in of_trials[str(row.number)] for cell in cells)
        assert set(cells) <= set(of_page[str(row.number)])
        record = next(record for record in as_data if record["trial"] == row.number)
        assert record["iteration_s"] == row.iteration_s
        assert record["versus_baseline"] == history.versus_baseline(row)
        if row.repeats is not None:
            continue
        seconds, speedup = number_cells(row, history)[0], number_cells(row, history)[4]
        assert of_live[str(row.number)].endswith(speedup)
        assert f" {seconds} " in of_live[str(row.number)]
        sentence = next(
            line for line in shown.plain if re.match(rf"trial {row.number}: .* s/iteration", line)
        )
        assert f" {seconds} s/iteration" in sentence
        assert f" {speedup.removesuffix('*')} as fast as the baseline" in sentence
        assert ("baseline remeasured at" in sentence) == speedup.endswith("*")
        point = shown.points[row.number]
        assert point["trial/iteration_s"] == pytest.approx(row.iteration_s)
        assert point["trial/versus_baseline"] == pytest.approx(history.versus_baseline(row))


def test_the_columns_have_one_name(shown: Shown, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    head = printed(capsys, "trials", str(shown.path)).splitlines()[0].split("  ")
    assert set(NUMBER_HEADS) <= {word.strip() for word in head}
    assert set(NUMBER_HEADS) <= set(page_rows(page)["trial"])
    live = {word.strip() for word in shown.table[0].split("  ")}
    assert {formatting.SECONDS_HEAD, formatting.SPEEDUP_HEAD, "tokens/s"} <= live & set(NUMBER_HEADS)


def test_one_pair_of_seconds_with_two_speedups_is_explained(
    shown: Shown, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    history = shown.history
    drifts = {row.drift for row in history.trials if row.is_measured}
    assert len(drifts) == 2
    note = drift_note_of(history)
    assert note is not None
    assert note in printed(capsys, "trials", str(shown.path)).splitlines()
    assert note in shown.table
    assert note in page
    speed = formatting.speedup_words(min(drifts))
    assert f"at {speed} of its first speed" in note
    assert any(f"your command was measured again: {speed} of its first speed" in line for line in shown.plain)
    assert any(line.startswith("drift") and speed in line for line in shown.closing)
    assert f"trials: {speed}</title>" in page


def test_the_best_so_far_of_a_run_without_a_winner(
    shown: Shown, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy_of(shown.path, to=tmp_path / "r")
    shutil.rmtree(path / "best")
    status = printed(capsys, "status", str(path))
    as_data = json.loads(printed(capsys, "status", str(path), "--json"))["best"]
    best = shown.history.best
    assert best is not None
    ratio = shown.history.versus_baseline(best)
    assert ratio is not None
    assert (as_data["trial"], as_data["versus_baseline"], as_data["drift"]) == (
        best.number,
        ratio,
        best.drift,
    )
    words = formatting.speedup_sentence(ratio, drift=best.drift)
    assert words in status
    assert max(point.get("best/versus_baseline", 0.0) for point in shown.points.values()) == pytest.approx(
        ratio
    )
    copy_of(path, to=tmp_path / "s")
    several = printed(capsys, "status", "--run-dir", str(tmp_path)).splitlines()
    assert all(line.endswith(f", best {words}") for line in several)


# The winner's figures


def test_the_winners_figures(shown: Shown, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    measured, plan_file = shown.plan.measurement, shown.path / "best" / "plan.json"
    assert measured is not None
    closing, plan = "\n".join(shown.closing), printed(capsys, "show", str(plan_file))
    status = printed(capsys, "status", str(shown.path))
    as_data = json.loads(printed(capsys, "status", str(shown.path), "--json"))
    assert as_data["winner"] == shown.plan.provenance.trial
    speedup = formatting.speedup_spread(measured.speedup)
    script = (shown.path / "best" / "command.sh").read_text()
    assert all(speedup in text for text in (closing, plan, status, page, script))
    for side in (measured.baseline, measured.plan):
        for words in (
            f"{formatting.iteration_words(side.iteration_s.median)}",
            f"{side.tokens_per_s:,.0f} tokens/s",
            f"{rate(side.model_flops_per_s_per_device)} per device",
            size(side.peak_memory_bytes),
        ):
            assert all(words in text for text in (closing, plan, page)), words
    # A drift check and the noise compare the command with itself.
    lines = [line for line in status.splitlines() if not line.startswith(("drift", "noise"))]
    speedups = set(re.findall(r"[0-9]+\.[0-9]{2}x", "\n".join(lines)))
    assert speedups <= set(re.findall(r"[0-9]+\.[0-9]{2}x", plan)), "one speedup in a finished run's status"


def test_the_rule_the_runner_up_and_the_regret(
    shown: Shown, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = printed(capsys, "status", str(shown.path)).splitlines()
    plan = printed(capsys, "show", str(shown.path / "best" / "plan.json")).splitlines()
    for name in ("chosen", "runner-up", "regret"):
        (line,) = [line for line in shown.closing if line.startswith(f"{name} ")]
        assert line in status
        words = line[10:]
        assert f"{words[:1].upper()}{words[1:]}" in page or words in page
        assert name == "regret" or line in plan


def test_the_end_of_the_final_rounds_does_not_name_another_winner(shown: Shown) -> None:
    (decided,) = [line for line in shown.plain if line.startswith("decided after ")]
    words = decided.partition(" (sequential test")[0]
    assert shown.plan.provenance.trial in [int(number) for number in re.findall(r"[0-9]+", words)[1:]]


def test_what_changed_is_said_in_the_same_words(
    shown: Shown, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = printed(capsys, "show", str(shown.path / "best" / "plan.json")).splitlines()
    first = next(index for index, line in enumerate(shown.closing) if line.startswith("changes "))
    changes = [shown.closing[first]]
    changes += [line for line in shown.closing[first + 1 :] if line.startswith(" " * 10) and " -> " in line]
    assert changes
    assert set(changes) <= set(plan)
    rows = page_rows(page, "What the best plan changes")
    for line in changes:
        part, _, change = line[10:].partition(" (class ")[0].partition(" ")
        assert " -> ".join(rows[part][1:3]) == change


# The run's figures


def test_the_numbers_of_trials(shown: Shown, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = printed(capsys, "status", str(shown.path))
    as_data = json.loads(printed(capsys, "status", str(shown.path), "--json"))
    words = re.search(r"^finished  (.*)$", status, re.MULTILINE)
    assert words is not None
    assert words[1] in page
    assert words[1].startswith(f"{as_data['num_spent']} of {as_data['num_asked']} trials")


def test_the_bubble(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(shown.path / "best" / "plan.json")
    as_data = json.loads(printed(capsys, "explain", plan, "--json"))
    bubble = formatting.bubble_words(as_data["bubble_fraction"])
    assert f"bubble    {bubble} of all device time" in printed(capsys, "explain", plan)
