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
MAX_RANKS = 32
# A term below this share of the step is summed up with others of its kind.
LEAST_SHARE = 0.002
# What would be shown as 0.0 %.
LEAST_SHOWN = 0.0005
_GIB = float(2**30)
_MEANING = {
    "compute": "matrix products, attention, elementwise kernels, head",
    "recompute": "forwards repeated in the backward",
    "tp_comm": "tensor-parallel collectives",
    "cp_comm": "context-parallel exchange",
    "ep_comm": "experts' exchange",
    "pp_comm": "waiting for own sends",
    "pp_bubble": "the busiest rank's waiting for other stages",
    "fsdp_comm": "sharded parameters",
    "dp_comm": "gradients and updated parameters",
    "ends_comm": "gradients of tied embeddings",
    "optimizer": "the optimizer's step",
    "step_overhead": "between steps: data, logging",
    "straggler": "the slowest of many nodes",
    "action": "around each action of a stage",
    "residual": "measured over predicted, unexplained",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes at the peak of one pipeline rank; `terms` sum to `total_bytes`."""

    rank: int
    num_layers: int
    total_bytes: float
    terms: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """The best other layout: seconds for equal work, and its terms."""

    label: str
    equal_work_s: float
    terms: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A prediction and its terms, in seconds an iteration; `stated_s` is what the plan's file predicts.

    `available_bytes` is a device's usable memory, None where it is not known. `rates` are the iteration's,
    `cost` is the job's, None where nothing says its tokens. `shape_curve` is there where several shapes
    compete.
    """

    title: Sequence[tuple[str, str]]
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
                "slower_by": self.runner_up.equal_work_s / self.iteration_s - 1,
                "terms": dict(self.runner_up.terms),
            },
            "shapes": None if self.shape_curve is None else dump(self.shape_curve),
            "assumed": dict(self.assumed),
        }


def differences(terms: Mapping[str, float], against: Mapping[str, float], *, most: int = 3) -> str:
    """The terms that differ most, "pp_bubble +0.2 s, tp_comm -0.1 s"; empty where nothing does."""
    by_term = [(name, terms.get(name, 0.0) - against.get(name, 0.0)) for name in {**terms, **against}]
    by_term.sort(key=lambda item: -abs(item[1]))
    scale = max(sum(against.values()), 1e-30)
    kept = [(name, by) for name, by in by_term[:most] if abs(by) > 1e-3 * scale]
    return ", ".join(f"{name.removesuffix('_s')} {by:+.3g} s" for name, by in kept)


def layout_words(layout: Layout, *, separator: str = ", ") -> str:
    """A layout's degrees, its recompute and its optimizer."""
    sharded = f"{separator}sharded optimizer" if layout.distributed_optimizer else ""
    return f"{layout.label}{separator}recompute {layout.recompute}{sharded}"


def show(explanation: Explanation, *, console: "Console") -> None:
    """Print the explanation, bars included."""
    from rich.text import Text

    head = [Text(terminal_line(f"{name:<10}{words}")) for name, words in explanation.title]
    stated = explanation.stated_s
    words = f"{explanation.iteration_s:.4g} s an iteration"
    if stated is not None and abs(stated / explanation.iteration_s - 1) > 1e-3:
        words += f" (the plan says {stated:.4g} s: other figures or constants)"
    parts: list[RenderableType] = [*head, Text(f"{'predicted':<10}{words}")]
    parts.append(Text(f"{'rates':<10}{explanation.rates.words}"))
    parts += [] if explanation.cost is None else [Text(f"{'cost':<10}{explanation.cost.words}")]
    parts.append(Text(""))
    parts += [_time_table(explanation), Text(""), _memory_table(explanation), Text("")]
    parts += [Text(terminal_line(line)) for line in _closing(explanation)]
    for part in parts:
        console.print(part)


def _time_table(explanation: Explanation) -> "RenderableType":
    whole = explanation.iteration_s
    rows = sorted(explanation.terms.items(), key=lambda item: -item[1])
    table = _table(("term", "seconds", "share", "", ""))
    small = [value for _, value in rows if 0 < abs(value) < LEAST_SHARE * whole]
    for name, value in rows:
        # What a calibration found too much is a negative term.
        if abs(value) < LEAST_SHARE * whole:
            continue
        plain = name.removesuffix("_s")
        table.add_row(
            plain, f"{value:.4g}", f"{100 * value / whole:.1f} %", bar(value / whole), _MEANING.get(plain, "")
        )
        if name == "compute_s":
            for inner, seconds in sorted(explanation.compute_terms.items(), key=lambda item: -item[1]):
                if seconds >= LEAST_SHARE * whole:
                    label = f"  {inner.removesuffix('_s')}"
                    table.add_row(label, f"{seconds:.4g}", f"{100 * seconds / whole:.1f} %", "", "")
    if abs(sum(small)) >= LEAST_SHOWN * whole:
        table.add_row("others", f"{sum(small):.4g}", f"{100 * sum(small) / whole:.1f} %", "", "")
    return table


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
    lines = [f"bubble    {bubble_words(explanation.bubble_fraction)} of all device time"]
    other = explanation.runner_up
    if other is None:
        lines.append("runner-up none: no other layout is legal and fits")
    else:
        by = 100 * (other.equal_work_s / explanation.iteration_s - 1)
        verdict = f"{by:.1f} % slower" if by >= 0 else f"{-by:.1f} % faster than this plan"
        terms = differences(other.terms, explanation.terms)
        lines.append(
            f"runner-up {other.label}: {other.equal_work_s:.4g} s, {verdict}{': ' + terms if terms else ''}"
        )
    if explanation.shape_curve is not None:
        lines += shape_lines(explanation.shape_curve)
    if explanation.assumed:
        words = ", ".join(f"{name} {value}" for name, value in explanation.assumed.items())
        lines.append(f"assumed   {words}")
    return lines


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
        numeric = head in ("seconds", "share", "GiB", "of usable", "rank", "layers")
        table.add_column(head, justify="right" if numeric else "left", no_wrap=column < len(heads) - 1)
    return table
