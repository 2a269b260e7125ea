"""Text of others on a terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_plugin.model.printable import MAX_LINE, printable

ACTS = [*map(chr, (*range(32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)))]


@pytest.mark.parametrize("char", [*ACTS, "\u2028", "\u2029", "\u200e", "\ud800"])
def test_a_character_that_a_terminal_acts_on_is_shown_as_python_writes_it(char: str) -> None:
    assert printable(f"a{char}b") == f"a{ascii(char)[1:-1]}b"


@pytest.mark.parametrize("text", ["", "plain words", "Grüße, 東京 █▉ µs", "a  b"])
def test_printable_text_stays(text: str) -> None:
    assert printable(text) == text


def test_the_middle_of_a_long_text_is_left_out_and_its_length_said() -> None:
    line = printable("/" + "a" * 10_000 + ": cannot be read: no such file")
    assert len(line) <= MAX_LINE
    assert "... (10,031 characters) ..." in line
    assert line.startswith("/aaa")
    assert line.endswith("aaa: cannot be read: no such file")


@given(text=st.text(), times=st.integers(1, 400))
def test_every_line_is_printable_and_short(text: str, times: int) -> None:
    line = printable(text * times)
    assert line.isprintable()
    assert len(line) <= MAX_LINE
