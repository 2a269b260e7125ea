"""The report's figures of a run: each function returns one SVG, or None where there is nothing to draw."""

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

from quartet_plugin.model.history import Finalist, RunHistory, TrialRow
from quartet_plugin.model.measurement import Interval
from quartet_plugin.report.formatting import (
    clean,
    iteration_spread,
    size,
    speedup_sentence,
    speedup_spread,
    speedup_words,
)
from quartet_plugin.report.launch_words import COMMAND
from quartet_plugin.report.svg import Scale, drawing, element, short, text, title, x_axis, y_axis
from quartet_plugin.report.trial_table import class_of, label_of, outcome_of

WIDTH = 1060.0
HALF = 520.0
# Rows of finalists: the first one's top, the height of each, and where their names end.
_TOP, _ROW_HEIGHT, _NAMES_END = 12.0, 38.0, 138.0
_MAX_FINALISTS = 8
# The study's parameters whose names say less than the part that they choose.
_PARTS_BY_PARAMETER = {
    "layout": "degrees of parallelism",
    "micro_batch_size": "micro-batch size",
    "optimizer": "distributed optimizer",
    "group": "microbatches a group",
    "mapping": "rank order",
}
_MAX_BARS = 12
_MAX_PAIRS = 400
_MAX_STAGES = 64


def iteration_times(history: RunHistory) -> str | None:
    """Seconds an iteration of the finalists and the baseline, medians with their launches' ranges."""
    finalists = history.finalists[:_MAX_FINALISTS]
    if not finalists:
        return None
    rows = [(_baseline(history), "baseline", finalists[0].comparison.baseline)]
    rows += [
        (f"trial {finalist.number}", _style_of(finalist, history), finalist.comparison.plan)
        for finalist in finalists
    ]
    x = Scale.over(
        _ends_of([measured.iteration_s for _, _, measured in rows]), start=_NAMES_END + 12, end=HALF - 20
    )
    bottom = _TOP + _ROW_HEIGHT * len(rows)
    parts = [x_axis(x, bottom, top=_TOP - 8, words="seconds per iteration (lower is better)", count=4)]
    for index, (name, style, measured) in enumerate(rows):
        y = _TOP + _ROW_HEIGHT * (index + 0.5)
        words = f"{name}: {iteration_spread(measured)} s"
        parts.append(text(_NAMES_END, y + 4, name, cls="label", anchor="end"))
        parts.append(_whisker(x, measured.iteration_s, y, style=style, words=words))
    return drawing(HALF, bottom + 44, *parts, label="Seconds of the best plans and the baseline")


def _baseline(history: RunHistory) -> str:
    # Longer names leave the margin.
    return "stock plan that fits" if history.baseline_note else COMMAND


def speedups(history: RunHistory) -> str | None:
    """Speedup of the finalists over the baseline, medians with their intervals, and the single rounds."""
    finalists = history.finalists[:_MAX_FINALISTS]
    if not finalists:
        return None
    x = Scale.over(
        [
            *_ends_of([finalist.comparison.speedup for finalist in finalists]),
            *(ratio for finalist in finalists for ratio in finalist.comparison.round_ratios),
        ],
        start=_NAMES_END + 12,
        end=HALF - 20,
        include=[1.0],
    )
    bottom = _TOP + _ROW_HEIGHT * (len(finalists) + 1)
    parts = [
        x_axis(x, bottom, top=_TOP - 8, words="speedup (higher is better)", unit="x", count=4),
        element("line", x1=x(1.0), x2=x(1.0), y1=_TOP - 8, y2=bottom, cls="reference"),
        text(_NAMES_END, _TOP + _ROW_HEIGHT / 2 + 4, _baseline(history), cls="label", anchor="end"),
    ]
    for index, finalist in enumerate(finalists, start=1):
        y, name = _TOP + _ROW_HEIGHT * (index + 0.5), f"trial {finalist.number}"
        interval, style = finalist.comparison.speedup, _style_of(finalist, history)
        parts.append(text(_NAMES_END, y + 4, name, cls="label", anchor="end"))
        parts += [
            element("line", x1=x(ratio), x2=x(ratio), y1=y + 9, y2=y + 14, cls="rug")
            for ratio in finalist.comparison.round_ratios
        ]
        parts.append(_whisker(x, interval, y, style=style, words=f"{name}: {speedup_spread(interval)}"))
    return drawing(HALF, bottom + 44, *parts, label="Speedup of the best plans over the baseline")


def _style_of(finalist: Finalist, history: RunHistory) -> str:
    winner = history.winner.provenance.trial if history.winner else None
    return "won" if finalist.number == winner else "other"


def _ends_of(intervals: Sequence[Interval]) -> list[float]:
    return [value for i in intervals for value in (i.low, i.high, i.median)]


def _whisker(scale: Scale, interval: Interval, y: float, *, style: str, words: str) -> str:
    low, high, median = scale(interval.low), scale(interval.high), scale(interval.median)
    return element(
        "g",
        title(words),
        element("line", x1=low, x2=high, y1=y, y2=y, cls="stem"),
        element("line", x1=low, x2=low, y1=y - 5, y2=y + 5, cls="stem"),
        element("line", x1=high, x2=high, y1=y - 5, y2=y + 5, cls="stem"),
        element("circle", cx=median, cy=y, r=5.5),
        cls=f"whisker {style}",
    )


def progress(history: RunHistory, *, width: float = WIDTH) -> str | None:
    """Objective of every trial over the baseline's, in order of trials, with the best so far."""
    rows = [row for row in history.trials if row.verdict]
    ratios = {row.number: ratio for row in rows if (ratio := history.versus_baseline(row)) is not None}
    if len(ratios) < 2:
        return None
    top, bottom, strip = 14.0, 256.0, 282.0
    x = Scale.over([row.number for row in rows], start=66, end=width - 16, margin=0.025)
    levels = [*ratios.values(), *(check.ratio for check in history.drift_checks)]
    y = Scale.over(levels, start=bottom, end=top, include=[1.0])
    parts = [
        y_axis(y, 60, right=width - 10, words="speedup", unit="x"),
        element("line", x1=60, x2=width - 10, y1=y(1.0), y2=y(1.0), cls="reference"),
        element("line", x1=60, x2=width - 10, y1=strip, y2=strip, cls="grid"),
        text(54, strip + 4, "failed", cls="tick", anchor="end"),
        element("path", d=_best_so_far(ratios, x, y), cls="best-line"),
    ]
    for tick in x.ticks(round(width / 88)):
        if tick == int(tick) and tick >= 0:
            parts.append(text(x(tick), strip + 24, short(tick), cls="tick", anchor="middle"))
    parts.append(text((x.start + x.end) / 2, strip + 44, "trial", cls="axis", anchor="middle"))
    for check in history.drift_checks:
        center, level = x(check.num_tried + 0.5), y(check.ratio)
        words = f"your command again after {check.num_tried} trials: {speedup_words(check.ratio)}"
        diamond = f"M{center:.1f} {level - 5:.1f}l5 5l-5 5l-5 -5z"
        parts.append(element("path", title(words), d=diamond, cls="drift"))
    best = max(ratios, key=lambda number: (ratios[number], -number))
    winner = history.winner.provenance.trial if history.winner else None
    if winner in ratios:
        parts.append(element("circle", cx=x(winner), cy=y(ratios[winner]), r=9.0, cls="ring"))
        parts.append(text(x(winner) + 11, y(ratios[winner]) - 8, "winner", cls="label"))
    for row in rows:
        parts.append(_point(row, ratios.get(row.number), x, y, strip, is_best=row.number == best))
    return drawing(
        width, strip + 54, *parts, label="Objective of every trial over the baseline's, in order of trials"
    )


def _best_so_far(ratios: Mapping[int, float], x: Scale, y: Scale) -> str:
    best = 0.0
    steps: list[str] = []
    for number, ratio in sorted(ratios.items()):
        if ratio > best:
            steps.append(f"{'H' if steps else 'M'}{x(number):.1f}{'V' if steps else ' '}{y(ratio):.1f}")
            best = ratio
    return "".join(steps) + f"H{x.end:.1f}"


def _point(row: TrialRow, ratio: float | None, x: Scale, y: Scale, strip: float, *, is_best: bool) -> str:
    words = f"trial {row.number}, {clean(label_of(row), limit=120)}: {outcome_of(row)}"
    center = x(row.number)
    if ratio is None:
        cross = f"M{center - 4:.1f} {strip - 4:.1f}l8 8m0 -8l-8 8"
        return element("path", title(f"{words}: {clean(row.reason, limit=200)}"), d=cross, cls="cross")
    kind = "repeat" if row.repeats is not None else "unstable" if row.outcome == "UNSTABLE" else "measured"
    style = f"{kind} top" if is_best else kind
    return element(
        "circle",
        title(f"{words}, {speedup_sentence(ratio, drift=row.drift)}"),
        cx=center,
        cy=y(ratio),
        r=5.5 if is_best else 4.0,
        cls=style,
    )


def importance(shares: Mapping[str, float]) -> str | None:
    """Bars of the share of the objective's spread that each part of a plan explains.

    `shares` are by the study's parameters, of which a part has several.
    """
    by_part: dict[str, float] = defaultdict(float)
    for parameter, share in shares.items():
        by_part[part_of(parameter)] += share
    ranked = sorted(by_part.items(), key=lambda item: (-item[1], item[0]))[:_MAX_BARS]
    if not ranked:
        return None
    height = 24.0 * len(ranked)
    x = Scale(low=0.0, high=max(max(share for _, share in ranked), 1e-9) * 1.15, start=200, end=HALF - 10)
    parts = [x_axis(Scale(low=0, high=100 * x.high, start=x.start, end=x.end), height + 8, top=2,
                    words="share of the variance that it explains", unit=" %", count=4)]  # fmt: skip
    for index, (name, share) in enumerate(ranked):
        y = 24.0 * index + 4
        parts.append(text(192, y + 13, clean(name, limit=30), cls="label", anchor="end"))
        wide, words = max(x(share) - x.start, 1), title(f"{100 * share:.1f} %")
        parts.append(element("rect", words, x=x.start, y=y, height=17, width=wide, cls="bar"))
    return drawing(HALF, height + 50, *parts, label="Parameter importance")


def part_of(parameter: str) -> str:
    """The part of a plan that a parameter of the study chooses, in the words of the other tables."""
    name = re.split(r"[.\[]", parameter, maxsplit=1)[0]
    return _PARTS_BY_PARAMETER.get(name, name.replace("_", " "))


def predicted_measured(history: RunHistory) -> str | None:
    """Predicted against measured iteration times, with the line of equality."""
    rows = _predicted_rows(history)
    if len(rows) < 2:
        return None
    values = [v for row in rows for v in (row.predicted_iteration_s or 0.0, row.iteration_s or 0.0)]
    is_log = min(values) > 0 and max(values) / min(values) > 8
    x = Scale.over(values, start=64, end=HALF - 12, is_log=is_log)
    y = Scale.over(values, start=300, end=12, is_log=is_log)
    parts = [
        x_axis(x, 300, top=12, words="measured seconds per iteration", count=5),
        y_axis(y, 64, right=HALF - 12, words="predicted, s"),
        element("line", x1=x.start, y1=y.start, x2=x.end, y2=y.end, cls="reference"),
    ]
    for row in rows:
        measured, predicted = row.iteration_s or 0.0, row.predicted_iteration_s or 0.0
        words = (
            f"trial {row.number}, {clean(label_of(row), limit=120)}: measured {measured:.4g} s, "
            f"predicted {predicted:.4g} s"
        )
        parts.append(element("circle", title(words), cx=x(measured), cy=y(predicted), r=4.0, cls="measured"))
    return drawing(HALF, 344, *parts, label="Predicted against measured iteration times")


def prediction_words(history: RunHistory) -> str:
    """The predictions' median error, and the share of pairs of plans that they put in the right order."""
    rows = _predicted_rows(history)
    pairs = [(row.predicted_iteration_s or 0.0, row.iteration_s or 1.0) for row in rows]
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs]
    words = f"{len(rows)} plans; median error {100 * statistics.median(errors):.0f} %"
    agreement = _kendall(pairs[:_MAX_PAIRS])
    if agreement is None:
        return words
    return f"{words}; {100 * agreement:.0f} % of all pairs of plans in the right order"


def prediction_lines(history: RunHistory) -> list[str]:
    """How good the predictions before the launches were, as a line for a terminal, where there are some."""
    if not _predicted_rows(history):
        return []
    return [f"predicted {prediction_words(history)} (random guesses: 50 %), each predicted before its launch"]


def _predicted_rows(history: RunHistory) -> list[TrialRow]:
    return [
        row
        for row in history.trials
        if row.is_measured and row.number > 0 and row.repeats is None
        and row.predicted_iteration_s and row.iteration_s
    ]  # fmt: skip


def _kendall(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The share of pairs in the same order in both; ties in either are left out."""
    products = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    decided = [product for product in products if product != 0]
    return sum(product > 0 for product in decided) / len(decided) if decided else None


def memory(rows: Sequence[tuple[str, str, TrialRow]]) -> str | None:
    """Peak memory of each pipeline rank; `rows` are (name, style, trial), such as baseline and best.

    A pipeline rank's is the highest of its processes, which lie together in Megatron's order of ranks.
    """
    peaks = {name: stages for name, _, row in rows if (stages := stage_peaks(row))}
    count = max(map(len, peaks.values()), default=0)
    if not count:
        return None
    highest = max(map(max, peaks.values()))
    unit, unit_name = (2.0**30, "GiB") if highest >= 2**30 else (2.0**20, "MiB")
    top, bottom = 30.0, 250.0
    y = Scale(low=0.0, high=1.1 * (highest / unit), start=bottom, end=top)
    slot = (HALF - 80) / count
    wide = min(slot * 0.76 / max(len(peaks), 1), 46.0)
    parts = [y_axis(y, 70, right=HALF - 4, words=f"peak memory, {unit_name}")]
    for stage in range(count):
        middle = 74 + slot * (stage + 0.5)
        if count <= 16 or stage % -(-count // 16) == 0:
            parts.append(text(middle, bottom + 16, str(stage), cls="tick", anchor="middle"))
        for index, (name, style, _) in enumerate(row for row in rows if row[0] in peaks):
            if stage >= len(peaks[name]):
                continue
            peak = peaks[name][stage]
            x = middle + wide * (index - len(peaks) / 2)
            words = title(f"{name}, pipeline rank {stage}: {size(peak)}")
            box = {"x": x, "y": y(peak / unit), "width": wide * 0.92, "height": bottom - y(peak / unit)}
            parts.append(element("rect", words, **box, cls=f"bar {style}"))
    parts.append(text((74 + HALF) / 2, bottom + 34, "pipeline rank", cls="axis", anchor="middle"))
    for index, (name, style, row) in enumerate(row for row in rows if row[0] in peaks):
        parts.append(element("rect", x=80 + 190 * index, y=4, width=11, height=11, cls=f"bar {style}"))
        parts.append(text(96 + 190 * index, 14, name, cls="label"))
        predicted = row.predicted_memory_bytes
        if predicted:
            level = y(predicted / unit)
            words = title(f"{name}: {size(predicted)} predicted")
            parts.append(element("line", words, x1=74, x2=HALF - 4, y1=level, y2=level, cls="reference"))
    return drawing(HALF, bottom + 44, *parts, label="Peak memory of each pipeline rank")


def stage_peaks(row: TrialRow) -> list[int]:
    """The highest memory on each pipeline rank in bytes; empty where it is not known."""
    if row.plan is None or not row.ranks:
        return []
    num_ranks, num_stages = len(row.ranks), row.plan.layout.pipeline_parallel
    if num_ranks != row.plan.made_for.world_size or num_stages > _MAX_STAGES:
        return []
    width = num_ranks // num_stages
    ordered = [rank.peak_bytes for rank in sorted(row.ranks, key=lambda rank: rank.rank)]
    peaks = [max(ordered[first : first + width]) for first in range(0, num_ranks, width)]
    # Some kernels do not count them.
    return peaks if any(peaks) else []


def legend_of(row: TrialRow) -> str:
    """A trial's name in a legend."""
    return "your command" if row.number == 0 else f"trial {row.number}, class {class_of(row)}"
