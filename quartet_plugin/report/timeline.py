"""A schedule's picture: devices down, time across, one colour a kind, one shade a chunk, gaps for waiting."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.errors import ConfigError, UsageError
from quartet_plugin.schedule.action import Kind
from quartet_plugin.schedule.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from quartet_plugin.schedule.simulate import Simulation

FloatArray = NDArray[np.float64]
Colour = tuple[float, float, float]

KIND_COLOURS: dict[Kind, Colour] = {
    Kind.F: (0.16, 0.42, 0.71),
    Kind.I: (0.90, 0.53, 0.08),
    Kind.W: (0.18, 0.58, 0.34),
    Kind.B: (0.72, 0.22, 0.32),
}
KIND_WORDS = {
    Kind.F: "F forward",
    Kind.I: "I input gradient",
    Kind.W: "W weight gradient",
    Kind.B: "B backward",
}
WAITING_COLOUR: Colour = (0.90, 0.90, 0.91)

_DPI = 150
_INCHES = (9.0, 22.0)
_ROW_INCHES = (0.12, 0.38)
_FONT_POINTS = (4.6, 7.0)
_DIGIT_WIDTH = 0.64  # of the font's size, for the numbers in the bars
_ACTION_INCHES = 0.13
_BAR = 0.86
_MAX_LABELS = 6_000
_SEAM_PIXELS = 5.0  # narrower bars would be mostly the white line between them
_MAX_TICKS = 40
_MAX_CHUNKS_SHOWN = 4
_LIGHTEST = 0.58
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bars:
    """Every action of every device as a bar, all arrays [num_actions]; times in the unit of the axis."""

    device: NDArray[np.int64]
    start: FloatArray
    end: FloatArray
    kind: NDArray[np.int64]
    chunk: NDArray[np.int64]
    microbatch: NDArray[np.int64]


def timeline_png(
    schedule: Schedule, simulation: "Simulation", *, title: str = "", unit_times: bool = False
) -> bytes:
    """The picture of `schedule` at the times of `simulation`, as the bytes of a PNG.

    `unit_times` says that the times are in units, not seconds. Microbatch numbers are written where they
    fit; wide schedules get a wider picture, up to 3600 pixels. Raises UsageError where matplotlib is not
    installed, ConfigError for a schedule without actions.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "--format png needs matplotlib, which is not installed; pip install 'quartet-plugin[plots]'"
        ) from error
    scale, unit = (1.0, "units of one forward") if unit_times else _unit(simulation.makespan_s)
    bars = _bars(schedule, simulation, scale)
    if not len(bars.start) or simulation.makespan_s <= 0:
        raise ConfigError(
            "the schedule takes no time, so there is nothing to draw; give it actions and costs"
        )
    width = float(np.clip(_ACTION_INCHES * simulation.makespan_s / scale / _typical(bars), *_INCHES))
    row = float(np.clip(12.0 / schedule.num_devices, *_ROW_INCHES))
    height = row * schedule.num_devices + 1.25
    figure = Figure(figsize=(width + 1.9, height), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((1.15 / (width + 1.9), 0.47 / height, width / (width + 1.9), 1 - 1.25 / height))
    pixels = width * _DPI / (simulation.makespan_s / scale)
    seam = _typical(bars) * pixels >= _SEAM_PIXELS
    _draw_bars(axes, bars, schedule.num_devices, simulation.makespan_s / scale, seam=seam)
    _label_bars(axes, bars, pixels=pixels, row_pixels=row * _DPI)
    _label_axes(axes, schedule, simulation, unit)
    _head(axes, bars, _title(schedule, simulation, title, scale, unit))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": "quartet"})
    return buffer.getvalue()


def shade(kind: Kind, chunk: int, *, num_chunks: int) -> Colour:
    """The colour of a kind, mixed with white the more the later the chunk."""
    mixed = _LIGHTEST * chunk / max(num_chunks - 1, 1)
    red, green, blue = KIND_COLOURS[kind]
    return red + (1 - red) * mixed, green + (1 - green) * mixed, blue + (1 - blue) * mixed


def _unit(makespan_s: float) -> tuple[float, str]:
    for scale, name in _UNITS:
        if makespan_s >= scale:
            return scale, name
    return _UNITS[-1]


def chunk_numbers(placement: Sequence[int]) -> NDArray[np.int64]:
    """Each stage's chunk: its index among the stages of its device."""
    seen: dict[int, int] = {}
    chunks = []
    for device in placement:
        chunks.append(seen.get(device, 0))
        seen[device] = chunks[-1] + 1
    return np.array(chunks, dtype=np.int64)


def _bars(schedule: Schedule, simulation: "Simulation", scale: float) -> _Bars:
    codes = np.concatenate(schedule.orders)
    stage, microbatch = np.divmod(codes >> 2, schedule.num_microbatches)
    routes = schedule.routes or (schedule.placement,)
    # The second copy of a two-copy schedule is shaded as further chunks of its devices.
    chunks = np.stack([chunk_numbers(route) + at * num_chunks(routes[:1]) for at, route in enumerate(routes)])
    route = np.asarray(schedule.route_of_microbatch or [0] * schedule.num_microbatches, dtype=np.int64)
    return _Bars(
        device=np.repeat(np.arange(schedule.num_devices), [len(order) for order in schedule.orders]),
        start=np.concatenate(simulation.start_s) / scale,
        end=np.concatenate(simulation.end_s) / scale,
        kind=codes & 3,
        chunk=chunks[route[microbatch], stage],
        microbatch=microbatch,
    )


def num_chunks(routes: Sequence[Sequence[int]]) -> int:
    """Stages a device, all copies of the model together."""
    return sum(len(route) for route in routes) // (max(routes[0]) + 1)


def _typical(bars: _Bars) -> float:
    """A short action's length that should still hold a number; actions without cost do not count."""
    lengths = bars.end - bars.start
    lengths = lengths[lengths > 0]
    return float(np.percentile(lengths, 25)) if len(lengths) else 1.0


def _draw_bars(axes: "Axes", bars: _Bars, num_devices: int, makespan: float, *, seam: bool) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Rectangle

    for device in range(num_devices):
        axes.add_patch(
            Rectangle((0, device - _BAR / 2), makespan, _BAR, facecolor=WAITING_COLOUR, edgecolor="none")
        )
    low, high = bars.device - _BAR / 2, bars.device + _BAR / 2
    corners = np.stack(
        [
            np.stack([x, y], axis=-1)
            for x, y in ((bars.start, low), (bars.end, low), (bars.end, high), (bars.start, high))
        ],
        axis=1,
    )
    count = int(bars.chunk.max()) + 1
    palette = np.array([[shade(kind, chunk, num_chunks=count) for chunk in range(count)] for kind in Kind])
    colours = palette[bars.kind, bars.chunk]
    edges = {"edgecolors": "white", "linewidths": 0.35} if seam else {"linewidths": 0}
    axes.add_collection(PolyCollection(list(corners), facecolors=colours, **edges))
    axes.set_xlim(0, makespan)
    axes.set_ylim(num_devices - 0.45, -0.55)


def _label_bars(axes: "Axes", bars: _Bars, *, pixels: float, row_pixels: float) -> None:
    """Write the microbatch into each bar that is wide enough; `pixels` is per unit of time."""
    digits = np.char.str_len(bars.microbatch.astype(str))
    room = (bars.end - bars.start) * pixels - 1.5
    digit_pixels = _DIGIT_WIDTH * _DPI / 72
    wanted = _typical(bars) * pixels / (digits.max() * digit_pixels)
    size = min(float(np.clip(wanted, *_FONT_POINTS)), row_pixels * _BAR * 0.6 * 72 / _DPI)
    fits = np.flatnonzero(room >= digits * size * digit_pixels)
    if size < _FONT_POINTS[0] or len(fits) > _MAX_LABELS:
        return
    count = int(bars.chunk.max()) + 1
    for at in fits.tolist():
        red, green, blue = shade(Kind(int(bars.kind[at])), int(bars.chunk[at]), num_chunks=count)
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.58
        axes.text(
            (bars.start[at] + bars.end[at]) / 2,
            bars.device[at] + 0.03,
            str(bars.microbatch[at]),
            ha="center",
            va="center",
            fontsize=size,
            color="white" if dark else "black",
            clip_on=True,
        )


def _label_axes(axes: "Axes", schedule: Schedule, simulation: "Simulation", unit: str) -> None:
    devices = range(0, schedule.num_devices, -(-schedule.num_devices // _MAX_TICKS))
    axes.set_yticks(list(devices), [f"device {device}" for device in devices], fontsize=8)
    axes.set_xlabel(f"time ({unit})", fontsize=8, labelpad=2)
    axes.tick_params(axis="x", labelsize=8, length=3)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    for device in devices:
        busy = float(simulation.busy_s[device]) / simulation.makespan_s
        note = f"{100 * busy:.0f} % busy"
        axes.annotate(
            note,
            (1, device),
            xytext=(5, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color="0.35",
        )


def _head(axes: "Axes", bars: _Bars, title: str) -> None:
    from matplotlib.patches import Patch

    count = int(bars.chunk.max()) + 1
    kinds = [kind for kind in Kind if (bars.kind == kind).any()]
    handles = [Patch(facecolor=KIND_COLOURS[kind], label=KIND_WORDS[kind]) for kind in kinds]
    handles.append(Patch(facecolor=WAITING_COLOUR, label="waiting"))
    if count > 1:
        shown = range(count) if count <= _MAX_CHUNKS_SHOWN else (0, count - 1)
        for chunk in shown:
            colour = shade(kinds[0], chunk, num_chunks=count)
            handles.append(Patch(facecolor=colour, label=f"chunk {chunk}"))
    axes.annotate(
        title, (0, 1), xytext=(0, 26), xycoords="axes fraction", textcoords="offset points", fontsize=10
    )
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        handlelength=1.2,
        handletextpad=0.5,
        columnspacing=1.4,
        borderaxespad=0.2,
        borderpad=0.2,
    )


def _title(schedule: Schedule, simulation: "Simulation", title: str, scale: float, unit: str) -> str:
    words = [
        title or "schedule",
        f"{schedule.num_devices} devices, {schedule.num_stages} stages",
        f"{schedule.num_microbatches} microbatches",
        f"makespan {simulation.makespan_s / scale:.4g} {unit}",
        f"bubble {100 * simulation.bubble_fraction:.1f} %",
    ]
    return "   ".join(words)
