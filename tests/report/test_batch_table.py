"""The jobs of a batch as a table, as CSV, on a terminal and as a page."""

import csv
import io
from dataclasses import replace

from rich.console import Console

from quartet_plugin.model.batch import BatchResults, JobResult
from quartet_plugin.model.measurement import Interval
from quartet_plugin.report.batch_live import BatchLines, BatchScreen, batch_observer, shown_jobs
from quartet_plugin.report.batch_page import batch_page
from quartet_plugin.report.batch_table import csv_text, ended_words, table_lines

DONE = JobResult(
    name="done",
    kind="tune",
    state="done",
    num_trials=20,
    num_asked=20,
    best="PP 2",
    iteration_s=1.5,
    ratio=1.25,
    speedup=Interval(median=1.25, low=1.2, high=1.3),
)
RUNNING = JobResult(
    name="n" * 100, kind="tune", state="running", num_trials=3, num_asked=20, ratio=1.1, time_left_s=7000.0
)
FAILED = JobResult(
    name="failed", kind="tune", state="failed", exit_code=5, reason="<script>alert(1)</script> $(id)"
)
PLANNED = JobResult(name="planned", kind="plan", state="done", predicted_s=0.25, tokens_per_s=1e6, ratio=1.4)
WAITING = JobResult(name="waiting", kind="tune", state="waiting")


def results(*jobs: JobResult) -> BatchResults:
    return BatchResults(batch="sweep", state="running", is_plan_only=False, jobs=jobs, time_left_s=60.0)


def test_rows_have_at_most_80_columns() -> None:
    for jobs in ((DONE, RUNNING, FAILED, WAITING), (DONE, RUNNING, PLANNED), (PLANNED,)):
        lines = table_lines(results(*jobs))
        assert all(len(line) <= 80 for line in lines[: 1 + len(jobs)])
    lines = table_lines(results(DONE, RUNNING, FAILED, WAITING))
    assert lines[0].split() == ["job", "state", "trials", "s/iter", "speedup", "left"]
    assert lines[1].split() == ["done", "done", "20/20", "1.500", "1.25x"]
    assert lines[2].split()[1:] == ["running", "3/20", "1.10x", "1", "h", "56", "min"]
    assert lines[2].split()[0].endswith("nnn...")
    assert "4 jobs: 1 done, 1 failed, 1 running, 1 waiting; about 1 min 00 s left" in lines


def test_predicted_seconds_have_a_column_of_their_own() -> None:
    heads, done, planned, *_ = table_lines(results(DONE, PLANNED))
    place = heads.index("predicted") + len("predicted")
    assert planned[:place].endswith("0.250")
    assert done[:place].endswith(" ")
    assert ended_words(PLANNED) == "planned: done: 0.250 s/iteration predicted, "


def test_a_job_without_a_better_plan_says_so() -> None:
    assert ended_words(replace(DONE, speedup=None)) == "done: done: no better plan was found"
    assert ended_words(DONE) == "done: done: 1.25x (1.20x to 1.30x) as fast as the job's own command, PP 2"


def test_csv_has_a_row_a_job() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(results(DONE, replace(FAILED, reason='a,\x1b\n"b'))))))
    assert [row["name"] for row in rows] == ["done", "failed"]
    assert (rows[0]["speedup.low"], rows[1]["speedup.low"]) == ("1.2", "")
    assert rows[1]["reason"] == 'a,\\x1b\\n"b'


def test_a_page_runs_nothing() -> None:
    page = batch_page(results(DONE, FAILED, PLANNED))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; $(id)" in page
    assert "1.25x (1.20x to 1.30x)" in page
    assert page.count("<h2>") == 2


def test_a_terminal_shows_what_it_has_room_for() -> None:
    waiting = tuple(replace(WAITING, name=f"w{index}") for index in range(40))
    console = Console(width=80, height=12, force_terminal=True, file=io.StringIO(), color_system="standard")
    screen = batch_observer(console)
    assert isinstance(screen, BatchScreen)
    screen.changed(results(*waiting, RUNNING, FAILED))
    with console.capture() as capture:
        console.print(screen.render())
    lines = capture.get().splitlines()
    assert len(lines) <= 12
    assert "running" in capture.get()
    assert "failed" in capture.get()
    assert "and 34 more" in capture.get()
    assert [job.name for job in shown_jobs(results(*waiting, RUNNING), num_rows=2)] == ["w0", RUNNING.name]


def test_a_log_gets_a_line_an_event_without_colours() -> None:
    written: list[str] = []
    assert isinstance(batch_observer(Console(file=io.StringIO())), BatchLines)
    with BatchLines(written.append) as lines:
        lines.message("a\x1b[31m\nb")
        lines.changed(results(DONE))
    assert written == ["a\\x1b[31m\\nb"]
