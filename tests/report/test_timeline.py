"""The pictures are looked at: each colour is where the schedule says, waiting is where nothing runs."""

import builtins
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quartet_plugin.errors import ConfigError, UsageError
from quartet_plugin.report.timeline import KIND_COLOURS, WAITING_COLOUR, shade, timeline_png
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import Simulation, simulate
from tests.schedule.orders import one_f_one_b, schedule_of, unit_costs, v_schedule

Pixels = NDArray[np.float64]
Colour = tuple[float, float, float]


def simulated(schedule: Schedule, *, transfer_s: float = 0.0) -> Simulation:
    return simulate(schedule, unit_costs(schedule, transfer_s=transfer_s))


def picture(schedule: Schedule, **options: Any) -> Pixels:
    """[height, width, 3], 0 to 1."""
    from matplotlib.image import imread

    content = timeline_png(schedule, simulated(schedule), **options)
    assert content.startswith(b"\x89PNG\r\n")
    return np.asarray(imread(io.BytesIO(content), format="png"), dtype=np.float64)[..., :3]


def is_colour(pixels: Pixels, colour: Colour) -> NDArray[np.bool_]:
    return np.asarray((np.abs(pixels - np.asarray(colour)) < 0.012).all(axis=-1))


def rows_of(pixels: Pixels, num_devices: int) -> list[Pixels]:
    """One line of pixels a device, near the top of its bars, above the numbers; legend left out."""
    drawn = np.zeros(pixels.shape[:2], dtype=bool)
    for colour in [*KIND_COLOURS.values(), WAITING_COLOUR]:
        drawn |= is_colour(pixels, colour)
    filled = drawn.mean(axis=1) > 0.3
    edges = np.flatnonzero(np.diff(filled.astype(int), prepend=0) == 1)
    assert len(edges) == num_devices
    return [pixels[edge + 3] for edge in edges]


def share(row: Pixels, colour: Colour) -> float:
    """Part of a device's line in this colour, of all that is not background."""
    hits = is_colour(row, colour)
    inside = np.flatnonzero(~(row > 0.97).all(axis=-1))
    return float(hits.sum() / (inside[-1] - inside[0] + 1))


def test_every_device_shows_its_actions_and_its_waiting() -> None:
    schedule = schedule_of(one_f_one_b(4, 8), 8)
    simulation = simulated(schedule)
    for device, row in enumerate(rows_of(picture(schedule), 4)):
        busy = float(simulation.busy_s[device]) / simulation.makespan_s
        assert share(row, KIND_COLOURS[ActionKind.F]) == pytest.approx(busy / 3, abs=0.03)
        assert share(row, KIND_COLOURS[ActionKind.B]) == pytest.approx(busy * 2 / 3, abs=0.03)
        assert share(row, WAITING_COLOUR) == pytest.approx(1 - busy, abs=0.03)
        assert share(row, KIND_COLOURS[ActionKind.I]) == 0
        assert share(row, KIND_COLOURS[ActionKind.W]) == 0


def test_the_waiting_is_where_nothing_runs() -> None:
    """The last device waits at first, the first device only before its backwards."""
    schedule = schedule_of(one_f_one_b(4, 8), 8)
    rows = rows_of(picture(schedule), 4)
    first = [np.flatnonzero(is_colour(row, KIND_COLOURS[ActionKind.F]))[0] for row in rows]
    assert first == sorted(first)
    for device, row in enumerate(rows):
        left = np.flatnonzero(is_colour(row, WAITING_COLOUR))[0]
        assert (left < first[device]) == (device > 0)


def test_a_split_backward_in_chunks_has_four_shades_more() -> None:
    pixels = picture(v_schedule())
    for kind in (ActionKind.F, ActionKind.I, ActionKind.W):
        for chunk in (0, 1):
            assert is_colour(pixels, shade(kind, chunk, num_chunks=2)).sum() > 500
    assert is_colour(pixels, KIND_COLOURS[ActionKind.B]).sum() == 0


def ink(pixels: Pixels) -> int:
    """White pixels between dark ones of the same bar: numbers."""
    dark = is_colour(pixels, KIND_COLOURS[ActionKind.F]) | is_colour(pixels, KIND_COLOURS[ActionKind.B])
    light = (pixels > 0.8).all(axis=-1)
    between = dark[:, :-8] & dark[:, 8:]
    return int((between & light[:, 4:-4]).sum())


def test_microbatch_numbers_are_written_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = schedule_of(one_f_one_b(2, 8), 8)
    with_numbers = ink(picture(schedule))
    hairs = picture(schedule_of(one_f_one_b(2, 2000), 2000))
    monkeypatch.setattr("quartet_plugin.report.timeline._MAX_LABELS", -1)
    assert with_numbers > ink(picture(schedule)) + 100
    assert np.array_equal(hairs, picture(schedule_of(one_f_one_b(2, 2000), 2000)))


def test_a_long_schedule_is_cut_into_bands() -> None:
    short = picture(schedule_of(one_f_one_b(2, 8), 8))
    long = picture(schedule_of(one_f_one_b(2, 120), 120))
    assert long.shape[0] > 2 * short.shape[0]
    assert max(long.shape[1], short.shape[1]) < 2900


def test_many_devices_fit() -> None:
    pixels = picture(schedule_of(one_f_one_b(64, 64), 64))
    assert pixels.shape[0] < 3000
    assert len(rows_of(pixels, 64)) == 64


def test_two_copies_are_told_apart() -> None:
    rows = [["0F0", "1F1", "1B1", "0B0"], ["0F1", "1F0", "1B0", "0B1"]]
    schedule = replace(schedule_of(rows, 2), routes=((0, 1), (1, 0)), route_of_microbatch=(0, 1))
    simulation = simulate(
        schedule,
        unit_costs(schedule),
        other_route=unit_costs(replace(schedule, placement=(1, 0))),
    )
    from matplotlib.image import imread

    pixels = np.asarray(imread(io.BytesIO(timeline_png(schedule, simulation)), format="png"))[..., :3]
    assert is_colour(pixels, shade(ActionKind.B, 0, num_chunks=2)).sum() > 500
    assert is_colour(pixels, shade(ActionKind.B, 1, num_chunks=2)).sum() > 500


def test_a_name_is_not_interpreted() -> None:
    assert picture(schedule_of(one_f_one_b(2, 4), 4), title="$\\frac{$ <b>").size > 0


def test_the_same_schedule_gives_the_same_bytes() -> None:
    schedule = schedule_of(one_f_one_b(2, 4), 4)
    simulation = simulated(schedule)
    assert timeline_png(schedule, simulation) == timeline_png(schedule, simulation)


def test_nothing_to_draw() -> None:
    schedule = schedule_of(one_f_one_b(2, 4), 4)
    still = replace(simulated(schedule), makespan_s=0.0)
    with pytest.raises(ConfigError, match="nothing to draw"):
        timeline_png(schedule, still)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **options)

    schedule = schedule_of(one_f_one_b(2, 4), 4)
    simulation = simulated(schedule)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError, match=r"quartet-plugin\[plots\]"):
        timeline_png(schedule, simulation)


def test_shades_get_lighter() -> None:
    levels = [sum(shade(ActionKind.F, chunk, num_chunks=4)) for chunk in range(4)]
    assert levels == sorted(levels)
    assert levels[0] == sum(KIND_COLOURS[ActionKind.F])
    assert levels[-1] < sum(WAITING_COLOUR)
