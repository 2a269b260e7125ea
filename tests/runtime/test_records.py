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


def test_only_the_last_step_is_kept_and_an_unfinished_action_is_left_out() -> None:
    recorder = Recorder()
    begins = []
    for _ in range(3):
        recorder.begin()
        begins.append(recorder.begin_at())
        recorder.starts()
        recorder.ends()
    assert len(recorder.times()) == 1
    recorder.begin()
    recorder.starts()
    assert recorder.times() == []
    assert 0 < begins[0] <= begins[1] <= begins[2] <= recorder.begin_at()


def test_a_step_begins_when_its_device_gets_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step was enqueued at 1000; the device began it, by its own clock, 15 s before it was read."""
    moments = iter([1000.0, 1030.0])
    monkeypatch.setattr("quartet_plugin.runtime.records.time.time", lambda: next(moments))
    recorder = Recorder(ticking(105.0, 120.0))
    next(moments)
    recorder.begin()
    recorder.clock_offset_s = -2.0
    assert recorder.begin_at() == 1013.0
    assert NullRecorder().begin_at() == 0.0


def test_null_recorder_keeps_nothing() -> None:
    recorder = NullRecorder()
    recorder.begin()
    recorder.starts()
    recorder.ends()
    assert recorder.times() == []
