"""A `quartet tune` of milliseconds: a finished run's folder appears where the words say, or it fails.

It stands alone and loads no module of the package. The job's own words say what happens: `--hold FILE` waits
until the file is there, `--code N` ends with that exit code, `--kill` with a signal, `--out-of-time` says
that the search was cut short. TINY_LOG gets a line at the start and at the end; a second one of the same job
beside the first is written there, too.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

GOLDEN = Path(__file__).parents[1] / "golden" / "run_0.1.0"
LEFT_OUT = shutil.ignore_patterns("final", "parity", "study.sqlite3", "config.json")


def note(*words: str) -> None:
    """Append a line."""
    with Path(os.environ["TINY_LOG"]).open("a", encoding="utf-8") as log:
        log.write(" ".join(words) + "\n")


def runs(pid: str) -> bool:
    """Whether a process runs; one that has ended, and that nobody has waited for yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def finish(name: str, marker: Path, code: int, words: str = "") -> NoReturn:
    """End as told, with a last line."""
    marker.unlink()
    note("end", name, str(code))
    if words:
        print(f"quartet: {words}", file=sys.stderr, flush=True)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def main() -> None:
    """One job."""
    dashes = sys.argv.index("--")
    options = dict(word.partition("=")[::2] for word in sys.argv[1:dashes])
    words = sys.argv[dashes + 1 :]
    name, run = options["--name"], Path(options["--run-dir"]) / options["--name"]
    marker = run.parent.parent / f"marker-{name}"
    if marker.exists() and runs(marker.read_text()):
        note("doubled", name)
    marker.write_text(str(os.getpid()))
    signal.signal(signal.SIGTERM, lambda number, frame: finish(name, marker, 130, "stopped"))
    run.mkdir(exist_ok=True)
    shutil.copy(GOLDEN / "config.json", run)
    # Whoever reads the line may stop this tuner at once, and finds a run that has begun.
    note("start", name, str(os.getpid()), " ".join(sys.argv[1:dashes]))
    if "--hold" in words:
        while not Path(words[words.index("--hold") + 1]).exists():
            time.sleep(0.01)
    if "--kill" in words:
        finish(name, marker, -signal.SIGKILL)
    if "--code" in words:
        finish(name, marker, int(words[words.index("--code") + 1]), "the job's own fault")
    shutil.copytree(GOLDEN, run, ignore=LEFT_OUT, dirs_exist_ok=True)
    if "--out-of-time" in words:
        with (run / "events.jsonl").open("a") as events:
            events.write('{"time": 1795375558.0, "kind": "end", "winner": 6, "out_of_time": true}\n')
    finish(name, marker, 0)


if __name__ == "__main__":
    main()
