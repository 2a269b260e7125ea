"""Edits the words of a command with the framework's parser, which locates every given flag.

Nothing is guessed from a flag's spelling. The parser says which words are options and how many values each
takes; words it does not know, those of the script itself, stay where they are. After every edit the new
words are parsed again and compared with the intended values.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from quartet_plugin.errors import PlanError
from quartet_plugin.protocol.program_words import with_flags

AddArguments = Callable[[argparse.ArgumentParser], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """An option in a command: its words are `words[start:stop]`."""

    dest: str
    flag: str
    start: int
    stop: int


class Flags:
    """The framework's options, by destination, and the words of a command seen with them."""

    def __init__(self, add_arguments: AddArguments) -> None:
        """`add_arguments` fills a parser, as `megatron.training.arguments.add_megatron_arguments` does."""
        self._parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        add_arguments(self._parser)
        self._actions = {flag: action for action in self._parser._actions for flag in action.option_strings}
        self.defaults: dict[str, Any] = {}
        for action in self._parser._actions:
            if action.dest not in self.defaults and action.default is not argparse.SUPPRESS:
                self.defaults[action.dest] = action.default
            action.default = argparse.SUPPRESS
            action.required = False
        self.defaults.update(self._parser._defaults)
        self._parser._defaults.clear()

    def explicit_values(self, words: Sequence[str]) -> dict[str, Any]:
        """The values in the words, by destination; destinations without a flag are absent.

        Ends as the framework's own parser does (SystemExit, code 2) on a value that it refuses.
        """
        return vars(self._parser.parse_known_args(list(words))[0])

    def values(self, words: Sequence[str]) -> argparse.Namespace:
        """All values, the framework's defaults filled in."""
        return argparse.Namespace(**{**self.defaults, **self.explicit_values(words)})

    def occurrences(self, words: Sequence[str]) -> list[Occurrence]:
        """The known options among the words, in order, with the words that belong to each."""
        options = []
        start = 0
        while start < len(words) and words[start] != "--":
            word, stop = words[start], start + 1
            flag, has_value, _ = word.partition("=")
            action = self._actions.get(word) or (self._actions.get(flag) if has_value else None)
            if action is not None:
                if word in self._actions:
                    flag = word
                    stop += self._num_values(action, words[stop:])
                options.append(Occurrence(dest=action.dest, flag=flag, start=start, stop=stop))
            start = stop
        return options

    def edit(
        self, words: Sequence[str], *, remove: Set[str], append: Sequence[str]
    ) -> tuple[list[str], list[Occurrence]]:
        """The words without the options of these destinations, then `append`; and the removed options.

        Raises PlanError if the result would not parse to exactly these values: then the command cannot be
        edited safely.
        """
        removed = [item for item in self.occurrences(words) if item.dest in remove]
        dropped = {index for item in removed for index in range(item.start, item.stop)}
        kept = [word for index, word in enumerate(words) if index not in dropped]
        edited = with_flags(kept, append)
        before = {name: value for name, value in self.explicit_values(words).items() if name not in remove}
        expected = {**before, **self.explicit_values(append)}
        if self.explicit_values(edited) != expected:
            raise PlanError(
                "the command's flags cannot be edited without changing others; "
                "write each flag with its value as separate words, and no value that looks like a flag"
            )
        return edited, removed

    def flag_of(self, dest: str, value: Any = True) -> str:
        """The option that stores into `dest`; for switches the one that stores `value`."""
        for action in self._parser._actions:
            if action.dest == dest and action.option_strings:
                if isinstance(action, argparse.BooleanOptionalAction):
                    options = action.option_strings
                    return next(flag for flag in options if flag.startswith("--no-") == (value is False))
                if action.nargs != 0 or action.const == value:
                    return action.option_strings[0]
        raise PlanError(f"{dest}: this Megatron has no flag that sets it to {value!r}")

    def words_for(self, values: Mapping[str, Any]) -> list[str]:
        """The words that set these values: one word for a switch, otherwise a flag and its values.

        Also one word where the only value begins with a dash, as a pattern of layers may.
        """
        words: list[str] = []
        for dest, value in values.items():
            flag = self.flag_of(dest, value)
            texts = [] if isinstance(value, bool) else value if isinstance(value, list) else [value]
            given = list(map(str, texts))
            if len(given) == 1 and given[0].startswith("-"):
                words.append(f"{flag}={given[0]}")
            else:
                words += [flag, *given]
        return words

    def _num_values(self, action: argparse.Action, words: Sequence[str]) -> int:
        """The number of words behind an option that are its values, by argparse's rules."""
        available = 0
        while available < len(words) and self._is_value(words[available]):
            available += 1
        if action.nargs is None:
            return min(1, available)
        if isinstance(action.nargs, int):
            return min(action.nargs, available)
        return min(1, available) if action.nargs == "?" else available

    def _is_value(self, word: str) -> bool:
        # argparse's own classification (negative numbers, words with spaces) has no public name.
        return word != "--" and self._parser._parse_optional(word) is None
