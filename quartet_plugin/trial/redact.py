"""Removes secrets from a command and its environment before they are written to a file."""

import re
import shlex
from collections.abc import Mapping, Sequence

BLANKED = "<redacted>"

_SECRET = re.compile(r"(token|key|secret|passwd|password|credential|credentials|auth)$", re.IGNORECASE)
_ALLOWED = re.compile(
    r"(CUDA|NCCL|GLOO|UCX|OMP|MKL|KMP|OPENBLAS|MALLOC|TORCH|TORCHELASTIC|PYTORCH|PET|NVTE|NVIDIA|HSA|ROCR"
    r"|TORCHINDUCTOR|TRITON|MASTER|SLURM|QUARTET|PYTHON|VIRTUAL_ENV|LD_LIBRARY|LD_PRELOAD)(_.*)?"
    r"|PYTHON[A-Z]+|LD_LIBRARY_PATH|PATH|HOSTNAME|RANK|LOCAL_RANK|WORLD_SIZE|TZ|LANG|LC_ALL"
)
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--?([A-Za-z][A-Za-z0-9_-]*)(=(.*))?", re.DOTALL)


def is_secret(name: str) -> bool:
    """Whether the value of the flag or variable `name` is a secret."""
    return _SECRET.search(name.replace("-", "_")) is not None


def redacted_argv(argv: Sequence[str]) -> list[str]:
    """The words of a command, the values of secret flags and assignments blanked."""
    words: list[str] = []
    is_value_secret = False
    for word in argv:
        flag = _FLAG.fullmatch(word)
        assignment = _ASSIGNMENT.fullmatch(word)
        if is_value_secret and not word.startswith("--"):
            words.append(BLANKED)
        elif flag and flag[2] and is_secret(flag[1]):
            words.append(f"{word[: flag.start(3)]}{BLANKED}")
        elif assignment and is_secret(assignment[1]):
            words.append(f"{assignment[1]}={BLANKED}")
        else:
            words.append(word)
        is_value_secret = flag is not None and not flag[2] and is_secret(flag[1])
    return words


def shell_words(argv: Sequence[str]) -> str:
    """The command as a shell reads it, each secret replaced by a variable that the user must set.

    `--api-key abc` is written as `--api-key "${API_KEY:?...}"`; `sh` names the variable where it is unset.
    """
    shown: list[str] = []
    for word, kept in zip(argv, redacted_argv(argv), strict=True):
        before = shown[-1] if shown else ""
        if word == kept:
            shown.append(shlex.quote(word))
            continue
        head = kept.removesuffix(BLANKED)
        name = re.sub(r"[^A-Za-z0-9]+", "_", head or before).strip("_").upper()
        shown.append(f'{shlex.quote(head) if head else ""}"${{{name}:?holds a secret of the command}}"')
    return " ".join(shown)


def recorded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that decide how a training runs, secrets blanked; other variables are left out."""
    return {
        name: BLANKED if is_secret(name) else value
        for name, value in sorted(environment.items())
        if _ALLOWED.fullmatch(name)
    }
