"""A quantity that several commands show is the same wherever it is shown."""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.model.plan import read_plan
from quartet_plugin.report.formatting import rate, size, spread
from quartet_plugin.report.trial_table import number_cells
from quartet_plugin.tuner.history import read_history
from tests.cli.runs import kept_run


@pytest.fixture(scope="module")
def run() -> Iterator[Path]:
    with kept_run() as path:
        yield path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out


@pytest.fixture
def page(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    printed(capsys, "report", str(run), "-o", str(tmp_path / "page.html"))
    return html.unescape((tmp_path / "page.html").read_text())


def test_the_winners_figures(run: Path, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan_file = run / "best" / "plan.json"
    plan = read_plan(plan_file)
    measured = plan.measurement
    assert measured is not None
    shown, status = printed(capsys, "show", str(plan_file)), printed(capsys, "status", str(run))
    as_data = json.loads(printed(capsys, "status", str(run), "--json"))
    speedup = spread(measured.speedup, "{:.2f}x")
    assert all(speedup in text for text in (shown, status, page))
    assert as_data["winner"] == plan.provenance.trial
    for side in (measured.baseline, measured.plan):
        for words in (
            f"{side.iteration_s.median:.3f}",
            f"{side.tokens_per_s:,.0f} tokens/s",
            f"{rate(side.model_flops_per_s_per_device)} a device",
            size(side.peak_memory_bytes),
        ):
            assert words in shown
            assert words in page
    speedups = set(re.findall(r"[0-9]+\.[0-9]{2}x", status))
    assert speedups <= set(re.findall(r"[0-9]+\.[0-9]{2}x", shown)), "one speedup in a finished run's status"


def test_every_trials_figures(run: Path, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    history = read_history(run)
    table = printed(capsys, "trials", str(run)).splitlines()
    records = json.loads(printed(capsys, "trials", str(run), "-f", "json"))["trials"]
    rows = re.findall(r"<tr[^>]*>.*?</tr>", page, re.DOTALL)
    measured = [row for row in history.trials if row.is_measured]
    assert measured
    for row in measured:
        cells = [cell for cell in number_cells(row, history) if cell]
        assert any(all(cell in line for cell in cells) for line in table)
        assert any(all(cell in text for cell in cells) for text in rows)
        record = next(record for record in records if record["trial"] == row.number)
        assert record["iteration_s"] == row.iteration_s
        assert record["versus_baseline"] == history.versus_baseline(row)
