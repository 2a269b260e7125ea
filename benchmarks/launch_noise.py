"""The deviation of launches of one plan, and that of the iterations inside a launch.

    python -m benchmarks.launch_noise RUN ...

Reads the final rounds of finished runs, which launch the same plans again and again. The search assumes that
iterations deviate as launches do (`calibration/observations.py`); the last line checks that by their ratio.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from quartet_plugin.tuner.attempts import read_launch

LEAST_ITERATIONS = 4


def main() -> None:
    """Print both deviations of every run, and their ratio over all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    deviations = []
    for run in parser.parse_args().runs:
        launches = launches_of(run)
        if not any(len(rows) > 1 for rows in launches.values()):
            continue
        inside, between = inside_launches(launches), between_launches(launches)
        deviations.append((inside, between))
        print(f"{run.name}: inside a launch {inside:.1%}, between launches {between:.1%}")
    if deviations:
        inside, between = (
            math.sqrt(statistics.fmean(value**2 for value in column))
            for column in zip(*deviations, strict=True)
        )
        ratio = statistics.median(between / inside for inside, between in deviations)
        print(f"{len(deviations)} runs: inside {inside:.1%}, between {between:.1%}; median ratio {ratio:.2f}")


def launches_of(run: Path) -> dict[str, list[list[float]]]:
    """Iterations of every launch of the final rounds, by trial."""
    launches: dict[str, list[list[float]]] = {}
    for path in sorted(run.glob("final/*-round-*")):
        result = read_launch(path, faults=[]).result
        if result is not None and len(result.iteration_s) >= LEAST_ITERATIONS:
            launches.setdefault(path.name.partition("-")[0], []).append(list(result.iteration_s))
    return launches


def inside_launches(launches: dict[str, list[list[float]]]) -> float:
    """The pooled deviation of the logarithms of iterations in their launch."""
    rows = [_logs(row) for rows in launches.values() for row in rows]
    return math.sqrt(statistics.fmean(statistics.variance(row) for row in rows))


def between_launches(launches: dict[str, list[list[float]]]) -> float:
    """The pooled deviation of the logarithms of launches' medians around their plan's."""
    medians = [_logs([statistics.median(row) for row in rows]) for rows in launches.values() if len(rows) > 1]
    freedom = sum(len(row) - 1 for row in medians)
    return math.sqrt(sum(statistics.variance(row) * (len(row) - 1) for row in medians) / freedom)


def _logs(row: Sequence[float]) -> list[float]:
    return [math.log(value) for value in row]


if __name__ == "__main__":
    main()
