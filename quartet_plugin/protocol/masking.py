"""Masks secrets in what is written and shown: `masked` for text, `masked_argv` for the words of a command.

A secret is the value of a variable or flag with a telling name, a password in a URL, or a token of a
well-known form. Every process knows the secrets of its environment and of the command that it was given
(`collect_secrets`), and masks them wherever they turn up. The true command is never written: who resumes a
run gives it again, and a script takes each secret from a variable of its environment. Standard library
only, since the ranks mask what they report too.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

MASK = "***"
# A shorter value would mask parts of words that have nothing to do with it.
MIN_LITERAL = 6
# What earlier releases wrote in the place of a secret.
_EARLIER_MASK = "<redacted>"
_MIN_LINE = 16

Span = tuple[int, int]

_TELLING = re.compile(
    r"secret|password|passwd|passphrase|credential|api_?key|private_?key|access_?key|auth_?key"
)
# A name that ends like this holds a place, not a secret.
_PLACES = frozenset({"file", "path", "dir", "directory", "folder", "sock", "socket"})
# With these parts it is a token of a text, or a way to handle one: --moe-token-dispatcher-type, --eos-token.
_OF_A_TEXT = re.compile(
    r"per|ids?|type|dispatcher|drop|loss|eos|bos|pad|unk|sep|cls|mask|special|image|video|audio|num|max|min"
    r"|length|count|size|embedding|policy"
)
_KINDS = frozenset({"type", "mode", "method", "policy", "provider"})
_ALLOWED = re.compile(
    r"(CUDA|NCCL|GLOO|UCX|OMP|MKL|KMP|OPENBLAS|MALLOC|TORCH|TORCHELASTIC|PYTORCH|PET|NVTE|NVIDIA|HSA|ROCR"
    r"|TORCHINDUCTOR|TRITON|MASTER|SLURM|QUARTET|PYTHON|VIRTUAL_ENV|LD_LIBRARY|LD_PRELOAD)(_.*)?"
    r"|PYTHON[A-Z]+|LD_LIBRARY_PATH|PATH|HOSTNAME|RANK|LOCAL_RANK|WORLD_SIZE|TZ|LANG|LC_ALL"
)
_FLAG_OR_ASSIGNMENT = re.compile(r"[-+~]{0,2}([A-Za-z_][A-Za-z0-9_.-]*)(=(.*))?", re.DOTALL)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_BETWEEN_PARTS = re.compile(r"[^a-z0-9]+")

# Tokens and passwords that their form tells: a word that the text must hold, and the secret as group 1.
# Each pattern begins where a word does and looks a bounded way ahead: the time grows with the text's length.
_FORMS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (word, re.compile(pattern))
    for word, pattern in (
        ("://", r"://[^\s/:@]{0,256}+:([^\s/]+)@"),
        (
            "hf_",
            r"(?<![A-Za-z0-9])(hf_(?:(?=[A-Za-z]{0,200}+[0-9])[A-Za-z0-9]{10,}+|[A-Za-z]{24,}+))",
        ),
        (
            "sk-",
            r"(?<![\w-])(sk-(?:(?=[A-Za-z_-]{0,200}+[0-9])[A-Za-z0-9_-]{10,}+|[A-Za-z_-]{32,}+))",
        ),
        ("gh", r"(?<![A-Za-z0-9_])(gh[opsur]_[A-Za-z0-9]{16,}+)"),
        ("github_pat_", r"(?<![A-Za-z0-9_])(github_pat_[A-Za-z0-9_]{16,}+)"),
        ("akia", r"(?<![A-Za-z0-9])(AKIA[0-9A-Z]{12,}+)"),
        ("xox", r"(?<![A-Za-z0-9])(xox[abprs]-[A-Za-z0-9-]{8,}+)"),
        (
            "bearer",
            r"(?<![A-Za-z0-9])(?i:bearer)[ \t]{1,4}+"
            r"((?=[A-Za-z._~+/=-]{0,200}+[0-9])[A-Za-z0-9._~+/=-]{6,}+|[A-Za-z._~+/=-]{16,}+)",
        ),
        (
            "eyj",
            r"(?<![A-Za-z0-9_-])(eyJ[A-Za-z0-9_-]{6,}+\.[A-Za-z0-9_-]{2,}+(?:\.[A-Za-z0-9_-]*+)?)",
        ),
    )
)
# A name with its value in a URL's query, a line of a program, or a mapping as Python and JSON write it.
_NAME_BEFORE_VALUE = re.compile(
    r"(?<![\w.-])-{0,2}([A-Za-z_][\w.-]{0,99}+)(?:=|[\"'][ \t]{0,4}+[:=][ \t]{0,4}+)"
)
_VALUE = re.compile(r"\"([^\"]{1,4096}+)\"|'([^']{1,4096}+)'|([^\s&#\"'<>,;(){}\[\]]+)")

# The secrets of this process, longest first; None until they are asked for.
_known: tuple[str, ...] | None = None


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether the value of the flag or variable `name` is a secret."""
    return is_telling(name) or (name[-3:].lower() == "key")


@lru_cache(maxsize=4096)
def is_telling(name: str) -> bool:
    """Whether `name` says secret, password, token or the like; in text a bare key may be any key."""
    parts = [part for part in _BETWEEN_PARTS.split(_HUMP.sub("_", name).lower()) if part]
    if not parts or parts[-1] in _PLACES:
        return False
    if _TELLING.search("_".join(parts)):
        return True
    if any(part.endswith("token") for part in parts):
        return not any(_OF_A_TEXT.fullmatch(part) for part in parts)
    is_auth = any(part.endswith("auth") or part.startswith("authoriz") for part in parts)
    return is_auth and parts[-1] not in _KINDS


def collect_secrets(words: Sequence[str] = (), *, environment: Mapping[str, str] | None = None) -> None:
    """From now on `masked` knows the secrets of the environment, of this process's words and of `words`.

    `words` are the user's command, where this process was given it in another way than by its own words.
    """
    global _known
    variables = os.environ if environment is None else environment
    values = [value for name, value in variables.items() if is_secret(name)]
    values += [
        value[start:end]
        for name, value in variables.items()
        if "://" in value and not is_secret(name)
        for start, end in _spans(value)
    ]
    # A command of its own to each: a flag at the end of one has no value in the next.
    for command in (words, sys.orig_argv, sys.argv):
        values += [
            word[start:end]
            for word, spans in zip(command, _spans_of_words(command), strict=True)
            for start, end in spans
        ]
    _known = _literals(values)


def masked(text: str) -> str:
    """`text` with every secret replaced by ***."""
    if _known is None:
        collect_secrets()
    return _spliced(text, _spans(text, known=_known or ()))


def masked_argv(argv: Sequence[str]) -> list[str]:
    """The words of a command, their secrets replaced by ***: those behind telling flags and any others."""
    if _known is None:
        collect_secrets()
    pairs = zip(argv, _spans_of_words(argv, known=_known or ()), strict=True)
    return [_spliced(word, spans) for word, spans in pairs]


def is_masked(argv: Iterable[str]) -> bool:
    """Whether a secret was taken out of these words of a command, by this release or an earlier one."""
    return any(MASK in word or _EARLIER_MASK in word for word in argv)


def is_same_word(begun: str, now: str) -> bool:
    """Whether two masked words of a command are the same, whatever the secrets were that one lacks."""
    first, *others = begun.split(MASK)
    if begun == now or not others:
        return begun == now
    if not now.startswith(first):
        return False
    place = len(first)
    for piece in others[:-1]:
        place = now.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return now.endswith(others[-1]) and len(now) - len(others[-1]) >= place


def is_same_command(begun: Sequence[str], now: Sequence[str]) -> bool:
    """Whether two commands are the same but for their secrets, which may have been renewed."""
    pairs = zip(masked_argv(begun), masked_argv(now), strict=False)
    return len(begun) == len(now) and all(is_same_word(*pair) for pair in pairs)


def shell_words(argv: Sequence[str]) -> str:
    """The command as a shell reads it, each secret replaced by a variable that the user must set.

    `--api-key abc` is written as `--api-key "${API_KEY:?...}"`; `sh` names the variable where it is unset.
    """
    if _known is None:
        collect_secrets()
    names: dict[str, str] = {}
    shown: list[str] = []
    before = ""
    for word, spans in zip(argv, _spans_of_words(argv, known=_known or ()), strict=True):
        shown.append(_with_variables(word, spans, before=before, names=names) if spans else shlex.quote(word))
        before = word
    return " ".join(shown)


def recorded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that decide how a training runs, secrets masked; other variables are left out."""
    return {
        name: MASK if is_secret(name) else masked(value)
        for name, value in sorted(environment.items())
        if _ALLOWED.fullmatch(name)
    }


def _with_variables(word: str, spans: Sequence[Span], *, before: str, names: dict[str, str]) -> str:
    """One word for a shell; `names` has the variables of the words before by their values."""
    pieces: list[str] = []
    end = 0
    for start, stop in spans:
        head = word[end:start]
        pieces.append(shlex.quote(head) if head else "")
        told_by = head if start else before if before.startswith("-") else ""
        name = _free_name(told_by, value=word[start:stop], names=names)
        pieces.append(f'"${{{name}:?holds a secret of the command}}"')
        end = stop
    return "".join(pieces) + (shlex.quote(word[end:]) if end < len(word) else "")


def _free_name(text: str, *, value: str, names: dict[str, str]) -> str:
    """A variable named after `text`, another one for every other secret."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_").upper()
    stem = name if name and not name[0].isdigit() else f"SECRET_{name}".rstrip("_")
    name, number = stem, 1
    while names.setdefault(name, value) != value:
        number += 1
        name = f"{stem}_{number}"
    return name


def _spans_of_words(argv: Sequence[str], *, known: Sequence[str] = ()) -> Iterator[list[Span]]:
    """Where the secrets of each word of a command are."""
    for before, word in pairwise(["", *argv]):
        flag = _FLAG_OR_ASSIGNMENT.fullmatch(before) if before.startswith("-") else None
        named = _FLAG_OR_ASSIGNMENT.fullmatch(word)
        if flag and not flag[2] and is_secret(flag[1]) and not word.startswith("--"):
            yield [(0, len(word))] if word else []
        elif named and named[3] and is_secret(named[1]):
            yield [named.span(3)]
        else:
            yield _merged([*_spans(word, known=known), *_occurrences(word, (MASK, _EARLIER_MASK))])


def _spans(text: str, *, known: Sequence[str] = ()) -> list[Span]:
    """Where the secrets in `text` are, in order and apart from each other."""
    lowered = text.lower()
    spans = list(_occurrences(text, known))
    for word, form in _FORMS:
        if word in lowered:
            spans += [match.span(1) for match in form.finditer(text)]
    if "=" in text or ":" in text:
        spans += _named_values(text)
    return _merged(spans)


def _named_values(text: str) -> Iterator[Span]:
    """Where the values behind telling names are; none is looked at twice."""
    match = _NAME_BEFORE_VALUE.search(text)
    while match is not None:
        end = match.end()
        value = _VALUE.match(text, end) if is_telling(match[1]) else None
        if value is not None:
            yield value.span(value.lastindex or 0)
            end = value.end()
        match = _NAME_BEFORE_VALUE.search(text, end)


def _occurrences(text: str, values: Iterable[str]) -> Iterator[Span]:
    for value in values:
        start = text.find(value)
        while start >= 0:
            yield start, start + len(value)
            start = text.find(value, start + len(value))


def _merged(spans: list[Span]) -> list[Span]:
    """The union of spans, those that overlap as one."""
    if len(spans) < 2:
        return spans
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _spliced(text: str, spans: Sequence[Span]) -> str:
    if not spans:
        return text
    pieces: list[str] = []
    end = 0
    for start, stop in spans:
        pieces += [text[end:start], MASK]
        end = stop
    return "".join([*pieces, text[end:]])


def _literals(values: Iterable[str]) -> tuple[str, ...]:
    """What is looked for: each value as it is, as URLs, Python and JSON write it, and its long lines."""
    literals: set[str] = set()
    for value in {value.strip() for value in values}:
        if len(value) < MIN_LITERAL or MASK in value or value == _EARLIER_MASK or _is_place(value):
            continue
        escaped = value.encode("utf-8", errors="replace")
        literals |= {
            value,
            quote(escaped),
            quote(escaped, safe=""),
            repr(value)[1:-1],
            json.dumps(value)[1:-1],
        }
        lines = [line.strip() for line in value.splitlines()]
        literals |= {line for line in lines if len(lines) > 1 and len(line) >= _MIN_LINE}
    return tuple(sorted(literals, key=lambda literal: (-len(literal), literal)))


def _is_place(value: str) -> bool:
    """Whether the value is the path of something, as of a script behind a switch: it stands in many texts."""
    try:
        return Path(value).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False
