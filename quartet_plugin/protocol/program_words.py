"""Finds where the options of a program's command line end: at the first literal `--`."""

from collections.abc import Sequence


def end_of_options(words: Sequence[str]) -> int:
    """The index of the first `--`, behind which no parser finds options; all words without one."""
    return words.index("--") if "--" in words else len(words)


def with_flags(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The words with `flags` behind the last option."""
    end = end_of_options(words)
    return [*words[:end], *flags, *words[end:]]
