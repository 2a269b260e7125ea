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
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
# What a bare key needs to be one by which a program is let in.
_MIN_KEY = 12
# Before the name of every variable that a script takes a secret from: PATH and HOME are no secrets.
_VARIABLE = "QUARTET_SECRET"

Span = tuple[int, int]

_TELLING = re.compile(
    r"secret|password|passwd|passphrase|credential|(?:api|private|access|auth)_?key"
    r"|(?:^|_)(?:account|client|deploy|encryption|hf|license|master|openai|service|session|signing|ssh"
    r"|storage|subscription|wandb)_?key(?:_|$)"
)
# A token by which a program is let in. Any other word with this ending, as tiktoken, is one of a text.
_TOKEN = re.compile(
    r"(?:access|admin|api|auth|bearer|bot|client|csrf|deploy|gh|git|github|gitlab|hf|hub|id|jwt|login|my|npm"
    r"|oauth|personal|pypi|refresh|registry|secret|security|service|session|slack|telegram|user|vault|wandb|xsrf)?token"
)
_SIGNATURES = frozenset({"sig", "signature", "sas"})
# A name that ends like this holds a place, not a secret.
_PLACES = frozenset({"file", "path", "dir", "directory", "folder", "sock", "socket"})
_FILE_NAME = re.compile(r"\.(?:cc|cpp|cu|h|json|pem|py|sh|so|toml|txt|ya?ml)", re.IGNORECASE)
# With these parts it is a token of a text, or a way to handle one: --moe-token-dispatcher-type, --eos-token.
_OF_A_TEXT = re.compile(
    r"per|ids?|type|dispatcher|drop|dropping|loss|eos|bos|eod|pad|unk|sep|cls|mask|special|image|video|audio"
    r"|num|max|min|length|count|counter|counting|size|embedding|policy|pattern|prediction|capacity|multi"
    r"|expert|experts|router|routing|start|stop|vocab|merge|budget|level|class|sampling|shuffle|pruning"
)
_KINDS = frozenset({"type", "mode", "method", "policy", "provider"})
_ALLOWED = re.compile(
    r"(CUDA|NCCL|GLOO|UCX|OMP|MKL|KMP|OPENBLAS|MALLOC|TORCH|TORCHELASTIC|PYTORCH|PET|NVTE|NVIDIA|HSA|ROCR"
    r"|TORCHINDUCTOR|TRITON|MASTER|SLURM|QUARTET|PYTHON|VIRTUAL_ENV|LD_LIBRARY|LD_PRELOAD)(_.*)?"
    r"|PYTHON[A-Z]+|LD_LIBRARY_PATH|PATH|HOSTNAME|RANK|LOCAL_RANK|WORLD_SIZE|TZ|LANG|LC_ALL"
)
_FLAG_OR_ASSIGNMENT = re.compile(r"[-+~]{0,2}([A-Za-z_][A-Za-z0-9_.-]*)(=(.*))?", re.DOTALL)
# A word of a command that is a place; by its form no part of it is a secret.
_PATH = re.compile(r"(?:~|\.{1,2})?/[^\s=?&@]*")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_BETWEEN_PARTS = re.compile(r"[^a-z0-9]+")

# Tokens and passwords that their form tells: a word that the text must hold, and the secret as group 1.
# Each pattern begins where a word does and looks a bounded way ahead: the time grows with the text's length.
_FORMS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (word, re.compile(pattern))
    for word, pattern in (
        ("://", r"://[^\s/:@]{0,256}+:([^\s/]+)@"),
        ("://hf_", r"://(hf_[A-Za-z0-9]{30,}+)@"),
        (
            "hf_",
            # Neither the name of a folder or a file nor a part of it.
            r"(?<![\w./-])(hf_[A-Za-z0-9]{30,}+)(?![\w/-]|\.\w)",
        ),
        (
            "sk-",
            r"(?<![\w./-])(sk-[A-Za-z0-9_-]{20,}+)(?!/|\.\w)",
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
            "basic",
            r"(?<![A-Za-z0-9])(?i:basic)[ \t]{1,4}+([A-Za-z0-9+/]{4,}+={0,2})",
        ),
        (
            "eyj",
            r"(?<![A-Za-z0-9_-])(eyJ[A-Za-z0-9_-]{6,}+\.[A-Za-z0-9_-]{2,}+(?:\.[A-Za-z0-9_-]*+)?)",
        ),
    )
)
# A name with its value in a URL's query, a line of a program, a header, a list of settings
# (`api_key ........ abc`), or a mapping as Python, JSON and YAML write it.
_NAME_BEFORE_VALUE = re.compile(
    r"(?<![\w.-])-{0,2}([A-Za-z_][\w.-]{0,99}+)"
    r"(?:[\"'][ \t]{0,4}+[:=][ \t]{0,4}+|([ \t]{0,8}+[:=][ \t]{0,8}+)|([ \t]{1,8}+\.{2,200}+[ \t]{1,8}+))"
)
_VALUE = re.compile(r"\"([^\"]{1,4096}+)\"|'([^']{1,4096}+)'|([^\s&#\"'<>,;(){}\[\]]+)")
_LINE = re.compile(r"[^\r\n]{1,4096}+")
_SCHEME = re.compile(r"(?i:basic|bearer|digest|negotiate|token)[ \t]{1,4}+(?=\S)")
# No secret, but that there is none, or of which type it is.
_NO_VALUE = frozenset({"none", "null", "true", "false", "str", "int", "float", "bool", "bytes", "[]", "{}"})
# What `name:value` may follow; in `/data/auth:v1` and `image:auth:v1` it is a part of a place.
_BEFORE_NAME = frozenset({"", *" \t\r\n\"'`,;({["})
_NUMBER = re.compile(r"[-+]?[0-9][0-9.,_%]*(?:e[-+]?[0-9]+)?")
# Without a telling form a shorter word behind `token: ` is one that a message names.
_MIN_WORD = 16
_MAX_WORD = 256

# The secrets of this process, longest first; None until they are asked for.
_known: tuple[str, ...] | None = None


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether the value of the flag or variable `name` may be a secret, whatever it is."""
    return is_telling(name) or (name[-3:].lower() == "key")


def holds_secret(name: str, value: str) -> bool:
    """Whether `value` is a secret as the value of `name`: a bare key (`--input_key question`) may be any key.

    Behind a name that is not telling but ends in key only what looks like a key is one.
    """
    return is_telling(name) or (is_secret(name) and _is_key(value))


@lru_cache(maxsize=4096)
def is_telling(name: str) -> bool:
    """Whether `name` says secret, password, token or the like; in text a bare key may be any key."""
    parts = [part for part in _BETWEEN_PARTS.split(_HUMP.sub("_", name).lower()) if part]
    if not parts or parts[-1] in _PLACES or _FILE_NAME.fullmatch(name, max(0, name.rfind("."))):
        return False
    if _TELLING.search("_".join(parts)) or parts[-1] in _SIGNATURES:
        return True
    if any(_TOKEN.fullmatch(part) for part in parts):
        return not any(_OF_A_TEXT.fullmatch(part) for part in parts)
    is_auth = any(part.endswith("auth") or part.startswith("authoriz") for part in parts)
    return is_auth and parts[-1] not in _KINDS


def collect_secrets(words: Sequence[str] = (), *, environment: Mapping[str, str] | None = None) -> None:
    """From now on `masked` knows the secrets of the environment, of this process's words and of `words`.

    `words` are the user's command, where this process was given it in another way than by its own words.
    """
    global _known
    variables = os.environ if environment is None else environment
    values = [value for name, value in variables.items() if holds_secret(name, value)]
    values += [
        value[start:end]
        for name, value in variables.items()
        if "://" in value and not holds_secret(name, value)
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


def num_same_words(begun: Sequence[str], now: Sequence[str]) -> int:
    """How many words from the start of two commands are the same but for their secrets.

    `begun` may be masked already. A secret stands for another one only in the same place: behind the same
    name, in the same URL, or where both words have one and are the same around it.
    """
    shown = (masked_argv(begun), masked_argv(now))
    befores = pairwise(["", *shown[0]])
    same = 0
    for (before, was), here in zip(befores, shown[1], strict=False):
        if was != here and not _is_masked_key(was, here, before=before):
            break
        same += 1
    return same


def is_same_command(begun: Sequence[str], now: Sequence[str]) -> bool:
    """Whether two commands are the same but for their secrets, which may have been renewed."""
    return len(begun) == len(now) == num_same_words(begun, now)


def shell_words(argv: Sequence[str]) -> str:
    """The command as a shell reads it, each secret replaced by a variable that the user must set.

    `--api-key abc` is written as `--api-key "${QUARTET_SECRET_API_KEY:?...}"`; `sh` names the variable where
    it is unset. No name is one that the environment has with another value.
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
    stem = f"{_VARIABLE}_{re.sub(r'[^A-Za-z0-9]+', '_', text).strip('_').upper()}".rstrip("_")
    name, number = stem, 1
    while os.environ.get(name, value) != value or names.setdefault(name, value) != value:
        number += 1
        name = f"{stem}_{number}"
    return name


def _spans_of_words(argv: Sequence[str], *, known: Sequence[str] = ()) -> Iterator[list[Span]]:
    """Where the secrets of each word of a command are."""
    for before, word in pairwise(["", *argv]):
        flag = _FLAG_OR_ASSIGNMENT.fullmatch(before) if before.startswith("-") else None
        named = _FLAG_OR_ASSIGNMENT.fullmatch(word)
        if flag and not flag[2] and holds_secret(flag[1], word) and not word.startswith("--"):
            yield [(0, len(word))] if word else []
        elif named and named[3] and holds_secret(named[1], named[3]):
            yield [named.span(3)]
        else:
            spans = list(_occurrences(word, known)) if _PATH.fullmatch(word) else _spans(word, known=known)
            yield _merged([*spans, *_occurrences(word, (MASK, _EARLIER_MASK))])


def _spans(text: str, *, known: Sequence[str] = ()) -> list[Span]:
    """Where the secrets in `text` are, in order and apart from each other."""
    lowered = text.lower()
    spans = list(_occurrences(text, known))
    for word, form in _FORMS:
        if word in lowered:
            check = _CHECKS.get(word)
            matches = form.finditer(text)
            spans += [match.span(1) for match in matches if check is None or check(match[1])]
    if "=" in text or ":" in text or " .." in text:
        spans += _named_values(text)
    return _merged(spans)


def _named_values(text: str) -> Iterator[Span]:
    """Where the values behind telling names are; none is looked at twice."""
    match = _NAME_BEFORE_VALUE.search(text)
    while match is not None:
        end = match.end()
        span = _span_of_value(text, match) if is_telling(match[1]) else None
        if span is not None:
            yield span
            end = span[1]
        match = _NAME_BEFORE_VALUE.search(text, end)


def _span_of_value(text: str, match: re.Match[str]) -> Span | None:
    """Where the value behind a telling name and its separator is; None where that is no secret.

    `token=x` and a quoted name or value always have one. `token: x` also stands in messages about a text,
    `signature = f(x)` in programs, and `token:12` in places of a file.
    """
    name, separator, start = match[1], match[2], match.end()
    if match[3] is not None:
        line = _LINE.match(text, start)
        return None if line is None or line[0].strip().lower() in _NO_VALUE else line.span()
    # What is refused is refused before its end is looked for: a long word may hold many such names.
    is_close = separator == ":"
    if separator not in (None, "=") and text.startswith(("=", ":", "//") if is_close else ("=", ":"), start):
        return None
    if is_close and text[max(0, match.start() - 1) : match.start()] not in _BEFORE_NAME:
        return None
    scheme = _SCHEME.match(text, start) if separator is not None else None
    value = _VALUE.match(text, start if scheme is None else scheme.end())
    if value is None:
        return None
    begin, end = value.span(value.lastindex or 0)
    if scheme is not None:
        return (start if _is_proper(name) else begin), end
    if separator not in (None, "=") and value.lastindex == 3 and end - begin <= _MAX_WORD:
        word = value[3]
        if word.lower() in _NO_VALUE:
            return None
        if not _is_proper(name) and (not _could_be_token(word) or text[end : end + 1] in ("(", "[")):
            return None
    return begin, end


def _is_proper(name: str) -> bool:
    """Whether a telling name can mean nothing but a secret; a token and a signature may be a text's."""
    return _TELLING.search(_BETWEEN_PARTS.sub("_", _HUMP.sub("_", name).lower())) is not None


def _could_be_token(word: str) -> bool:
    """Whether a word behind `token: ` is one by which a program is let in, rather than one of a message."""
    if _NUMBER.fullmatch(word):
        return False
    return len(word) >= _MIN_WORD or (len(word) >= MIN_LITERAL and any(map(str.isdigit, word)))


def _is_key(value: str) -> bool:
    """Whether a value looks like a key by which a program is let in: long, letters and digits mixed."""
    is_mixed = any(map(str.isdigit, value)) and any(map(str.isalpha, value))
    return len(value) >= _MIN_KEY and is_mixed


def _is_random(key: str) -> bool:
    """Whether a part of a key that begins with `sk-` is as no word of a language is."""
    for part in re.split("[_-]", key):
        kinds = [any(map(is_kind, part)) for is_kind in (str.isdigit, str.islower, str.isupper)]
        if kinds[0] and ((all(kinds) and len(part) >= 16) or (any(kinds[1:]) and len(part) >= 20)):
            return True
    return False


def _is_user_and_password(text: str) -> bool:
    """Whether a text behind `Basic` is USER:PASSWORD in base 64, and not the next word of a sentence."""
    try:
        decoded = b64decode(text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4)).decode()
    except ValueError:
        return False
    return ":" in decoded and decoded.isprintable()


# What a secret of a form must be besides.
_CHECKS: Mapping[str, Callable[[str], bool]] = {"sk-": _is_random, "basic": _is_user_and_password}


def _is_masked_key(was: str, now: str, *, before: str) -> bool:
    """Whether the value of a bare key was masked, as earlier releases do whatever it is."""
    name, separator, value = was.rpartition("=")
    if value != MASK:
        return False
    if separator:
        return is_secret(name) and now.startswith(name + separator)
    return before.startswith("-") and "=" not in before and is_secret(before)


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
