"""Row 3: the kernel's own count of processes that it killed for memory."""

from pathlib import Path

import pytest

from quartet_plugin.trial import host_memory

EVENTS = "low 0\nhigh 3\nmax 7\noom 2\noom_kill {count}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n"


@pytest.mark.parametrize(
    ("groups", "files", "count"),
    [
        ("0::/job/step\n", {"job/step/memory.events": EVENTS.format(count=4)}, 4),
        ("0::/job\n", {"memory.events": EVENTS.format(count=5)}, 5),  # a container's own group is the root
        (
            "0::/job\n",
            {"job/memory.events": EVENTS.format(count=1), "memory.events": EVENTS.format(count=9)},
            1,
        ),
        ("12:cpu,memory:/slurm/7\n", {"memory/slurm/7/memory.oom_control": CONTROL.format(count=2)}, 2),
        ("12:memory:/docker/ab\n", {"memory/memory.oom_control": CONTROL.format(count=3)}, 3),
        ("12:cpuset:/x\n", {"memory/memory.oom_control": CONTROL.format(count=3)}, 0),
        ("0::/job\n", {"job/memory.events": "oom_kill many\n"}, 0),
        ("0::/job\n", {}, 0),
    ],
)
def test_what_the_control_group_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str], count: int
) -> None:
    own = tmp_path / "cgroup"
    own.write_text(groups)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(host_memory, "_GROUP_FILE", own)
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path / "fs")
    assert host_memory.num_oom_kills() == count


def test_a_system_without_groups_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_GROUP_FILE", tmp_path / "none")
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path / "none")
    assert host_memory.num_oom_kills() == 0
