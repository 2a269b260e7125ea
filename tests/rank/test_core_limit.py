"""The limits of control groups, in both of their versions, as the kernel's files have them."""

from pathlib import Path

import pytest

from quartet_plugin.protocol.rank_files import CoreLimit
from quartet_plugin.rank.core_limit import core_limit


def limit_in(tmp_path: Path, *, groups: str, files: dict[str, str]) -> CoreLimit | None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "groups").write_text(groups)
    return core_limit(groups=tmp_path / "groups", root=tmp_path / "cgroup")


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        (
            "0::/pod/a\n",
            {"pod/a/cpu.max": "2000 5000\n", "pod/cpu.max": "max 100000\n"},
            ("/pod/a", 0.4),
        ),
        (
            "0::/pod/a\n",
            {"pod/a/cpu.max": "max 5000\n", "pod/cpu.max": "150000 100000\n"},
            ("/pod", 1.5),
        ),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, ("/", 0.5)),
        ("0::/\n", {}, None),
        (
            "4:memory:/x\n3:cpu:/quartet\n0::/\n",
            {"cpu/quartet/cpu.cfs_quota_us": "1000\n", "cpu/quartet/cpu.cfs_period_us": "5000\n"},
            ("/quartet", 0.2),
        ),
        (
            "3:cpu,cpuacct:/pod\n",
            {"cpu,cpuacct/pod/cpu.cfs_quota_us": "300000", "cpu,cpuacct/pod/cpu.cfs_period_us": "100000"},
            ("/pod", 3.0),
        ),
        ("3:cpu:/pod\n", {"cpu/pod/cpu.cfs_quota_us": "-1\n", "cpu/pod/cpu.cfs_period_us": "100000\n"}, None),
        ("0::/../../pod\n", {"cpu.max": "50000 100000\n"}, None),
        ("nothing of the kind\n", {"cpu.max": "50000 0\n"}, None),
    ],
    ids=[
        "own",
        "outer",
        "container",
        "none",
        "version 1",
        "two controllers",
        "unlimited",
        "outside",
        "other",
    ],
)
def test_the_narrowest_limit_counts(
    tmp_path: Path, groups: str, files: dict[str, str], limit: tuple[str, float] | None
) -> None:
    expected = None if limit is None else CoreLimit(group=limit[0], num_cores=limit[1])
    assert limit_in(tmp_path, groups=groups, files=files) == expected


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert core_limit(groups=tmp_path / "none", root=tmp_path) is None
