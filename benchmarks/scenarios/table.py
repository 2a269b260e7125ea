"""The table of the scenarios, from the result files alone."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.scenarios.result_files import (
    OURS,
    RESULTS,
    STOCK,
    WITHOUT,
    SearchRun,
    TurnRounds,
    has_same_search,
    read_runs,
    read_turns,
)
from quartet_plugin.model.measurement import Interval
from quartet_plugin.tuner.finalists import bootstrap_median

DEFAULT = "default"
NUM_SEEDS = 3
WINNER = f"{OURS}-0"
# What is aimed at: geometric means over all rows, and the lower end of each over its best stock search.
AIM_OVER_STOCK, AIM_OVER_DEFAULT, LEAST_LOW = 1.3, 1.7, 0.98

# Whether two commits have the same search.
SameSearch = Callable[[str, str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRow:
    """What one axis gave: the winner over the winner of a search that kept the axis at stock."""

    axis: str
    missing: str = ""
    gain: Interval | None = None
    winner: str = ""

    def line(self, scenario: str) -> str:
        """The row in Markdown."""
        return f"| {scenario} | {self.axis} | {self.missing or _words(self.gain)} | {self.winner} |"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """A scenario in the table; intervals are of 95 %, over rounds.

    `over_stock` is the winner over the best of the stock searches, `best_stock`, and `over_mean` over the
    geometric mean of all of them. `missing` says which files lack.
    """

    scenario: str
    about: str
    missing: str = ""
    commit: str = ""
    best_stock: str = ""
    over_stock: Interval | None = None
    over_mean: Interval | None = None
    over_default: Interval | None = None
    winner: str = ""
    axes: tuple[AxisRow, ...] = ()

    @property
    def line(self) -> str:
        """The row in Markdown."""
        stock = self.missing or f"{_words(self.over_stock)}, {self.best_stock}"
        rest = (_words(self.over_mean), _words(self.over_default), self.winner)
        return f"| {' | '.join((self.scenario, self.about, stock, *rest))} |"


def _words(ratio: Interval | None) -> str:
    return "-" if ratio is None else f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def row_of(
    scenario: str,
    about: str,
    *,
    folder: Path = RESULTS,
    num_seeds: int = NUM_SEEDS,
    same: SameSearch = has_same_search,
) -> TableRow:
    """The row of a scenario: our winner over the stock plans of all seeds, over the default, and by axis.

    The best stock search is the one over which the winner's median, over the rounds of all launches, is
    least.
    """
    runs = {run.name: run for run in read_runs(scenario, folder=folder)}
    turns = read_turns(scenario, folder=folder)
    stock = [f"{STOCK}-{seed}" for seed in range(num_seeds)]
    lacking = [name for name in (WINNER, *stock) if name not in runs]
    commit = runs[WINNER].commit if WINNER in runs else ""
    row = partial(TableRow, scenario=scenario, about=about, commit=commit)
    if turns is None or lacking:
        return row(missing=f"missing: {', '.join([*lacking, *(['turns'] if turns is None else [])])}")
    missing = odd_runs([runs[name] for name in (WINNER, *stock)], turns=turns, same=same)
    if missing:
        return row(missing=missing)
    over = {name: _over(turns, name) for name in stock}
    best = min(stock, key=lambda name: statistics.median(over[name]))
    has_default = all(DEFAULT in speeds for speeds in turns.rounds)
    return row(
        best_stock=best,
        over_stock=bootstrap_median(over[best], seed=0),
        over_mean=bootstrap_median(
            [statistics.geometric_mean(ratios) for ratios in zip(*over.values(), strict=True)], seed=0
        ),
        over_default=bootstrap_median(_over(turns, DEFAULT), seed=0) if has_default else None,
        winner=runs[WINNER].chosen_words,
        axes=tuple(
            axis_row(run, winner=runs[WINNER], turns=turns, same=same)
            for run in runs.values()
            if run.side.startswith(WITHOUT)
        ),
    )


def axis_row(run: SearchRun, *, winner: SearchRun, turns: TurnRounds, same: SameSearch) -> AxisRow:
    """What the axis gave that `run` kept at stock."""
    axis = run.side.removeprefix(f"{WITHOUT}-") + (f", seed {run.seed}" if run.seed else "")
    missing = odd_runs([winner, run], turns=turns, same=same)
    if not all(run.name in speeds for speeds in turns.rounds):
        missing = f"missing: turns of {run.name}"
    gain = None if missing else bootstrap_median(_over(turns, run.name), seed=0)
    return AxisRow(axis=axis, missing=missing, gain=gain, winner=run.chosen_words)


def _over(turns: TurnRounds, name: str) -> list[float]:
    """The winner's speed over another side's, in every round."""
    return [speeds[WINNER] / speeds[name] for speeds in turns.rounds]


def odd_runs(runs: Sequence[SearchRun], *, turns: TurnRounds, same: SameSearch = has_same_search) -> str:
    """Why runs of one row and their turns do not compare: several commits, numbers of trials; else empty."""
    commits = sorted({turns.commit, *(run.commit for run in runs)})
    if len(_searches(commits, same=same)) > 1:
        return f"runs of several commits: {', '.join(commits)}"
    counts = sorted({run.num_trials for run in runs})
    return f"runs of {counts} trials" if len(counts) > 1 else ""


def _searches(commits: Iterable[str], *, same: SameSearch) -> list[list[str]]:
    """The commits, put together where their search is the same; the largest group first."""
    groups: list[list[str]] = []
    for commit in commits:
        group = next((group for group in groups if same(group[0], commit)), None)
        if group is None:
            groups.append([commit])
        else:
            group.append(commit)
    return sorted(groups, key=len, reverse=True)


def table_lines(
    scenarios: Mapping[str, str], *, folder: Path = RESULTS, same: SameSearch = has_same_search
) -> list[str]:
    """The tables in Markdown, then the aims: what the rows that are there reach, and what they do not."""
    rows = [row_of(name, about, folder=folder, same=same) for name, about in scenarios.items()]
    lines = [
        "| scenario | | winner over best stock | over the mean of stock | over the default | winner |",
        "| --- | --- | --- | --- | --- | --- |",
        *(row.line for row in rows),
        "",
    ]
    axes = [axis.line(row.scenario) for row in rows for axis in row.axes]
    if axes:
        lines += ["| scenario | axis kept at stock | winner over the winner without it | that winner |"]
        lines += ["| --- | --- | --- | --- |", *axes, ""]
    there = [row for row in rows if row.over_stock is not None]
    lines += _means(there, num_rows=len(rows))
    absent = [row.scenario for row in rows if row.over_stock is None]
    if absent:
        lines.append(f"rows without a figure: {', '.join(absent)}")
    return [*lines, *_commit_lines(there, same=same)]


def _means(rows: Sequence[TableRow], *, num_rows: int) -> list[str]:
    """Geometric means and the least lower end, each beside its aim."""
    lines = []
    for words, aim, ratios in (
        ("best stock", AIM_OVER_STOCK, [row.over_stock.median for row in rows if row.over_stock]),
        ("the mean of stock", None, [row.over_mean.median for row in rows if row.over_mean]),
        ("the default", AIM_OVER_DEFAULT, [row.over_default.median for row in rows if row.over_default]),
    ):
        if ratios:
            mean = statistics.geometric_mean(ratios)
            text = f"winner over {words}, geometric mean of {len(ratios)} of {num_rows} rows: {mean:.3f}"
            lines.append(text if aim is None else f"{text} (aim {aim})")
    lows = {row.scenario: row.over_stock.low for row in rows if row.over_stock}
    low = [f"{name} {value:.3f}" for name, value in lows.items() if value < LEAST_LOW]
    if rows:
        lines.append(f"lower ends over best stock below {LEAST_LOW}: {', '.join(low) or 'none'}")
    return lines


def _commit_lines(rows: Sequence[TableRow], *, same: SameSearch) -> list[str]:
    """Whether all rows are of one search; else which are of another than most."""
    groups = _searches([row.commit for row in rows], same=same)
    if not groups:
        return []
    if len(groups) == 1:
        return [f"one search in all rows with a figure: {', '.join(dict.fromkeys(groups[0]))}"]
    odd = [f"{row.scenario} ({row.commit})" for row in rows if row.commit not in groups[0]]
    return [f"rows of another search than that of {groups[0][0]}: {', '.join(odd)}"]
