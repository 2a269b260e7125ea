"""Enumerates the arrangements of kinds of blocks, each once, whatever numbers its replicas have.

An arrangement is a word: the kinds of its blocks, column after column. The groups of columns ascend, and so
do the columns of a group if they are interchangeable. Of all words that differ only in the numbers of
replicas, this is the least.
"""

from collections.abc import Iterator, Sequence


class KindWords:
    """The words of `counts[kind]` blocks of each kind, in columns of `stages` and groups of `width` columns.

    `is_sorted`: the columns of a group are interchangeable.
    """

    def __init__(self, counts: Sequence[int], *, stages: int, width: int, is_sorted: bool) -> None:
        self._counts, self._length = list(counts), sum(counts)
        self._group = stages * width
        # The length of the shortest part that ascends: a column, or a group.
        self._part = stages if is_sorted else self._group

    def __iter__(self) -> Iterator[tuple[int, ...] | None]:
        """All words in ascending order, and None for each dead end: a beginning that no word has."""
        free, word = list(self._counts), list[int]()
        # The first `num_known` kinds are the beginning of a word that was yielded.
        least = num_known = 0
        while True:
            if self._extend(word, free, least):
                if len(word) < self._length:
                    least = 0
                    continue
                yield tuple(word)
                num_known = self._length
            elif num_known < len(word):
                yield None
            if not word:
                return
            last = word.pop()
            free[last] += 1
            least, num_known = last + 1, min(num_known, len(word))

    def _extend(self, word: list[int], free: list[int], least: int) -> bool:
        """Append the first free kind from `least` on, if a word can have this beginning; False if not."""
        for kind in range(max(least, self._least_next(word)), len(free)):
            if free[kind]:
                free[kind] -= 1
                word.append(kind)
                if self._may_go_on(word, free):
                    return True
                # A greater kind does not help: it leaves fewer kinds for later parts, which must be greater.
                free[word.pop()] += 1
                return False
        return False

    def _least_next(self, word: list[int]) -> int:
        """The least next kind with which parts and groups ascend."""
        part, group = (len(word) // size * size for size in (self._part, self._group))
        in_group = _least_after(word, part, self._part) if part > group else 0
        return max(in_group, _least_after(word, group, self._group) if group else 0)

    def _may_go_on(self, word: list[int], free: list[int]) -> bool:
        """Whether the free kinds seem enough for later parts that are no less than the last ones.

        False only at dead ends; True at some of them.
        """
        size, last = self._part, len(word) - 1
        part, group = last // size * size, last // self._group * self._group
        in_group, later = (group + self._group - part) // size - 1, (self._length - part) // size - 1
        return _has_words(free, in_group, word[part:]) and _has_words(free, later, word[group : group + size])


def _least_after(word: list[int], start: int, size: int) -> int:
    """The least next kind with which the part from `start` on is no less than the `size` kinds before it."""
    length = len(word) - start
    before = start - size
    return word[before + length] if word[start:] == word[before : before + length] else 0


def _has_words(free: Sequence[int], number: int, least: Sequence[int]) -> bool:
    """Whether `number` words that are no less than `least` can be made of the free kinds at once."""
    left = free
    for kind in least:
        # A word whose first difference is a greater kind is greater, whatever follows.
        number -= sum(left[kind + 1 :])
        if number <= 0:
            return True
        if left[kind] < number:
            return False
        left = [*left[:kind], left[kind] - number, *[0] * (len(left) - kind - 1)]
    return True
