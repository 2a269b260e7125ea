"""The network namespace of a process, as Linux names it (`namespaces(7)`).

Processes of one host that are in different namespaces, such as containers or emulated nodes, reach each other
through links between these, which may be slow.
"""

from pathlib import Path

_NAMESPACE = Path("/proc/self/ns/net")


def network_namespace(*, path: Path = _NAMESPACE) -> int | None:
    """The inode of this process's namespace, equal for all processes in it; None where no file says it."""
    try:
        return path.stat().st_ino
    except OSError:
        return None
