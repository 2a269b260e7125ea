"""Times of actions: one entry an action, relative to the step's begin, waiting apart."""

from collections.abc import Iterator

import pytest

from quartet_plugin.runtime.records import ActionTime, HostClock, NullRecorder, Recorder


def ticking(*moments: float) -> HostClock:
    at: Iterator[float] = iter(moments)
    return HostClock(now=lambda: next(at))


def test_start_end_and_waiting_of_every_action() -> None:
    recorder = Recorder(ticking(10.0, 11.0, 13.0, 14.0, 14.5, 16.0))
    recorder.begin()
    recorder.waits()
    recorder.starts()
    recorder.ends()
    recorder.starts()
    recorder.ends()
    assert recorder.times() == [
        ActionTime(start_s=3.0, end_s=4.0, waiting_s=2.0),
        ActionTime(start_s=4.5, end_s=6.0, waiting_s=0.0),
    ]


def test_two_waits_before_an_action_are_one() -> None:
    recorder = Recorder(ticking(0.0, 1.0, 5.0, 6.0))
    recorder.begin()
    recorder.waits()
    recorder.waits()
    recorder.starts()
    recorder.ends()
    assert recorder.times()[0].waiting_s == pytest.approx(4.0)


def test_only_the_last_steps_are_kept_and_an_unfinished_action_is_left_out() -> None:
    recorder = Recorder(keep=2)
    for _ in range(3):
        recorder.begin()
        recorder.starts()
        recorder.ends()
    recorder.begin()
    recorder.starts()
    assert recorder.num_steps == 2
    assert recorder.times(-1) == []
    assert len(recorder.times(-2)) == 1
    assert recorder.begin_at(0) <= recorder.begin_at(1)


def test_null_recorder_keeps_nothing() -> None:
    recorder = NullRecorder()
    recorder.begin()
    recorder.starts()
    recorder.ends()
    assert recorder.num_steps == 0
