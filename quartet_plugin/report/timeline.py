"""A schedule's picture: devices down, time across, one colour a kind, one shade a chunk, gaps for waiting.

The parts of an overlapped pair lie one above the other.
"""

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.errors import ConfigError, UsageError
from quartet_plugin.report.contrast import BLACK, WHITE, Colour, contrast
from quartet_plugin.report.formatting import bubble_words, microbatch_words
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.placement import chunk_of_stage
from quartet_plugin.schedule.schedule import Schedule, marked_parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from quartet_plugin.schedule.simulate import Simulation

FloatArray = NDArray[np.float64]

KIND_COLOURS: dict[ActionKind, Colour] = {
    ActionKind.F: (0.16, 0.42, 0.71),
    ActionKind.I: (0.90, 0.53, 0.08),
    ActionKind.W: (0.18, 0.58, 0.34),
    ActionKind.B: (0.72, 0.22, 0.32),
}
KIND_NAMES = {
    ActionKind.F: "forward",
    ActionKind.I: "input gradient",
    ActionKind.W: "weight gradient",
    ActionKind.B: "backward",
}
WAITING_COLOUR: Colour = (0.90, 0.90, 0.91)

_DPI = 150
_MARGINS_INCHES = (1.1, 0.8)  # left: device names; right: how busy they are
_HEAD_INCHES = 0.72
_AXIS_INCHES = 0.5
_BAND_INCHES = (9.0, 15.0)
_ONE_BAND_INCHES = 16.0
_MAX_BANDS = 6
_MAX_ROWS = 48  # of all bands together
_ROW_INCHES = (0.12, 0.38)
_ACTION_INCHES = 0.13
_FONT_POINTS = (4.6, 7.0)
_DIGIT_WIDTH = 0.64  # of the font's size, for the numbers in the bars
_BAR = 0.86
_MAX_LABELS = 6_000
_SEAM_PIXELS = 5.0  # narrower bars would be mostly the white line between them
_MAX_TICKS = 40
_MAX_CHUNKS_SHOWN = 4
_LIGHTEST = 0.58
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bars:
    """Every action of every device as a bar, all arrays [num_actions]; times in the unit of the axis.

    `half` says which half of its row a part of a pair has: 1 the upper, 2 the lower, 0 for whole bars.
    """

    device: NDArray[np.int64]
    start: FloatArray
    end: FloatArray
    kind: NDArray[np.int64]
    chunk: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    half: NDArray[np.uint8]

    @property
    def middle(self) -> FloatArray:
        """Where the bars stand across the rows."""
        return self.device + np.array([0.0, -0.25, 0.25])[self.half] * _BAR

    @property
    def height(self) -> FloatArray:
        """The bars' heights, in rows."""
        return np.where(self.half > 0, _BAR / 2, _BAR)


def timeline_png(
    schedule: Schedule, simulation: "Simulation", *, title: str = "", unit_times: bool = False
) -> bytes:
    """The picture of `schedule` at the times of `simulation`, as the bytes of a PNG.

    `unit_times` says that the times are in units, not seconds. Microbatch numbers are written where they
    fit; a long schedule is cut into bands, one below the other. Raises UsageError where matplotlib is not
    installed, ConfigError for a schedule without actions.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "--format png needs matplotlib, which is not installed; pip install 'quartet-plugin[plots]'"
        ) from error
    scale, unit = (1.0, "units of a device's forward") if unit_times else _unit(simulation.makespan_s)
    bars = _bars(schedule, simulation, scale)
    if not len(bars.start) or simulation.makespan_s <= 0:
        raise ConfigError("the schedule takes no time, so there is nothing to draw; add actions and costs")
    page = _Page.of(bars, num_devices=schedule.num_devices, makespan_units=simulation.makespan_s / scale)
    figure = Figure(figsize=page.inches, dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    for band in range(page.num_bands):
        axes = figure.add_axes(page.rectangle(band))
        axes.set_xlim(page.span * band, page.span * (band + 1))
        axes.set_ylim(schedule.num_devices - 0.45, -0.55)
        _draw_bars(axes, bars, page)
        _label_bars(axes, bars, page)
        _label_axes(axes, schedule)
        if band == 0:
            _head(axes, bars, _title(schedule, simulation, title, scale, "" if unit_times else unit))
            _note_busy(axes, schedule, simulation)
    axes.set_xlabel(f"time ({unit})", fontsize=8, labelpad=2)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": "quartet"})
    return buffer.getvalue()


def shade(kind: ActionKind, chunk: int, *, num_chunks: int) -> Colour:
    """The colour of a kind, mixed with white the more the later the chunk."""
    mixed = _LIGHTEST * chunk / max(num_chunks - 1, 1)
    red, green, blue = KIND_COLOURS[kind]
    return red + (1 - red) * mixed, green + (1 - green) * mixed, blue + (1 - blue) * mixed


def legend_colours(kind: ActionKind, num_chunks: int) -> list[Colour]:
    """The colours of a kind in a legend: each chunk's, or the first and the last of many."""
    shown = range(num_chunks) if num_chunks <= _MAX_CHUNKS_SHOWN else (0, num_chunks - 1)
    return [shade(kind, chunk, num_chunks=num_chunks) for chunk in shown]


def chunk_words(num_chunks: int) -> str:
    """The meaning of a kind's shades in a legend."""
    return f"dark to light: chunk 0 to {num_chunks - 1}"


def is_dark(colour: Colour) -> bool:
    """Whether white text is easier to read on the colour than black; the better has a contrast of 4.58."""
    return contrast(colour, WHITE) >= contrast(colour, BLACK)


def _unit(makespan_s: float) -> tuple[float, str]:
    return next((unit for unit in UNITS if makespan_s >= unit[0]), UNITS[-1])


def _bars(schedule: Schedule, simulation: "Simulation", scale: float) -> _Bars:
    codes = np.concatenate(schedule.orders)
    stage, microbatch = np.divmod(codes >> 2, schedule.num_microbatches)
    routes = schedule.routes or (schedule.placement,)
    # The second copy of a two-copy schedule is shaded as further chunks of its devices.
    per_copy = schedule.num_stages // schedule.num_devices
    chunks = np.stack([chunk_of_stage(route) + copy * per_copy for copy, route in enumerate(routes)])
    route = np.asarray(schedule.route_of_microbatch or [0] * schedule.num_microbatches, dtype=np.int64)
    return _Bars(
        device=np.repeat(np.arange(schedule.num_devices), [len(order) for order in schedule.orders]),
        start=np.concatenate(simulation.start_s) / scale,
        end=np.concatenate(simulation.end_s) / scale,
        kind=codes & 3,
        chunk=chunks[route[microbatch], stage],
        microbatch=microbatch,
        half=marked_parts(schedule) if schedule.pairs else np.zeros(len(codes), dtype=np.uint8),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """Where everything goes; a long schedule is cut into bands, one below the other, to stay readable.

    `span` is the time a band shows, `width` and `row` are inches of a band and of one device's row.
    """

    num_bands: int
    num_devices: int
    makespan_units: float
    width: float
    row: float
    typical: float

    @classmethod
    def of(cls, bars: _Bars, *, num_devices: int, makespan_units: float) -> "_Page":
        lengths = bars.end - bars.start
        # A short action should still hold its number; actions without cost do not count.
        typical = float(np.percentile(lengths[lengths > 0], 25)) if (lengths > 0).any() else makespan_units
        wanted = _ACTION_INCHES * makespan_units / typical
        bands = 1 if wanted <= _ONE_BAND_INCHES else math.ceil(wanted / _BAND_INCHES[1])
        bands = max(1, min(bands, _MAX_BANDS, _MAX_ROWS // num_devices))
        return cls(
            num_bands=bands,
            num_devices=num_devices,
            makespan_units=makespan_units,
            width=float(np.clip(wanted / bands, _BAND_INCHES[0], _ONE_BAND_INCHES)),
            row=float(np.clip(12.0 / num_devices, *_ROW_INCHES)),
            typical=typical,
        )

    @property
    def span(self) -> float:
        return self.makespan_units / self.num_bands

    @property
    def inches(self) -> tuple[float, float]:
        height = _HEAD_INCHES + self.num_bands * (self.row * self.num_devices + _AXIS_INCHES)
        return self.width + sum(_MARGINS_INCHES), height

    @property
    def pixels_per_time(self) -> float:
        return self.width * _DPI / self.span

    def rectangle(self, band: int) -> tuple[float, float, float, float]:
        """Left, bottom, width and height of a band, in fractions of the page."""
        width, height = self.inches
        rows = self.row * self.num_devices
        top = _HEAD_INCHES + band * (rows + _AXIS_INCHES)
        return _MARGINS_INCHES[0] / width, 1 - (top + rows) / height, self.width / width, rows / height


def _draw_bars(axes: "Axes", bars: _Bars, page: _Page) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Rectangle

    for row in range(page.num_devices):
        corner = (0, row - _BAR / 2)
        axes.add_patch(
            Rectangle(corner, page.makespan_units, _BAR, facecolor=WAITING_COLOUR, edgecolor="none")
        )
    left, right = axes.get_xlim()
    shown = (bars.end > left) & (bars.start < right)
    start, end, height = bars.start[shown], bars.end[shown], bars.height[shown]
    low, high = bars.middle[shown] - height / 2, bars.middle[shown] + height / 2
    sides = ((start, low), (end, low), (end, high), (start, high))
    corners = np.stack([np.stack([x, y], axis=-1) for x, y in sides], axis=1)
    count = int(bars.chunk.max()) + 1
    palette = np.array(
        [[shade(kind, chunk, num_chunks=count) for chunk in range(count)] for kind in ActionKind]
    )
    seam = page.typical * page.pixels_per_time >= _SEAM_PIXELS
    axes.add_collection(
        PolyCollection(
            list(corners),
            facecolors=palette[bars.kind[shown], bars.chunk[shown]],
            edgecolors="white" if seam else "none",
            linewidths=0.35 if seam else 0.0,
            antialiaseds=seam,
        )
    )


def _label_bars(axes: "Axes", bars: _Bars, page: _Page) -> None:
    """Write the microbatch into each bar of this band that is wide enough."""
    digits = np.char.str_len(bars.microbatch.astype(str))
    room = (bars.end - bars.start) * page.pixels_per_time - 1.5
    digit_pixels = _DIGIT_WIDTH * _DPI / 72
    wanted = (page.typical * page.pixels_per_time - 1.5) / (digits.max() * digit_pixels)
    size = min(float(np.clip(wanted, *_FONT_POINTS)), page.row * float(bars.height.min()) * 0.6 * 72)
    left, right = axes.get_xlim()
    middle = (bars.start + bars.end) / 2
    inside = (bars.start >= left - 1e-9 * right) & (bars.end <= right * (1 + 1e-9))
    fits = np.flatnonzero((room + 0.1 >= digits * size * digit_pixels) & inside)
    if size < _FONT_POINTS[0] or len(fits) > _MAX_LABELS:
        return
    count = int(bars.chunk.max()) + 1
    across = bars.middle
    for bar in fits.tolist():
        colour = shade(ActionKind(int(bars.kind[bar])), int(bars.chunk[bar]), num_chunks=count)
        axes.text(
            middle[bar],
            across[bar] + 0.03,
            str(bars.microbatch[bar]),
            ha="center",
            va="center",
            fontsize=size,
            color="white" if is_dark(colour) else "black",
            clip_on=True,
        )


def _label_axes(axes: "Axes", schedule: Schedule) -> None:
    devices = _labelled(schedule)
    axes.set_yticks(list(devices), [f"device {device}" for device in devices], fontsize=8)
    axes.tick_params(axis="x", labelsize=8, length=3)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)


def _labelled(schedule: Schedule) -> range:
    return range(0, schedule.num_devices, -(-schedule.num_devices // _MAX_TICKS))


def _note_busy(axes: "Axes", schedule: Schedule, simulation: "Simulation") -> None:
    for device in _labelled(schedule):
        busy = float(simulation.busy_s[device]) / simulation.makespan_s
        axes.annotate(
            f"{100 * busy:.0f} % busy",
            (1, device),
            xytext=(5, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color="0.35",
        )


def _head(axes: "Axes", bars: _Bars, title: str) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    count = int(bars.chunk.max()) + 1
    kinds = [kind for kind in ActionKind if (bars.kind == kind).any()]
    handles = [tuple(Patch(facecolor=colour) for colour in legend_colours(kind, count)) for kind in kinds]
    labels = [f"{kind.name} {KIND_NAMES[kind]}" for kind in kinds]
    handles.append((Patch(facecolor=WAITING_COLOUR),))
    labels.append("waiting")
    if count > 1:
        handles.append((Patch(facecolor="none"),))
        labels.append(chunk_words(count))
    axes.annotate(
        title,
        (0, 1),
        xytext=(0, 26),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=10,
        parse_math=False,
    )
    axes.legend(
        handles,
        labels,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
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
        microbatch_words(schedule.num_microbatches),
        f"makespan {simulation.makespan_s / scale:.4g} {unit}".rstrip(),
        f"bubble {bubble_words(simulation.bubble_fraction)}",
    ]
    return "   ".join(words)
