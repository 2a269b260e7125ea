"""The scenarios' files and table: one file a search, the table from files alone, missing rows said."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scenarios import result_files
from benchmarks.scenarios.__main__ import job_key, joined_round, launch_groups, trial_of
from benchmarks.scenarios.catalogue import COUNT_FLAGS, SCENARIOS, Scenario
from benchmarks.scenarios.result_files import (
    SearchRun,
    TurnRounds,
    has_same_search,
    read_runs,
    read_turns,
    write_result,
)
from benchmarks.scenarios.table import row_of, table_lines
from quartet_plugin.model.cluster import parse_cluster
from quartet_plugin.model.history import TrialRow
from quartet_plugin.model.measurement import Interval
from quartet_plugin.space.config import SearchConfig
from quartet_plugin.tuner.config import parse_config
from tests.model.plans import plan_with

NAME, OTHER = "a-heavy-head", "c-slow-link"
BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def run_of(side: str, seed: int, *, name: str = NAME, commit: str = "abc", num_trials: int = 8) -> SearchRun:
    return SearchRun(
        scenario=name,
        side=side,
        seed=seed,
        commit=commit,
        machine="2 cores",
        num_trials=num_trials,
        trials=({"number": 0, "plan": "your command", "outcome": "OK", "iterations_s": [0.5]},),
        chosen=None,
        chosen_words=f"plan of {side}",
    )


def filled(
    folder: Path,
    *,
    name: str = NAME,
    commit: str = "abc",
    lacking: str = "",
    commits: dict[str, str] | None = None,
    more: dict[str, float] | None = None,
) -> Path:
    """A scenario's files; in its rounds the machine is at full speed, then at half of it, and so on."""
    sides = {"ours-0": 1.2, "stock-0": 1.0, "stock-1": 1.1, "stock-2": 1.2, "default": 0.8, **(more or {})}
    for side in sides:
        kind, _, seed = side.rpartition("-")
        if kind and side != lacking:
            run = run_of(kind, int(seed), name=name, commit=(commits or {}).get(side, commit))
            write_result(run, folder=folder)
    rounds = tuple({side: speed / (1 + at % 2) for side, speed in sides.items()} for at in range(6))
    turns = TurnRounds(scenario=name, commit=commit, machine="2 cores", num_launches=1, rounds=rounds)
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
    assert len(turns.rounds) == 6


def test_a_row_is_the_winner_over_the_best_of_all_seeds_and_over_the_default(tmp_path: Path) -> None:
    row = row_of(NAME, "about", folder=filled(tmp_path))
    assert row.over_stock is not None
    assert row.over_mean is not None
    assert row.over_default is not None
    assert row.best_stock == "stock-2"
    assert row.over_stock.median == pytest.approx(1.0)
    assert row.over_mean.median == pytest.approx(1.2 / (1.0 * 1.1 * 1.2) ** (1 / 3))
    assert row.over_default.median == pytest.approx(1.5)
    assert row.line.endswith("| 1.500 (1.500 to 1.500) | plan of ours |")
    lines = table_lines({NAME: "about", "other": "another"}, folder=tmp_path)
    assert "winner over the default, geometric mean of 1 of 2 rows: 1.500 (aim 1.7)" in lines
    assert "lower ends over best stock below 0.98: none" in lines
    assert "rows without a figure: other" in lines
    assert "missing: ours-0, stock-0, stock-1, stock-2, turns" in lines[3]


def test_a_lower_end_below_the_aim_is_named(tmp_path: Path) -> None:
    lines = table_lines({NAME: ""}, folder=filled(tmp_path, more={"stock-1": 1.3}))
    assert f"lower ends over best stock below 0.98: {NAME} 0.923" in lines


def test_a_row_that_lacks_a_file_or_mixes_commits_has_no_figure(tmp_path: Path) -> None:
    assert row_of(NAME, "", folder=filled(tmp_path / "a", lacking="stock-2")).missing == "missing: stock-2"
    mixed = row_of(NAME, "", folder=filled(tmp_path / "b", commits={"stock-1": "def"}))
    assert (mixed.missing, mixed.over_stock) == ("runs of several commits: abc, def", None)
    alike = row_of(NAME, "", folder=tmp_path / "b", same=lambda *_: True)
    assert (alike.missing, alike.over_stock is not None) == ("", True)


def test_an_axis_has_the_gain_over_the_winner_without_it(tmp_path: Path) -> None:
    folder = filled(tmp_path, more={"without-split-0": 1.0})
    write_result(run_of("without-mapping", 0), folder=folder)
    lines = table_lines({NAME: ""}, folder=folder)
    assert f"| {NAME} | split | 1.200 (1.200 to 1.200) | plan of without-split |" in lines
    assert f"| {NAME} | mapping | missing: turns of without-mapping-0 | plan of without-mapping |" in lines


def test_rows_of_another_commit_are_named(tmp_path: Path) -> None:
    for name, commit in ((NAME, "abc"), (OTHER, "abc"), ("d-shape", "def")):
        filled(tmp_path, name=name, commit=commit)
    names = dict.fromkeys((NAME, OTHER, "d-shape"), "")
    assert table_lines(names, folder=tmp_path)[-1] == "rows of another search than that of abc: d-shape (def)"
    same = table_lines(names, folder=tmp_path, same=lambda *_: True)
    assert same[-1] == "one search in all rows with a figure: abc, def"


def test_commits_have_the_same_search_where_no_file_of_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit_with(name: str) -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", name], check=True)
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
        return head.stdout.strip()[:12]

    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    git = ("git", "-C", str(tmp_path), *who)
    subprocess.run([*git, "init", "-q"], check=True)
    commits = [commit_with(name) for name in ("quartet_plugin/a.py", "README.md", "quartet_plugin/b.py")]
    assert has_same_search(commits[0], commits[1], root=tmp_path)
    assert not has_same_search(commits[1], commits[2], root=tmp_path)
    assert not has_same_search(commits[0], f"{commits[1]} with changes", root=tmp_path)
    assert not has_same_search(commits[0], "0123456789ab", root=tmp_path)
    monkeypatch.setitem(result_files.SAME_SEARCHES, commits[1], commits[2])
    assert has_same_search(commits[1], commits[2], root=tmp_path)
    assert not has_same_search(commits[0], commits[2], root=tmp_path)


def test_a_trial_above_the_memory_limit_is_not_ok_in_a_result_file() -> None:
    row = TrialRow(
        number=3,
        outcome="INFEASIBLE",
        verdict="infeasible",
        reason="out of memory: above",
        value=1.0,
        labels={"plan_key": "0123", "shape": "8x256", "layout": "pp2 mb16"},
    )
    assert trial_of(row) == {
        "number": 3,
        "plan": "8x256, pp2 mb16",
        "verdict": "infeasible",
        "outcome": "INFEASIBLE",
        "reason": "out of memory: above",
        "iterations_s": [],
        "peak_memory_bytes": 0,
    }


@pytest.mark.parametrize("name", [name for name in SCENARIOS if SCENARIOS[name].memory_limit_bytes])
def test_every_recorded_trial_above_the_memory_limit_is_infeasible(name: str) -> None:
    limit = SCENARIOS[name].memory_limit_bytes
    assert limit is not None
    for run in read_runs(name):
        for trial in run.trials:
            is_above = trial["number"] > 0 and trial["peak_memory_bytes"] > limit
            assert trial["outcome"] == ("INFEASIBLE" if is_above else "OK")


def test_the_page_says_what_each_scenario_fixes_and_leaves_free() -> None:
    page = " ".join(BENCHMARKS.read_text(encoding="utf-8").split())
    said = re.findall(r"- `([\w-]+)` \(fixed: ([^;)]*)(?:; free: ([^)]*))?\):", page)
    assert {name: (fixed, free) for name, fixed, free in said} == {
        name: (scenario.fixed_words or "nothing", scenario.free_words) for name, scenario in SCENARIOS.items()
    }
    shaped = {name for name, scenario in SCENARIOS.items() if "scaling" in scenario.search}
    sentence = re.search(r"and the shape in ([^.]*)\.", page)
    assert sentence is not None
    assert set(re.findall(r"`([\w-]+)`", sentence[1])) == shaped


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_search_of_a_scenario_is_one_that_the_tuner_takes(name: str) -> None:
    scenario = SCENARIOS[name]
    axes = ("schedule", "split", "mapping", "scaling", "recompute", *COUNT_FLAGS)
    for section in (scenario.search, scenario.stock_search, *map(scenario.search_without, axes)):
        assert isinstance(parse_config({"search": section}, where="test").search, SearchConfig)
    assert "scaling" not in scenario.stock_search
    assert scenario.stock_search["schedule"] == ["no-pipelining", "1f1b", "interleaved"]
    per_process = (scenario.cores, scenario.namespaces)
    assert {len(words.split(",")) for words in per_process if words} == {scenario.processes_per_host}
    if scenario.cpu_shares:
        of_core = dict.fromkeys(scenario.cores.split(","), 0.0)
        for core, share in zip(scenario.cores.split(","), scenario.cpu_shares, strict=True):
            of_core[core] += share
        assert max(of_core.values()) < 1.0
    assert scenario.processes_per_host * scenario.num_hosts == scenario.num_processes
    assert all(0 <= host < scenario.num_hosts for pair in scenario.slow_pairs for host in pair)
    if scenario.namespaces:
        assert len(set(scenario.namespaces.split(","))) == len(scenario.rates)


def test_a_count_is_kept_at_the_commands_value() -> None:
    kept = {name: SCENARIOS["j-experts-slow-link"].search_without(name)[name] for name in COUNT_FLAGS}
    assert kept == {
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "context_parallel": 1,
        "expert_parallel": 4,
        "virtual_stages": 1,
        "micro_batch_size": 64,
    }


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


def test_sides_that_memory_does_not_hold_at_once_meet_the_winner_in_groups() -> None:
    keys = ["default", "ours", "stock-0", "stock-1", "stock-2"]
    assert launch_groups(keys, reference="ours", num_processes=4) == [tuple(keys)]
    groups = launch_groups(keys, reference="ours", num_processes=8)
    assert groups == [("ours", "default", "stock-0"), ("ours", "stock-1", "stock-2")]
    # The machine is at half speed in the second group.
    speeds = [{"ours": 3.0, "default": 1.5, "stock-0": 2.0}, {"ours": 1.5, "stock-1": 1.0, "stock-2": 0.5}]
    joined = joined_round(speeds, reference="ours")
    assert joined == pytest.approx(
        {"ours": 1.0, "default": 0.5, "stock-0": 2 / 3, "stock-1": 2 / 3, "stock-2": 1 / 3}
    )


def test_sides_whose_plans_train_alike_are_one_job() -> None:
    """A later search may know more of the nodes: the plan is the same one."""
    plan = plan_with()
    (node, *others) = plan.made_for.nodes
    later = replace(node, network_namespaces=((0,), (1,)))
    known = replace(plan, made_for=replace(plan.made_for, nodes=(later, *others)))
    assert known.key != plan.key
    assert job_key(known) == job_key(plan)
    micro_batch = replace(plan.layout, micro_batch_size=2 * plan.layout.micro_batch_size)
    assert job_key(replace(plan, layout=micro_batch)) != job_key(plan)
    assert job_key(None) == "default"


def test_an_axis_that_there_is_not_is_refused() -> None:
    with pytest.raises(SystemExit, match="--without: width"):
        SCENARIOS[NAME].search_without("width")


def test_the_page_has_the_figures_that_the_files_give() -> None:
    """Each scenario whose plans were measured in turns has its row."""
    text = BENCHMARKS.read_text(encoding="utf-8")
    table = text.partition("| job | over best stock |")[2].partition("\n\n")[0]
    measured = [name for name in SCENARIOS if read_turns(name) is not None]
    rows = [row_of(name, "") for name in measured]
    assert "h-memory-limit" in measured
    assert [row.scenario for row in rows if row.missing] == []
    expected = [
        " | ".join(
            (
                f"| `{row.scenario}`",
                *map(ratio_words, (row.over_stock, row.over_mean, row.over_default)),
                row.winner,
            )
        )
        for row in rows
    ]
    assert [line.rpartition(" | ")[0] for line in table.splitlines() if line.startswith("| `")] == expected


def ratio_words(ratio: Interval | None) -> str:
    """A ratio and its interval as the page writes them."""
    return "-" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
