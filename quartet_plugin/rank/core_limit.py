"""The processor time that Linux's control groups leave to a process, as the kernel's files say.

Version 2: `cpu.max` (Linux `Documentation/admin-guide/cgroup-v2.rst`); version 1: `cpu.cfs_quota_us` and
`cpu.cfs_period_us` (`Documentation/scheduler/sched-bwc.rst`). A group is bound by those that it lies in, too.
"""

from pathlib import Path, PurePosixPath

from quartet_plugin.protocol.rank_files import CoreLimit

_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def core_limit(*, groups: Path = _GROUPS, root: Path = _ROOT) -> CoreLimit | None:
    """The narrowest limit of this process, None where it may use its cores all the time.

    `groups` lists the process's control groups, `root` is where their files are.
    """
    limits = [
        CoreLimit(group=str(group), num_cores=cores)
        for folder, path in _folders(groups, root)
        for group in (path, *path.parents)
        if (cores := _cores(folder / group.relative_to("/"))) is not None
    ]
    return min(limits, key=lambda limit: limit.num_cores, default=None)


def _folders(groups: Path, root: Path) -> list[tuple[Path, PurePosixPath]]:
    """Where the files of the controller of processor time are, and the process's group there."""
    places = []
    for line in _text(groups).splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not path.startswith("/") or ".." in path.split("/"):
            continue
        if number == "0" and not controllers:
            places.append((root, PurePosixPath(path)))
        elif "cpu" in controllers.split(","):
            places += [(root / name, PurePosixPath(path)) for name in {"cpu", controllers}]
    return places


def _cores(group: Path) -> float | None:
    """The cores that a group may keep busy on average; None without a limit."""
    quota, period = (*_text(group / "cpu.max").split(), "", "")[:2]
    if not quota:
        quota, period = (_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if not quota.isdecimal() or not period.isdecimal() or not int(period):
        return None
    return int(quota) / int(period)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
