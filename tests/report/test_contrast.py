"""The report's letters can be read: 4.5 to 1 on every ground that they stand on, in light, dark and print."""

import itertools
import math
import re

import pytest

from quartet_plugin.report.contrast import BLACK, WHITE, Colour, contrast
from quartet_plugin.report.style import STYLE
from quartet_plugin.report.timeline import KIND_COLOURS, is_dark, shade
from quartet_plugin.schedule.action import ActionKind

LEAST = 4.5
# More chunks than any schedule of the literature has; any colour at all is tried further below.
MANY_CHUNKS = 64
# The colours of letters with the grounds that they stand on: figures and commands lie on panels.
GROUNDS = {
    "ink": ("paper", "panel"),
    "muted": ("paper", "panel"),
    "good": ("paper",),
    "bad": ("paper",),
    "warn": ("paper",),
}
# Of drawings: SVG's `currentColor`, for lines and marks without letters.
MARKS = {"accent", "muted", "good"}


def colour_of(words: str) -> Colour:
    red, green, blue = (int(words[index : index + 2], 16) / 255 for index in (0, 2, 4))
    return red, green, blue


def themes() -> list[dict[str, Colour]]:
    """The colours of light, dark and print by name."""
    blocks = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    return [
        {name: colour_of(words) for name, words in re.findall(r"--(\w+): #(\w{6});", block)}
        for block in blocks
    ]


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast(BLACK, WHITE) == pytest.approx(21.0)
    assert contrast(WHITE, WHITE) == pytest.approx(1.0)
    # The grey of the standard's examples that is just enough on white.
    assert contrast(colour_of("767676"), WHITE) == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("theme", range(3), ids=("light", "dark", "print"))
def test_letters_can_be_read_on_their_grounds(theme: int) -> None:
    colours = themes()[theme]
    for name, grounds in GROUNDS.items():
        for ground in grounds:
            assert contrast(colours[name], colours[ground]) >= LEAST, (name, ground)


def test_the_style_has_no_other_letters_and_grounds() -> None:
    rules = re.findall(r"^ *([^@{}]+?) \{([^{}]*)\}", STYLE, re.MULTILINE)
    used: set[str] = set()
    for selector, body in rules:
        letters = re.findall(r"(?<![-\w])color: var\(--(\w+)\)", body)
        used |= set(letters)
        if selector.startswith("svg"):
            assert set(letters) <= MARKS
    assert used <= GROUNDS.keys() | MARKS
    grounds = {
        (selector.splitlines()[-1], ground)
        for selector, body in rules
        for ground in re.findall(r"background: var\(--(\w+)\)", body)
    }
    assert grounds == {("body", "paper"), (".cards div", "panel"), ("pre", "panel")}


def test_microbatches_can_be_read_on_every_shade() -> None:
    letters = {
        name: colour_of(words) for name, words in re.findall(r"svg \.on-(\w+) \{ fill: #(\w{6});", STYLE)
    }
    assert letters == {"dark": WHITE, "light": BLACK}
    for kind, num_chunks in itertools.product(ActionKind, range(1, MANY_CHUNKS + 1)):
        for chunk in range(num_chunks):
            colour = shade(kind, chunk, num_chunks=num_chunks)
            word = letters["dark" if is_dark(colour) else "light"]
            assert contrast(word, colour) >= LEAST, (kind.name, chunk, num_chunks)


def test_one_of_black_and_white_can_be_read_on_any_colour() -> None:
    parts = [index / 16 for index in range(17)]
    for colour in itertools.product(parts, parts, parts):
        assert contrast(WHITE if is_dark(colour) else BLACK, colour) >= LEAST


def test_kinds_are_told_apart_in_every_chunk() -> None:
    for num_chunks in range(1, MANY_CHUNKS + 1):
        for chunk in range(num_chunks):
            for first, second in itertools.combinations(KIND_COLOURS, 2):
                pair = [shade(kind, chunk, num_chunks=num_chunks) for kind in (first, second)]
                assert math.dist(*pair) > 0.15, (first.name, second.name, chunk, num_chunks)
