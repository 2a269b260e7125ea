"""A command's words: a list unchanged, or a line split by the rules of a shell, without running one."""

import shlex
from typing import Any

from quartet_plugin.model.files import shown

MAX_WORDS = 10_000
MAX_WORD = 32_768
# Words by which a shell would start another program or open a file.
_SHELL_WORDS = frozenset({"|", "||", "&", "&&", ";", ";;", ">", ">>", "<", "<<", "<<<", "2>", "2>&1", "&>"})


def words_of(value: Any) -> list[str]:
    """A command as a list of words. Raises ValueError for what no process can be started with."""
    words = split_words(value) if isinstance(value, str) else value
    if not isinstance(words, list):
        raise ValueError("a command is a list of words, or a line that is split as a shell splits words")
    for word in words:
        if not isinstance(word, str):
            raise ValueError(f"{shown(word)}: a word must be text: put it in quotes")
        if "\0" in word or len(word) > MAX_WORD:
            raise ValueError(f"{shown(word)}: a word must have at most {MAX_WORD} characters, and no NUL")
    if not words or not words[0] or len(words) > MAX_WORDS:
        raise ValueError(f"a command must have a program, and at most {MAX_WORDS} words")
    if words[0].startswith("-"):
        raise ValueError(f"{shown(words[0])}: a command begins with its program, such as torchrun")
    return words


def split_words(line: str) -> list[str]:
    """The words of a line. Raises ValueError for an open quote, and for what only a shell could do."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {error}; write a list of words") from error
    for word in words:
        if word in _SHELL_WORDS:
            raise ValueError(
                f"{word}: no shell runs the command; put it into a script, or write a list of words"
            )
    return words
