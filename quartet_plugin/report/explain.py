"""A prediction for reading: the terms of the step's time and of every stage's memory, with bars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quartet_plugin.model.layout import Layout
from quartet_plugin.model.schema import dump
from quartet_plugin.model.shape_curve import ShapeCurve
from quartet_plugin.protocol.terminal import terminal_line
from quartet_plugin.report.formatting import bubble_words
from quartet_plugin.report.shape_curve import shape_lines
from quartet_plugin.report.throughput import JobCost, Throughput

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

BAR_WIDTH = 40
# What a plan is compared with: the command that a run tuned, or the layout that `quartet plan` compares with.
YOUR_COMMAND, PLAIN_BASELINE = BASELINE_NAMES = ("your command", "baseline")
# The head of the column with the plan's seconds less its baseline's.
DIFFERENCE = "difference"
# The share of two iterations' difference above which the residual's part of it is said.
NOTABLE_RESIDUAL = 0.25
# Above the table of terms.
TERMS_NOTE = "the seconds of the busiest pipeline rank; compute is the sum of its parts"
MAX_RANKS = 32
# The least columns of a terminal with room for bars and meanings beside two iterations' seconds.
MEANING_COLUMNS = 120
# A term below this share of the step is summed up with others of its kind.
LEAST_SHARE = 0.002
# What would be shown as 0.0 %.
LEAST_SHOWN = 0.0005
# Saved seconds by the terms and as measured that lie further apart are not the same seconds.
APART = 1.25
_GIB = float(2**30)
_MEANING = {
    "compute": "matrix multiplications, attention, elementwise kernels, head",
    "recompute": "forwards repeated in the backward",
    "offload": "copies of activations to the host and back that nothing hides",
    "tp_comm": "tensor-parallel collectives",
    "cp_comm": "context-parallel exchange",
    "ep_comm": "experts' exchange",
    "pp_comm": "time in which a rank waits for its sends",
    "pp_bubble": "time in which the busiest rank waits for other stages",
    "fsdp_comm": "sharded parameters",
    "dp_comm": "gradients and updated parameters",
    "ends_comm": "gradients of the embedding's copies",
    "optimizer": "the optimizer's step",
    "step_overhead": "between steps: data, logging",
    "straggler": "extra waiting for the slowest node",
    "action": "fixed overhead of each pipeline action (forward or backward of one microbatch on one stage)",
    "residual": "measured time that no other term explains",
}
# Of the parts of `compute`.
_PART_MEANING = {
    "gemm": "matrix multiplications of the layers",
    "attention": "attention scores, and their products with the values",
    "elementwise": "norms, activations, additions: bound by memory",
    "launch": "host time for kernel launches",
    "head": "the output layer, and the loss",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes at the peak of one pipeline rank; `terms` sum to `total_bytes`."""

    rank: int
    num_layers: int
    total_bytes: float
    terms: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineTerms:
    """The iteration of what a plan is compared with, `name`d so; `measured_s` is None where none was."""

    name: str
    iteration_s: float
    terms: Mapping[str, float]
    compute_terms: Mapping[str, float]
    bubble_fraction: float
    measured_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """The next best predicted layout: seconds for equal work, and its terms.

    `trial` is the number of the run's trial that measured it, None where none did.
    """

    label: str
    equal_work_s: float
    trial: int | None
    terms: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A prediction and its terms, in seconds per iteration; `stated_s` is what the plan's file predicts.

    `available_bytes` is a device's usable memory, None where it is not known. `rates` are the iteration's,
    `cost` is the job's, None where nothing says its tokens. `shape_curve` is there where several shapes
    compete. `basis` says what calibrated the figures, `num_trials` by how many trials of the run, None where
    by none. `measured_s` is the plan's measured iteration, None where it was not measured: of the final
    rounds, or of its single trial without `is_measured_in_rounds`. `baseline` is the iteration of what the
    plan is compared with. `choice` has the lines that say how final rounds chose it, `speedup` the words of
    the final rounds' speedup and the predicted one, both empty without them.
    """

    title: Sequence[tuple[str, str]]
    choice: Sequence[str] = ()
    iteration_s: float
    stated_s: float | None
    terms: Mapping[str, float]
    compute_terms: Mapping[str, float]
    bubble_fraction: float
    memory: Sequence[StageMemory]
    available_bytes: float | None
    runner_up: RunnerUp | None
    assumed: Mapping[str, str]
    rates: Throughput
    cost: JobCost | None = None
    shape_curve: ShapeCurve | None = None
    basis: str
    num_trials: int | None = None
    measured_s: float | None = None
    is_measured_in_rounds: bool = True
    speedup: str = ""
    baseline: BaselineTerms | None = None

    @property
    def word(self) -> str:
        """The name of the seconds: `fitted` by a run's trials, or `predicted`."""
        return "predicted" if self.num_trials is None else "fitted"

    def as_data(self) -> dict[str, object]:
        """The explanation as JSON data."""
        return {
            "schema_version": 1,
            "iteration_s": self.iteration_s,
            "stated_s": self.stated_s,
            "rates": self.rates.as_data(),
            "cost": None if self.cost is None else self.cost.as_data(),
            "terms": dict(self.terms),
            "compute_terms": dict(self.compute_terms),
            "bubble_fraction": self.bubble_fraction,
            "memory": {
                "available_bytes": self.available_bytes,
                "ranks": [
                    {"rank": stage.rank, "total_bytes": stage.total_bytes, "terms": dict(stage.terms)}
                    for stage in self.memory
                ],
            },
            "runner_up": None
            if self.runner_up is None
            else {
                "label": self.runner_up.label,
                "equal_work_s": self.runner_up.equal_work_s,
                "trial": self.runner_up.trial,
                "slower_by": self.runner_up.equal_work_s / self.iteration_s - 1,
                "terms": dict(self.runner_up.terms),
            },
            "shapes": None if self.shape_curve is None else dump(self.shape_curve),
            "assumed": dict(self.assumed),
            "num_calibrating_trials": self.num_trials,
            "measured_s": self.measured_s,
            "baseline": None
            if self.baseline is None
            else {
                "iteration_s": self.baseline.iteration_s,
                "measured_s": self.baseline.measured_s,
                "terms": dict(self.baseline.terms),
                "compute_terms": dict(self.baseline.compute_terms),
                "bubble_fraction": self.baseline.bubble_fraction,
            },
        }


def differences(terms: Mapping[str, float], against: Mapping[str, float], *, most: int = 3) -> str:
    """The terms that differ most, "pp_bubble +0.2 s, tp_comm -0.1 s"; empty where nothing does."""
    by_term = [(name, terms.get(name, 0.0) - against.get(name, 0.0)) for name in {**terms, **against}]
    by_term.sort(key=lambda item: -abs(item[1]))
    scale = max(sum(against.values()), 1e-30)
    kept = [(name, by) for name, by in by_term[:most] if abs(by) > 1e-3 * scale]
    return ", ".join(f"{name.removesuffix('_s')} {by:+.3g} s" for name, by in kept)


def layout_words(layout: Layout) -> str:
    """A layout's degrees, its recompute and its optimizer."""
    sharded = ", sharded optimizer" if layout.distributed_optimizer else ""
    return f"{layout.label}, recompute {layout.recompute}{sharded}"


def show(explanation: Explanation, *, console: "Console") -> None:
    """Print the explanation, bars included."""
    from rich.text import Text

    head = [Text(terminal_line(f"{name:<10}{words}")) for name, words in explanation.title]
    stated = explanation.stated_s
    words = f"{explanation.iteration_s:.4g} s per iteration"
    if stated is not None and abs(stated / explanation.iteration_s - 1) > 1e-3:
        words += f" (predicted before its launch: {stated:.4g} s)"
    parts: list[RenderableType] = [*head, Text(f"{explanation.word:<10}{words}")]
    parts += [Text(terminal_line(f"{name:<10}{line}")) for name, line in _time_lines(explanation)]
    parts.append(Text(f"{'rates':<10}{explanation.rates.words}"))
    parts += [] if explanation.cost is None else [Text(f"{'cost':<10}{explanation.cost.words}")]
    parts += [Text(""), Text(TERMS_NOTE)]
    parts += [_time_table(explanation, columns=console.width), Text(""), _memory_table(explanation), Text("")]
    parts += [Text(terminal_line(line)) for line in _closing(explanation)]
    for part in parts:
        console.print(part)


def _time_lines(explanation: Explanation) -> list[tuple[str, str]]:
    """The measured and predicted times, and the trials that calibrated the predictions."""
    lines = []
    if explanation.measured_s is not None:
        words = _measured_words(explanation.measured_s, explanation.iteration_s, word=explanation.word)
        lines.append(("measured", words))
    if explanation.speedup:
        lines.append(("speedup", explanation.speedup))
    other = explanation.baseline
    if other is not None:
        words = f"{other.name}: {other.iteration_s:.4g} s per iteration {explanation.word}"
        if other.measured_s is not None:
            ratio = _measured_words(other.measured_s, other.iteration_s, word=explanation.word)
            words += f", measured {ratio}"
        lines.append(("before", words))
        lines += _saved(explanation, other)
    lines.append(("basis", explanation.basis))
    if explanation.num_trials is not None and explanation.measured_s is not None:
        lines.append(("", _FITTED_TO_ROUNDS if explanation.is_measured_in_rounds else _FITTED_TO_TRIALS))
    return lines


def _saved(explanation: Explanation, other: BaselineTerms) -> list[tuple[str, str]]:
    """The seconds that were saved, measured and by the terms, where both plans were measured."""
    if explanation.measured_s is None or other.measured_s is None:
        return []
    measured_s = other.measured_s - explanation.measured_s
    modelled_s = other.iteration_s - explanation.iteration_s
    words = f"{1000 * measured_s:.0f} ms per iteration measured, "
    words += f"{1000 * modelled_s:.0f} ms {explanation.word}"
    if measured_s <= 0 or not 1.0 / APART <= modelled_s / measured_s <= APART:
        words += ": in the table below trust the order and the shares, not the seconds"
    return [("saved", words)]


_FITTED_TO_ROUNDS = (
    "the fit, residual included, used single trials, not the final rounds that gave the measured times"
)
_FITTED_TO_TRIALS = (
    "the fit, residual included, used all trials, so the sum may differ from the time of this one"
)


def _measured_words(measured_s: float, modelled_s: float, *, word: str) -> str:
    return f"{measured_s:.4g} s per iteration, {measured_s / modelled_s:.2f}x the {word} time"


def _time_table(explanation: Explanation, *, columns: int) -> "RenderableType":
    """The terms of the plan's iteration, the longest first.

    With a baseline its terms stand beside them, with the difference, the largest first, and bars are as long
    as differences. Where these leave too few of the terminal's `columns`, bars and meanings are left out.
    """
    other = explanation.baseline
    theirs: Mapping[str, float] = {} if other is None else other.terms
    rows = sorted(
        {**explanation.terms, **theirs},
        key=lambda name: (
            -abs(_difference(explanation, name)),
            -explanation.terms.get(name, 0.0),
            -theirs.get(name, 0.0),
        ),
    )
    has_meaning = other is None or columns >= MEANING_COLUMNS
    beside = () if other is None else (other.name, "share", DIFFERENCE)
    table = _table(("term", "seconds", "share", *beside, *(("", "") if has_meaning else ())))
    width = BAR_WIDTH if other is None else BAR_WIDTH // 4
    largest = max((abs(_difference(explanation, name)) for name in rows), default=0.0)

    def share_of(name: str) -> float:
        """The length of a term's bar, of 1."""
        if other is None:
            return explanation.terms[name] / explanation.iteration_s
        return abs(_difference(explanation, name)) / max(largest, 1e-30)

    def add(name: str, cells: Sequence[str], share: float = 0.0, meaning: str = "") -> None:
        table.add_row(name, *cells, *((bar(share, width=width), meaning) if has_meaning else ()))

    shown = [name for name in rows if _is_shown(explanation, name)]
    for name in shown:
        plain = name.removesuffix("_s")
        add(plain, _cells(explanation, name), share_of(name), _MEANING.get(plain, ""))
        if name == "compute_s":
            for inner, inner_cells in _compute_rows(explanation):
                add(f"  {inner}", inner_cells, meaning=f"  {_PART_MEANING.get(inner, '')}".rstrip())
    small = [name for name in rows if name not in shown]
    seconds = sum(explanation.terms.get(name, 0.0) for name in small)
    if abs(seconds) >= LEAST_SHOWN * explanation.iteration_s:
        add("others", _pairs(explanation, seconds, sum(theirs.get(name, 0.0) for name in small)))
    if other is not None:
        add("sum", _pairs(explanation, explanation.iteration_s, other.iteration_s))
    return table


def _difference(explanation: Explanation, name: str) -> float:
    """A term's seconds of the plan less those of its baseline; 0 without a baseline."""
    other = explanation.baseline
    return 0.0 if other is None else explanation.terms.get(name, 0.0) - other.terms.get(name, 0.0)


def _is_shown(explanation: Explanation, name: str) -> bool:
    """Whether a term has a row; one that the calibration has made negative counts by its size."""
    other = explanation.baseline
    if abs(explanation.terms.get(name, 0.0)) >= LEAST_SHARE * explanation.iteration_s:
        return True
    return other is not None and abs(other.terms.get(name, 0.0)) >= LEAST_SHARE * other.iteration_s


def _compute_rows(explanation: Explanation) -> list[tuple[str, list[str]]]:
    """The name and the cells of each part of the compute term."""
    other = explanation.baseline
    theirs: Mapping[str, float] = {} if other is None else other.compute_terms
    rows = []
    terms = explanation.compute_terms
    pairs = {name: (terms.get(name, 0.0), theirs.get(name, 0.0)) for name in {**terms, **theirs}}
    by_size = sorted(
        pairs.items(), key=lambda item: (-abs(item[1][0] - item[1][1]) if theirs else 0.0, -item[1][0])
    )
    for name, pair in by_size:
        if max(pair) >= LEAST_SHARE * explanation.iteration_s:
            rows.append((name.removesuffix("_s"), _pairs(explanation, *pair)))
    return rows


def _cells(explanation: Explanation, name: str) -> list[str]:
    other = explanation.baseline
    theirs = 0.0 if other is None else other.terms.get(name, 0.0)
    return _pairs(explanation, explanation.terms.get(name, 0.0), theirs)


def _pairs(explanation: Explanation, seconds: float, theirs: float) -> list[str]:
    """Seconds and share of the plan's iteration; with a baseline also its own, and the difference."""
    cells = [f"{seconds:.4g}", f"{100 * seconds / explanation.iteration_s:.1f} %"]
    if explanation.baseline is not None:
        cells += [f"{theirs:.4g}", f"{100 * theirs / explanation.baseline.iteration_s:.1f} %"]
        cells.append(f"{1e3 * (seconds - theirs):+,.1f} ms")
    return cells


def _memory_table(explanation: Explanation) -> "RenderableType":
    limit = explanation.available_bytes
    table = _table(("rank", "layers", "GiB", "of usable", "", "most of it"))
    for stage in explanation.memory[:MAX_RANKS]:
        largest, largest_bytes = max(stage.terms.items(), key=lambda item: item[1])
        share = None if limit is None else stage.total_bytes / limit
        table.add_row(
            str(stage.rank),
            str(stage.num_layers),
            f"{stage.total_bytes / _GIB:.2f}",
            "not known" if share is None else f"{100 * share:.0f} %",
            "" if share is None else bar(share),
            f"{largest.removesuffix('_bytes')} {largest_bytes / _GIB:.2f} GiB"
            + (" DOES NOT FIT" if share is not None and share > 1 else ""),
        )
    if len(explanation.memory) > MAX_RANKS:
        table.caption = f"(and {len(explanation.memory) - MAX_RANKS} more pipeline ranks)"
    return table


def _closing(explanation: Explanation) -> list[str]:
    bubble = f"bubble    {bubble_words(explanation.bubble_fraction)} of all device time"
    if explanation.baseline is not None:
        bubble += f"; {explanation.baseline.name}: {bubble_words(explanation.baseline.bubble_fraction)}"
    lines = [bubble]
    bubbles = (0.0 if explanation.baseline is None else explanation.baseline.bubble_fraction,)
    if max(explanation.bubble_fraction, *bubbles) > 0.0:
        lines += [
            "          bubble: idle share of all devices between the first and last action of the pipeline",
            "          pp_bubble: seconds in which the busiest pipeline rank waits",
        ]
    lines += _residual_lines(explanation)
    other = explanation.runner_up
    if other is None:
        lines.append("next best predicted layout: none; no other layout is legal and fits in memory")
    else:
        by = 100 * (other.equal_work_s / explanation.iteration_s - 1)
        verdict = f"{by:.1f} % slower" if by >= 0 else f"{-by:.1f} % faster than this plan"
        if other.trial is not None:
            verdict += f" by the fit; trial {other.trial} measured it"
        terms = differences(other.terms, explanation.terms)
        lines.append(
            f"next best predicted layout: {other.label}: {other.equal_work_s:.4g} s for the same work, "
            f"{verdict}{': ' + terms if terms else ''}"
        )
    lines += explanation.choice
    if explanation.shape_curve is not None:
        lines += shape_lines(explanation.shape_curve)
    if explanation.assumed:
        words = ", ".join(f"{name} {value}" for name, value in explanation.assumed.items())
        lines.append(f"assumed   {words}")
    return lines


def _residual_lines(explanation: Explanation) -> list[str]:
    """How much of the difference no named term explains, where that is much; none without a baseline."""
    other = explanation.baseline
    if other is None:
        return []
    by_residual = _difference(explanation, "residual_s")
    whole = explanation.iteration_s - other.iteration_s
    if abs(by_residual) <= NOTABLE_RESIDUAL * abs(whole):
        return []
    of_whole = f"{1e3 * by_residual:+,.0f} of {1e3 * whole:+,.0f} ms"
    return [
        f"residual  {of_whole} is explained by no named term: trials of similar plans took longer or shorter "
        "than the sum of the other terms by this amount"
    ]


def bar(share: float, *, width: int = BAR_WIDTH) -> str:
    """A bar of eighths of a block, as long as `share` of `width`; over 1 it ends with an arrow."""
    if share > 1:
        return "█" * (width - 1) + "▶"
    eighths = round(max(0.0, share) * width * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + ("" if rest == 0 else " ▏▎▍▌▋▊▉"[rest])


def _table(heads: Sequence[str]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_edge=False)
    for column, head in enumerate(heads):
        numeric = head in (
            "seconds",
            "share",
            "GiB",
            "of usable",
            "rank",
            "layers",
            DIFFERENCE,
            *BASELINE_NAMES,
        )
        table.add_column(head, justify="right" if numeric else "left", no_wrap=column < len(heads) - 1)
    return table
