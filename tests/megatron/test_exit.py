"""How a CPU rank that has done its work ends: everything that was registered runs, and the code is 0."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import atexit, sys, threading, time
from pathlib import Path
from quartet_plugin.megatron import cpu_device

folder = Path(sys.argv[1])
atexit.register(lambda: (folder / "handler").touch())
def late():
    time.sleep(0.3)
    (folder / "thread").touch()
threading.Thread(target=late).start()
class Aborts:
    def __del__(self):
        (folder / "teardown").touch()
kept = Aborts()
print("done", end="")
cpu_device.exit_now()
"""


def test_handlers_and_threads_finish_and_the_teardown_is_left_out(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done", "")
    assert {path.name for path in tmp_path.iterdir()} == {"handler", "thread"}
