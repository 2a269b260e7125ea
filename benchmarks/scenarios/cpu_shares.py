"""Control groups that give each process of a job a fixed share of a core. Needs root and the CPU controller.

A group that has used its share of a period waits for the next one, whether or not the core is free (CFS
bandwidth control, Linux `Documentation/scheduler/sched-bwc.rst`). So processes whose shares of a core add up
to less than 1 do not slow each other down, and are devices of fixed speeds.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PERIOD_US = 5000
ROOT = Path("/sys/fs/cgroup")
_PREFIX = "quartet-share"
_END_S = 60.0


@contextlib.contextmanager
def cpu_shares(shares: Sequence[float], *, root: Path = ROOT) -> Iterator[tuple[Path, ...]]:
    """A group for each of `shares` of a core; removed at the end, when its processes have ended.

    A process joins one by writing its pid to the file `cgroup.procs` there. Raises OSError where the machine
    lets this process make none, and where processes are left in one.
    """
    parent = _controller(root)
    groups = tuple(parent / f"{_PREFIX}-{index}" for index in range(len(shares)))
    with contextlib.ExitStack() as stack:
        for group, share in zip(groups, shares, strict=True):
            group.mkdir(exist_ok=True)
            stack.callback(_remove, group)
            for name, text in limits(share, is_unified=parent == root).items():
                (group / name).write_text(text)
        yield groups


def limits(share: float, *, is_unified: bool) -> Mapping[str, str]:
    """The files of a group and their content, of control groups of version 2 (`is_unified`) or 1."""
    quota_us = round(share * PERIOD_US)
    if is_unified:
        return {"cpu.max": f"{quota_us} {PERIOD_US}"}
    return {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}


def _controller(root: Path) -> Path:
    """The folder of the CPU controller (version 1), or `root` with the controller switched on (2)."""
    if (root / "cpu").is_dir():
        return root / "cpu"
    (root / "cgroup.subtree_control").write_text("+cpu")
    return root


def _remove(group: Path) -> None:
    """Remove a group. A process that has just been killed is in it for a moment."""
    end = time.monotonic() + _END_S
    while True:
        try:
            return group.rmdir()
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)
