"""A schedule's timeline for the report: drawn as SVG, one path a kind and chunk, so that thousands fit."""

from collections import defaultdict
from typing import TYPE_CHECKING

from quartet_plugin.report.contrast import Colour
from quartet_plugin.report.formatting import bubble_words, time_of
from quartet_plugin.report.svg import Scale, drawing, element, rectangles, text, x_axis
from quartet_plugin.report.timeline import (
    KIND_NAMES,
    UNITS,
    chunk_words,
    is_dark,
    legend_colours,
    shade,
)
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.placement import chunk_of_stage
from quartet_plugin.schedule.schedule import Schedule

if TYPE_CHECKING:
    from quartet_plugin.schedule.simulate import Simulation

MAX_ACTIONS = 12_000
MAX_DEVICES = 64
_WIDTH = 1080.0
_LEFT, _RIGHT = 82.0, 1000.0
_MAX_LABELS = 1_500
_DIGIT_PIXELS = 5.4

Box = tuple[float, float, float, float]


def timeline(schedule: Schedule, simulation: "Simulation", *, label: str, span_s: float = 0.0) -> str | None:
    """Devices as rows, time across, gaps for idle time; None if the step is too large to draw or empty.

    The width stands for `span_s` seconds, at least the makespan, so that several drawings have one scale.
    """
    num_actions = sum(len(order) for order in schedule.orders)
    span_s = max(span_s, simulation.makespan_s)
    if not 0 < num_actions <= MAX_ACTIONS or schedule.num_devices > MAX_DEVICES or span_s <= 0:
        return None
    scale, unit = next((pair for pair in UNITS if span_s >= pair[0]), UNITS[-1])
    x = Scale(low=0.0, high=span_s / scale, start=_LEFT, end=_RIGHT)
    row = min(30.0, max(12.0, 560.0 / schedule.num_devices))
    top = 34.0
    bottom = top + row * schedule.num_devices
    chunks = chunk_of_stage(schedule.placement)
    num_chunks = int(max(chunks)) + 1
    boxes: dict[tuple[ActionKind, int], list[Box]] = defaultdict(list)
    labels: list[tuple[float, float, str, bool]] = []
    for device in range(schedule.num_devices):
        y = top + row * device
        starts, ends = simulation.start_s[device].tolist(), simulation.end_s[device].tolist()
        for action, start, end in zip(schedule.actions(device), starts, ends, strict=True):
            left, right = x(start / scale), x(end / scale)
            chunk = int(chunks[action.stage])
            boxes[action.kind, chunk].append((left, y + 1.5, max(right - left, 0.2), row - 3))
            if right - left >= _DIGIT_PIXELS * len(str(action.microbatch)) + 3:
                dark = is_dark(shade(action.kind, chunk, num_chunks=num_chunks))
                labels.append(((left + right) / 2, y + row / 2 + 3, str(action.microbatch), dark))
    end = x(simulation.makespan_s / scale)
    lanes = [(_LEFT, top + row * y + 1.5, end - _LEFT, row - 3) for y in range(schedule.num_devices)]
    parts = [element("path", d=rectangles(lanes), cls="idle")]
    for (kind, chunk), drawn in sorted(boxes.items()):
        colour = _hex(shade(kind, chunk, num_chunks=num_chunks))
        parts.append(element("path", d=rectangles(drawn), fill=colour, cls="action"))
    if len(labels) <= _MAX_LABELS and row >= 14:
        parts += [
            text(x, y, words, cls="on-dark" if dark else "on-light", anchor="middle")
            for x, y, words, dark in labels
        ]
    parts += _rows(schedule, simulation, top=top, row=row)
    parts.append(_legend(boxes, num_chunks))
    parts.append(x_axis(x, bottom + 2, top=bottom, words=f"time in the step, {unit}", count=10))
    return drawing(_WIDTH, bottom + 42, *parts, label=label)


def step_words(step_s: float, *, bubble_fraction: float) -> str:
    """A step's seconds and its bubble, for a caption."""
    return f"{time_of(step_s)} a step, bubble {bubble_words(bubble_fraction)}"


def _rows(schedule: Schedule, simulation: "Simulation", *, top: float, row: float) -> list[str]:
    parts = []
    every = max(1, -(-12 // int(row)))
    for device in range(0, schedule.num_devices, every):
        y = top + row * (device + 0.5) + 4
        busy = float(simulation.busy_s[device]) / simulation.makespan_s
        parts.append(text(_LEFT - 8, y, f"device {device}", cls="label", anchor="end"))
        parts.append(text(_RIGHT + 8, y, f"{100 * busy:.0f} % busy", cls="tick"))
    return parts


def _legend(boxes: dict[tuple[ActionKind, int], list[Box]], num_chunks: int) -> str:
    parts, x = [], _LEFT
    kinds = sorted({kind for kind, _ in boxes})
    for kind in kinds:
        for colour in legend_colours(kind, num_chunks):
            parts.append(element("rect", x=x, y=8.0, width=12, height=12, fill=_hex(colour)))
            x += 12
        words = f"{kind.name} {KIND_NAMES[kind]}"
        parts.append(text(x + 5, 18, words, cls="label"))
        x += 22 + 6.6 * len(words)
    parts.append(element("rect", x=x, y=8.0, width=12, height=12, cls="idle"))
    parts.append(text(x + 17, 18, "waiting", cls="label"))
    if num_chunks > 1:
        parts.append(text(x + 92, 18, chunk_words(num_chunks), cls="label"))
    return "".join(parts)


def _hex(colour: Colour) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)
