"""The table of the scenarios, from the result files alone."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scenarios.result_files import OURS, RESULTS, STOCK, SearchRun, read_runs, read_turns
from quartet_plugin.model.measurement import Interval
from quartet_plugin.tuner.finalists import bootstrap_median

DEFAULT = "default"
NUM_SEEDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """A scenario in the table; intervals are of 95 %, over rounds. `missing` says which files lack."""

    scenario: str
    about: str
    missing: str = ""
    over_stock: Interval | None = None
    over_default: Interval | None = None
    winner: str = ""

    @property
    def line(self) -> str:
        """The row in Markdown."""
        stock, default = (_words(ratio) for ratio in (self.over_stock, self.over_default))
        return f"| {self.scenario} | {self.about} | {self.missing or stock} | {default} | {self.winner} |"


def _words(ratio: Interval | None) -> str:
    return "-" if ratio is None else f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def row_of(scenario: str, about: str, *, folder: Path = RESULTS, num_seeds: int = NUM_SEEDS) -> TableRow:
    """The row of a scenario: our winner over the best stock plans of all seeds, and over the default."""
    runs = {run.name: run for run in read_runs(scenario, folder=folder)}
    turns = read_turns(scenario, folder=folder)
    wanted = [f"{OURS}-0", *(f"{STOCK}-{seed}" for seed in range(num_seeds))]
    lacking = [name for name in wanted if name not in runs]
    if turns is None:
        lacking.append("turns")
    missing = f"missing: {', '.join(lacking)}" if lacking else odd_runs([runs[name] for name in wanted])
    if turns is None or missing:
        return TableRow(scenario=scenario, about=about, missing=missing)
    ours = f"{OURS}-0"
    stock = wanted[1:]
    against = [statistics.geometric_mean([row[ours] / row[name] for name in stock]) for row in turns.rounds]
    over_default = None
    if all(DEFAULT in row for row in turns.rounds):
        over_default = bootstrap_median([row[ours] / row[DEFAULT] for row in turns.rounds], seed=0)
    return TableRow(
        scenario=scenario,
        about=about,
        over_stock=bootstrap_median(against, seed=0),
        over_default=over_default,
        winner=runs[ours].chosen_words,
    )


def odd_runs(runs: Sequence[SearchRun]) -> str:
    """Why runs of one row do not compare: several commits or numbers of trials; empty where they do."""
    commits = sorted({run.commit for run in runs})
    if len(commits) > 1:
        return f"runs of several commits: {', '.join(commits)}"
    counts = sorted({run.num_trials for run in runs})
    return f"runs of {counts} trials" if len(counts) > 1 else ""


def table_lines(scenarios: Mapping[str, str], *, folder: Path = RESULTS) -> list[str]:
    """The table in Markdown, with the geometric means of the rows that are there."""
    rows = [row_of(name, about, folder=folder) for name, about in scenarios.items()]
    lines = [
        "| scenario | | winner over best stock | winner over the default | winner |",
        "| --- | --- | --- | --- | --- |",
        *(row.line for row in rows),
        "",
    ]
    for words, ratios in (
        ("best stock", [row.over_stock.median for row in rows if row.over_stock]),
        ("the default", [row.over_default.median for row in rows if row.over_default]),
    ):
        if ratios:
            mean = statistics.geometric_mean(ratios)
            lines.append(f"winner over {words}, geometric mean of {len(ratios)} rows: {mean:.3f}")
    absent = [row.scenario for row in rows if row.over_stock is None]
    if absent:
        lines.append(f"rows without a figure: {', '.join(absent)}")
    return lines
