"""What the process-start hook costs a Python process that has nothing to do with the plugin.

    python -m benchmarks.process_start [--starts N]

Prints the time of the installed .pth file's line without its variable, as the module `site` executes it, and
the time that it takes where the variable is set. No test asserts either.
"""

import argparse
import os
import statistics
import subprocess
import sys
import timeit
from pathlib import Path

from quartet_plugin.protocol.environment import START

HOOK = Path(__file__).parents[1] / "quartet_plugin_start.pth"
_TIMED = "import sys, time; t = time.perf_counter(); exec(sys.argv[1]); print(time.perf_counter() - t)"


def main() -> None:
    """Print the two times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=20, help="processes that are started with the variable")
    starts = parser.parse_args().starts
    line = HOOK.read_text(encoding="utf-8")
    os.environ.pop(START, None)
    repeats = 10_000
    off_s = timeit.timeit(lambda: exec(line, {}), number=repeats) / repeats
    print(f"without {START}: {off_s * 1e6:.1f} microseconds a start, compilation included")
    environment = {**os.environ, START: "/nonexistent/start.json"}
    on_s = [
        float(
            subprocess.run(
                [sys.executable, "-c", _TIMED, line],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for _ in range(starts)
    ]
    print(f"with it: {statistics.median(on_s) * 1e3:.1f} ms a start, median of {starts}")


if __name__ == "__main__":
    main()
