"""What a first step has done so far."""

import subprocess
import sys

from quartet_plugin.rank.first_step import FirstStepProgress


def test_modules_and_started_processes_count_and_the_count_never_falls() -> None:
    num_modules = [3]
    progress = FirstStepProgress(lambda: num_modules[0])
    first = progress.count()
    num_modules[0] = 5
    assert progress.count() == first + 2
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert progress.count() == first + 3
    finally:
        child.communicate(b"\n", timeout=30)
    assert progress.count() == first + 3
