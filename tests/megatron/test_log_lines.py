"""Times from Megatron's own log line."""

import io

import pytest

from quartet_plugin.megatron.log_lines import _WatchedStream, parsed_line

LINE = (
    " [2026-08-01 10:00:00] iteration        2/      20 | consumed samples:           16 | elapsed time per "
    "iteration (ms): 144.4 | learning rate: 1.0E-04 | global batch size:     8 | lm loss: 4.847332E+00 | "
    "loss scale: 1.0 | grad norm: 1.158 | number of skipped iterations:   0 |"
)


def test_a_line_of_an_iteration_is_read() -> None:
    assert parsed_line(LINE) == pytest.approx((0.1444, 4.847332, 1.158))
    assert parsed_line(LINE.replace(" lm loss: 4.847332E+00 |", "").replace(" grad norm: 1.158 |", "")) == (
        0.1444,
        None,
        None,
    )


@pytest.mark.parametrize(
    "line", ["", "iteration 3", LINE.replace("(ms)", "(s)"), "validation loss at iteration 2"]
)
def test_other_lines_are_not(line: str) -> None:
    assert parsed_line(line) is None


def test_a_stream_is_looked_at_line_by_line_and_loses_nothing() -> None:
    seen: list[str] = []
    behind = io.StringIO()
    stream = _WatchedStream(behind, seen.append)
    for text in ("one\ntw", "o", "\n", "three"):
        assert stream.write(text) == len(text)
    assert (seen, behind.getvalue()) == (["one", "two"], "one\ntwo\nthree")
    stream.flush()
