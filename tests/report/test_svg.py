"""Drawing functions: scales, ticks, escaped text, and figures that hold their numbers."""

import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quartet_plugin.report import figures
from quartet_plugin.report.formatting import clean, duration, rate, size, time_of
from quartet_plugin.report.gantt import MAX_ACTIONS, timeline
from quartet_plugin.report.svg import Scale, drawing, element, rectangles, text
from quartet_plugin.schedule.simulate import simulate
from tests.report.histories import GIB, INTERLEAVED, history, row
from tests.schedule.orders import one_f_one_b, schedule_of, unit_costs, v_schedule

SVG = "{http://www.w3.org/2000/svg}"
FINITE = st.floats(min_value=1e-6, max_value=1e6)


def parsed(markup: str | None) -> ElementTree.Element:
    assert markup is not None
    return ElementTree.fromstring(markup)


@settings(deadline=None)
@given(st.lists(FINITE, min_size=1, max_size=20), st.booleans())
def test_a_scale_holds_its_values_in_order(values: list[float], is_log: bool) -> None:
    scale = Scale.over(values, start=10, end=110, is_log=is_log)
    pixels = [scale(value) for value in sorted(values)]
    assert pixels == sorted(pixels)
    assert all(10 <= pixel <= 110 for pixel in pixels)


@settings(deadline=None)
@example(low=955346.0, high=1e-6, is_log=True)
@given(low=FINITE, high=FINITE, is_log=st.booleans())
def test_ticks_are_inside_and_round(low: float, high: float, is_log: bool) -> None:
    scale = Scale.over([low, high], start=0, end=100, is_log=is_log)
    ticks = scale.ticks()
    assert len(ticks) <= 40
    margin = 1e-6 * max(abs(scale.high), abs(scale.low))
    assert all(scale.low - margin <= tick <= scale.high + margin for tick in ticks)
    assert ticks == sorted(ticks)


def test_a_scale_of_one_value_or_none_is_a_scale() -> None:
    assert Scale.over([5.0], start=0, end=10)(5.0) == pytest.approx(5.0)
    assert 0 <= Scale.over([], start=0, end=10)(0.5) <= 10
    assert 0 <= Scale.over([math.inf, 1.0], start=0, end=10)(1.0) <= 10


def test_text_and_attributes_cannot_be_left() -> None:
    markup = drawing(
        10, 10, text(1, 2, "</text><script>"), element("g", title='"><x', cls="a b"), label='"&<'
    )
    root = parsed(markup)
    assert [child.tag for child in root] == [f"{SVG}text", f"{SVG}g"]
    assert root[0].text == "</text><script>"


def test_many_boxes_are_one_path() -> None:
    assert rectangles([(1, 2, 3, 4), (5.5, 6, 1, 1)]) == "M1 2h3v4h-3zM5.5 6h1v1h-1z"


def test_the_history_has_a_mark_for_every_trial() -> None:
    root = parsed(figures.progress(history()))
    marks = [
        e
        for e in root.iter()
        if e.tag in (f"{SVG}circle", f"{SVG}path") and e.find(f"{SVG}title") is not None
    ]
    assert len(marks) == 8
    checks = [mark for mark in marks if mark.get("class") == "drift"]
    assert [mark.findtext(f"{SVG}title") for mark in checks] == ["your command again after 4 trials: 0.96x"]
    best = [mark for mark in marks if "top" in (mark.get("class") or "").split()]
    assert len(best) == 1
    assert "trial 2" in (best[0].findtext(f"{SVG}title") or "")
    crosses = [mark for mark in marks if mark.get("class") == "cross"]
    assert ["OutOfMemory" in (mark.findtext(f"{SVG}title") or "") for mark in crosses] == [True, False]


def test_memory_is_the_highest_of_each_pipeline_rank() -> None:
    assert figures.stage_peaks(row(0, 0.5)) == [2 * GIB, 3 * GIB]
    flat = row(0, 0.5)
    assert flat.plan is not None
    wide = replace(flat.plan, layout=replace(flat.plan.layout, pipeline_parallel=1, data_parallel=2),
                   split=replace(flat.plan.split, transformer_layers_per_stage=(8,)),
                   schedule=replace(flat.plan.schedule, name="no-pipelining"))  # fmt: skip
    assert figures.stage_peaks(replace(flat, plan=wide)) == [3 * GIB]
    assert figures.stage_peaks(replace(flat, ranks=flat.ranks[:1])) == []
    bars = parsed(figures.memory([("own", "baseline", row(0, 0.5)), ("best", "won", row(2, 0.4))]))
    heights = [
        float(e.get("height") or 0) for e in bars.iter(f"{SVG}rect") if e.find(f"{SVG}title") is not None
    ]
    assert len(heights) == 4
    assert heights[2] / heights[0] == pytest.approx(1.5, rel=0.01)


def test_predictions_are_judged() -> None:
    words = figures.prediction_words(history())
    assert words == "3 plans; median error 10 %; 100 % of all pairs of plans in the right order"
    assert figures.predicted_measured(history(trials=())) is None


def test_shares_are_drawn_to_scale() -> None:
    bars = list(parsed(figures.importance({"a": 0.75, "b": 0.25})).iter(f"{SVG}rect"))
    widths = [float(bar.get("width") or 0) for bar in bars]
    assert widths[0] / widths[1] == pytest.approx(3.0, rel=0.01)
    assert figures.importance({}) is None


def test_a_timeline_has_every_action_once() -> None:
    schedule = v_schedule()
    simulation = simulate(schedule, unit_costs(schedule))
    root = parsed(timeline(schedule, simulation, label="v"))
    drawn = sum((e.get("d") or "").count("M") for e in root.iter(f"{SVG}path") if e.get("class") == "action")
    assert drawn == sum(len(order) for order in schedule.orders)
    labels = [e.text for e in root.iter(f"{SVG}text") if (e.get("class") or "").startswith("on-")]
    assert len(labels) == drawn


def test_a_timeline_that_is_too_long_is_left_out() -> None:
    count = MAX_ACTIONS // 8 + 1
    schedule = schedule_of(one_f_one_b(4, count), count)
    assert timeline(schedule, simulate(schedule, unit_costs(schedule)), label="long") is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (duration(59.4), "59 s"),
        (duration(3661), "1 h 01 min"),
        (size(1536), "1.50 KiB"),
        (size(3 * GIB), "3 GiB"),
        (rate(4.31e10), "43.1 GFLOP/s"),
        (time_of(0.0125), "12.5 ms"),
        (clean("a\x1b[31m\n b\u202e"), "a [31m b"),
        (clean("x" * 600), "x" * 497 + "..."),
    ],
)
def test_words(words: str, expected: str) -> None:
    assert words == expected


def test_numbers_in_drawings_are_short() -> None:
    markup = figures.progress(history()) or ""
    assert not re.search(r"\d\.\d{4}", re.sub(r"<title>.*?</title>", "", markup))
    assert INTERLEAVED.layout.virtual_stages == 2
