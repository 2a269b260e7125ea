"""The scenarios' files and table: one file a search, the table from files alone, missing rows said."""

from pathlib import Path

import pytest

from benchmarks.scenarios.catalogue import SCENARIOS, Scenario
from benchmarks.scenarios.result_files import SearchRun, TurnRounds, read_runs, read_turns, write_result
from benchmarks.scenarios.table import row_of, table_lines
from quartet_plugin.model.cluster import parse_cluster
from quartet_plugin.space.config import SearchConfig
from quartet_plugin.tuner.config import parse_config

NAME = "a-heavy-head"


def run_of(side: str, seed: int, *, commit: str = "abc", num_trials: int = 8) -> SearchRun:
    return SearchRun(
        scenario=NAME,
        side=side,
        seed=seed,
        commit=commit,
        machine="2 cores",
        num_trials=num_trials,
        trials=({"number": 0, "plan": "your own command", "outcome": "OK", "iterations_s": [0.5]},),
        chosen=None,
        chosen_words=f"plan of {side}",
    )


def filled(folder: Path, *, lacking: str = "", **changes: str) -> Path:
    sides = {"ours-0": 1.2, "stock-0": 1.0, "stock-1": 1.1, "stock-2": 1.2, "default": 0.8}
    for name in sides:
        side, _, seed = name.partition("-")
        if seed and name != lacking:
            write_result(
                run_of(side, int(seed), commit=changes.get(name.replace("-", "_"), "abc")), folder=folder
            )
    turns = TurnRounds(scenario=NAME, commit="abc", machine="2 cores", num_launches=1, rounds=(sides,) * 5)
    write_result(turns, folder=folder)
    return folder


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    filled(tmp_path)
    assert [run.name for run in read_runs(NAME, folder=tmp_path)] == [
        "ours-0",
        "stock-0",
        "stock-1",
        "stock-2",
    ]
    assert next(read_runs(NAME, folder=tmp_path)).trials[0]["iterations_s"] == [0.5]
    turns = read_turns(NAME, folder=tmp_path)
    assert turns is not None
    assert len(turns.rounds) == 5


def test_a_row_is_the_winner_over_all_seeds_and_over_the_default(tmp_path: Path) -> None:
    row = row_of(NAME, "about", folder=filled(tmp_path))
    assert row.over_stock is not None
    assert row.over_default is not None
    assert row.over_stock.median == pytest.approx(1.2 / (1.0 * 1.1 * 1.2) ** (1 / 3))
    assert row.over_default.median == pytest.approx(1.5)
    assert row.line.endswith("| 1.500 (1.500 to 1.500) | plan of ours |")
    lines = table_lines({NAME: "about", "other": "another"}, folder=tmp_path)
    assert "winner over the default, geometric mean of 1 rows: 1.500" in lines
    assert lines[-1] == "rows without a figure: other"
    assert "missing: ours-0, stock-0, stock-1, stock-2, turns" in lines[3]


def test_a_row_that_lacks_a_file_or_mixes_commits_has_no_figure(tmp_path: Path) -> None:
    assert row_of(NAME, "", folder=filled(tmp_path / "a", lacking="stock-2")).missing == "missing: stock-2"
    mixed = row_of(NAME, "", folder=filled(tmp_path / "b", stock_1="def"))
    assert (mixed.missing, mixed.over_stock) == ("runs of several commits: abc, def", None)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_search_of_a_scenario_is_one_that_the_tuner_takes(name: str) -> None:
    scenario = SCENARIOS[name]
    axes = ("schedule", "split", "mapping", "scaling", "recompute")
    for section in (scenario.search, scenario.stock_search, *map(scenario.search_without, axes)):
        assert isinstance(parse_config({"search": section}, where="test").search, SearchConfig)
    assert "scaling" not in scenario.stock_search
    assert scenario.stock_search["schedule"] == ["no-pipelining", "1f1b", "interleaved"]
    per_process = (scenario.cores, scenario.namespaces, scenario.slowdown)
    assert {len(words.split(",")) for words in per_process if words} == {scenario.num_processes}
    if scenario.namespaces:
        assert len(set(scenario.namespaces.split(","))) == len(scenario.rates)


def test_layouts_are_free_for_stock_wherever_they_are_free_for_us() -> None:
    for scenario in SCENARIOS.values():
        kept = {
            key: value
            for key, value in scenario.search.items()
            if key not in ("scaling", "schedule", "mapping")
        }
        assert kept.items() <= scenario.stock_search.items()


def test_a_memory_limit_is_a_cluster_file() -> None:
    scenario = SCENARIOS["h-memory-limit"]
    assert scenario.cluster is not None
    cluster = parse_cluster(scenario.cluster, where="test")
    assert cluster.num_slots == scenario.num_processes
    assert cluster.devices["core"].memory_bytes == scenario.memory_limit_bytes
    assert Scenario(about="", num_processes=1, flags="", cores="0").cluster is None


def test_an_axis_that_there_is_not_is_refused() -> None:
    with pytest.raises(SystemExit, match="--without: width"):
        SCENARIOS[NAME].search_without("width")
