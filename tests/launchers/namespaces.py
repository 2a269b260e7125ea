"""Processes in mount, process and UTS namespaces of their own, which stand for nodes of a cluster."""

import functools
import subprocess
from collections.abc import Sequence

import pytest

WORDS = ("unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


@functools.cache
def obstacle() -> str | None:
    """Why this process may not make namespaces; None where it may."""
    try:
        done = subprocess.run([*WORDS, "true"], capture_output=True, text=True, check=False, timeout=30)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip()


def require() -> None:
    """Skip where the system forbids namespaces, as in a container without privileges: nodes need them."""
    reason = obstacle()
    if reason is not None:
        pytest.skip(f"namespaces are not allowed here: {reason}")


def words_on(name: str, hosts: str, words: Sequence[str]) -> list[str]:
    """The words that run `words` on a node of this name, whose /etc/hosts is the file `hosts`."""
    script = f'mount --bind "{hosts}" /etc/hosts && hostname {name} && exec "$@"'
    return [*WORDS, "bash", "-c", script, "bash", *words]
