"""Runs the tests that are marked nightly, and says how many have passed.

    python -m tools.nightly_tests FOLDER [--most N]

The tests that have not passed in a log of FOLDER run, N of them at most, so that a run that was ended goes
on; an empty FOLDER begins anew. Exits 1 while a test has not passed.
"""

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.kept_tests import collected, is_left, kept_states, logs_in, run_left, time_of


def summary(states: Mapping[str, str], logs: Sequence[Path]) -> str:
    """The counts of the states, the days and the time of the runs, and a line for each test that failed."""
    counts = Counter(state.lower() or "not run" for state in states.values())
    times = [time_of(log) for log in logs]
    days = " to ".join(sorted({f"{end(times)[0]:%Y-%m-%d}" for end in (min, max)}))
    minutes = round(sum(length_s for _, length_s in times) / 60)
    words = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    failed = [f"{state} {test}" for test, state in states.items() if state in ("FAILED", "ERROR")]
    runs = "1 run" if len(logs) == 1 else f"{len(logs)} runs"
    return "\n".join([f"{len(states)} tests: {words}; {days}, {minutes} min in {runs}", *failed])


def main() -> None:
    """Run what has not passed, and print the states."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=int, metavar="N", help="of the tests that are left; all by default")
    options = parser.parse_args()
    tests = collected("-m", "nightly")
    run_left(tests, options.folder, most=options.most)
    states = kept_states(tests, options.folder)
    print(summary(states, logs_in(options.folder)))
    raise SystemExit(int(any(is_left(state) for state in states.values())))


if __name__ == "__main__":
    main()
