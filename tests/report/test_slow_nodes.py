"""Slow nodes in `quartet status` and in the report."""

from html import escape
from pathlib import Path

from quartet_plugin.model.history import SlowNode
from quartet_plugin.report.page import Extras, page
from quartet_plugin.report.status import status_lines, status_record
from quartet_plugin.tuner.history import read_history
from tests.report.histories import history
from tests.short_searches import short_searches as short_searches
from tests.tuner.fakes import begin_with_journal, tune
from tests.tuner.test_slow_nodes import SEARCH, machine_that_is_slow

WORDS = "node node-b: computations take 1.52x the time of the other nodes'"


def test_a_slow_node_is_named_with_its_factor() -> None:
    run = history(slow_nodes=(SlowNode(host="node-b", factor=1.52),))
    assert f"slow      {WORDS}" in status_lines(run)
    assert status_record(run)["slow_nodes"] == [{"host": "node-b", "factor": 1.52}]
    assert escape(f"N{WORDS[1:]}.") in page(run, Extras())


def test_nothing_is_said_where_none_is() -> None:
    run = history()
    assert not any(line.startswith("slow ") for line in status_lines(run))
    assert status_record(run)["slow_nodes"] == []
    assert "computations take" not in page(run, Extras())


def test_a_name_stays_text() -> None:
    run = history(slow_nodes=(SlowNode(host="<b>\x1b[31m", factor=2.0),))
    assert "<b>" not in page(run, Extras())
    assert not any("\x1b" in line for line in status_lines(run))


def test_it_is_read_back_from_the_run(tmp_path: Path) -> None:
    study = {"trials": 4, "control": 100}
    tune(
        begin_with_journal(tmp_path / "r", search=SEARCH, study=study),
        machine_that_is_slow(lambda at: at > 1),
    )
    (node,) = read_history(tmp_path / "r").slow_nodes
    assert (node.host, round(node.factor, 2)) == ("node-1", 1.8)
    mended = machine_that_is_slow(lambda at: 1 <= at < 4)
    tune(begin_with_journal(tmp_path / "s", search=SEARCH, study={**study, "trials": 6}), mended)
    assert read_history(tmp_path / "s").slow_nodes == ()
