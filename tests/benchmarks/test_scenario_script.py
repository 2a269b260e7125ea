"""A slow device of a scenario is stopped while it trains, and left alone while it waits for its turn."""

import mmap
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from benchmarks.scenarios.script import PERIOD_S, in_turns
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
SLOW = """
import mmap, sys
from benchmarks.scenarios.script import slow_down
at_work = mmap.mmap(-1, 1)
slow_down(2.0, at_work)
for line in sys.stdin:
    at_work[0] = int(line)
    print(line, end="", flush=True)
"""


def test_it_is_stopped_at_work_alone() -> None:
    words = [sys.executable, "-c", SLOW]
    with subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as device:
        told, answers = device.stdin, device.stdout
        assert told is not None
        assert answers is not None

        def becomes(at_work: int) -> None:
            print(at_work, file=told, flush=True)
            assert answers.readline() == f"{at_work}\n"

        def is_soon_stopped() -> bool:
            time.sleep(PERIOD_S / 10)
            return psutil.Process(device.pid).status() == psutil.STATUS_STOPPED

        for _ in range(2):
            becomes(1)
            while not is_soon_stopped():
                pass
            becomes(0)
            # Ten periods without a stop come once the period that has begun is over, or never.
            while any(is_soon_stopped() for _ in range(100)):
                pass
        told.close()
        assert device.wait() == 0


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
                        time.sleep(PERIOD_S)
                    assert turn_s(job) >= 0.01
                resume(job)
                let_through([line])
                assert training.wait() == 0


def test_a_turn_is_work_and_waiting_for_it_is_not(tmp_path: Path) -> None:
    at_work = mmap.mmap(-1, 1)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "turns"))
        server.listen()
        step = in_turns(
            lambda: at_work[0], address=str(tmp_path / "turns"), job="a", steps=1, at_work=at_work
        )
        found: list[int] = []
        training = threading.Thread(target=lambda: found.extend(step() for _ in range(2)))
        connection, _ = server.accept()
        with connection, connection.makefile() as lines:
            assert lines.readline() == '"a"\n'
            training.start()
            for _ in range(2):
                lines.readline()
                while at_work[0]:
                    time.sleep(PERIOD_S / 10)
                connection.sendall(b"1")
            training.join()
    assert found == [1, 1]
