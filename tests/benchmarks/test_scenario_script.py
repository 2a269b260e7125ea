"""A job of a scenario that waits for its turn is stopped, and a process has its share of a core."""

import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.scenarios.cpu_shares import PERIOD_US, cpu_shares, limits
from benchmarks.scenarios.turns import (
    Rank,
    heard,
    let_through,
    listening,
    process_behind,
    resume,
    stopped_after,
    turn_s,
)

ROOT = Path(__file__).parents[2]
TRAINING = """
import sys, time
from benchmarks.scenarios.script import in_turns
step = in_turns(lambda: time.sleep(0.01), address=sys.argv[1], job="a", steps=2)
for _ in range(6):
    step()
"""


def test_a_job_whose_turn_it_is_not_is_stopped(tmp_path: Path) -> None:
    address = str(tmp_path / "turns")
    with listening(address) as server:
        words = [sys.executable, "-c", TRAINING, address]
        with subprocess.Popen(words, cwd=ROOT) as training:
            connection, _ = server.accept()
            connection.settimeout(None)
            with connection, connection.makefile("rw") as line:
                job = [Rank(line=line, process=process_behind(connection))]
                assert heard(line) == "a"
                assert job[0].process.pid == training.pid
                assert stopped_after(job) == [[]]
                for _ in range(2):
                    while job[0].process.status() != psutil.STATUS_STOPPED:
                        time.sleep(0.01)
                    assert turn_s(job) >= 0.01
                resume(job)
                let_through([line])
                assert training.wait() == 0


def test_a_process_has_its_share_of_a_core_in_both_versions_of_control_groups(tmp_path: Path) -> None:
    assert limits(0.4, is_unified=True) == {"cpu.max": f"{0.4 * PERIOD_US:.0f} {PERIOD_US}"}
    assert limits(0.4, is_unified=False) == {
        "cpu.cfs_period_us": str(PERIOD_US),
        "cpu.cfs_quota_us": f"{0.4 * PERIOD_US:.0f}",
    }
    for first, root in ((tmp_path / "1", tmp_path / "1" / "cpu"), (tmp_path / "2", tmp_path / "2")):
        root.mkdir(parents=True)
        with cpu_shares((0.4, 0.2), root=first) as groups:
            assert [group.parent for group in groups] == [root, root]
            for group, share in zip(groups, (0.4, 0.2), strict=True):
                made = {path.name: path.read_text() for path in group.iterdir()}
                assert made == limits(share, is_unified=root == first)
                # Files of a real group go with it.
                for path in group.iterdir():
                    path.unlink()
        assert not any(group.exists() for group in groups)
