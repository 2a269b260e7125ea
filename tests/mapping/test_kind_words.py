"""Words of kinds: those of all permutations that no renaming of replicas makes less, in order."""

from itertools import batched, chain, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.mapping.kind_words import KindWords


def least_renamed(word: tuple[int, ...], stages: int, width: int, *, is_sorted: bool) -> tuple[int, ...]:
    """The least word that differs only in the names of replicas."""
    groups = list(batched(batched(word, stages), width))
    if is_sorted:
        groups = [tuple(sorted(group)) for group in groups]
    return tuple(chain.from_iterable(chain.from_iterable(sorted(groups))))


SHAPES = [
    (stages, width, groups)
    for stages, width, groups in product(range(1, 5), repeat=3)
    if stages * width * groups <= 6
]


@st.composite
def arrangements(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Kinds of up to six blocks, the stages of a column, and the columns of a group."""
    stages, width, groups = draw(st.sampled_from(SHAPES))
    size = stages * width * groups
    return draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)), stages, width


@settings(max_examples=100, deadline=None)
@given(arrangements(), st.booleans())
def test_every_word_is_there_once_and_in_order(
    arrangement: tuple[list[int], int, int], is_sorted: bool
) -> None:
    kinds, stages, width = arrangement
    counts = [kinds.count(kind) for kind in range(4)]
    every = list(KindWords(counts, stages=stages, width=width, is_sorted=is_sorted))
    words = [word for word in every if word is not None]
    assert words == sorted(
        {least_renamed(word, stages, width, is_sorted=is_sorted) for word in set(permutations(kinds))}
    )
    if width == 1 or not is_sorted:
        # A dead end is found within the group where it begins.
        assert len(every) - len(words) <= len(kinds) * len(words)


@pytest.mark.parametrize(
    ("counts", "width", "is_sorted"),
    [([1] * 40, 1, True), ([8] * 128, 1, True), ([8] * 128, 1024, True), ([1] * 40, 1, False)],
)
def test_one_word_has_no_dead_ends(counts: list[int], width: int, is_sorted: bool) -> None:
    ascending = tuple(kind for kind, count in enumerate(counts) for _ in range(count))
    assert list(KindWords(counts, stages=1, width=width, is_sorted=is_sorted)) == [ascending]
