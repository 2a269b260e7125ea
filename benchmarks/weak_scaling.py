"""The error of predictions for more replicas: published runs at f times the devices and the batch.

    python -m benchmarks.weak_scaling DATA.json [--rows]

DATA.json is what `benchmarks.predict_published` takes. A pair are two rows of one family that differ in the
number of replicas and the batch alone. The larger one's time is predicted from the smaller one's measured
time, as `quartet tune --nodes` does from a trial's, with constants that were fitted without the family. The
rule "same time" is the comparison. The wait for more nodes has one coefficient, which is fitted to such
pairs: `left out` predicts each model with the coefficient fitted to the other models' pairs.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.predict_published import Measured, observations
from benchmarks.published_fit import fit
from quartet_plugin.calibration import full_size
from quartet_plugin.cost.constants import Constants, fitted
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.rows import read_row, resolve
from quartet_plugin.model.files import read_json

# Fields by which the rows of a pair may differ.
_FREE = {"id", "gpus", "gbs", "dp", "core", "iter_time_s", "notes", "memory_gb", "extra", "unverified"}
_DERIVED = ("mfu", "hfu", "tokens_per_s", "tflops_per_gpu", "tflops_kind", "check_")
# The figure is of pairs this far apart.
FACTOR = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two published runs: logarithms of the larger one's time over the smaller one's.

    `modelled` is the iteration model's without any wait for nodes.
    """

    names: tuple[str, str]
    family: str
    model: str
    factor: int
    nodes: tuple[float, float]
    measured: float
    modelled: float

    @property
    def roots(self) -> float:
        """What the coefficient of the wait for nodes multiplies."""
        first, second = (full_size.wait_for_nodes(nodes) for nodes in self.nodes)
        return (second - first) / full_size.WAIT_A_ROOT_NODE

    def predicted(self, coefficient: float) -> float:
        """The logarithm of the ratio with this coefficient of the wait."""
        return self.modelled + coefficient * self.roots


def like_runs(rows: Sequence[Measured]) -> list[list[Measured]]:
    """The rows that differ in the number of replicas alone, together."""
    groups: dict[str, list[Measured]] = defaultdict(list)
    for row in rows:
        kept = {
            name: value
            for name, value in row.fields.items()
            if name not in _FREE and not name.startswith(_DERIVED)
        }
        groups[json.dumps(kept, sort_keys=True)].append(row)
    return [group for group in groups.values() if len(group) > 1]


def pairs_of(rows: Sequence[Measured], constants: Constants) -> list[Pair]:
    """Every pair of like runs, the smaller one first."""
    pairs = []
    for group in like_runs(rows):
        for small in group:
            for large in group:
                factor, rest = divmod(large.fields["gpus"], small.fields["gpus"])
                is_pair = rest == 0 and factor > 1 and large.fields["gbs"] == factor * small.fields["gbs"]
                if is_pair:
                    pairs.append(_pair(small, large, factor=factor, constants=constants))
    return pairs


def _pair(small: Measured, large: Measured, *, factor: int, constants: Constants) -> Pair:
    seconds, nodes = [], []
    for row in (small, large):
        predicted = predict(row.run, constants)
        seconds.append(predicted.iter_time_s - predicted.terms["straggler_s"])
        nodes.append(row.run.cluster.num_devices / row.run.cluster.devices_per_node)
    return Pair(
        names=(str(small.fields["id"]), str(large.fields["id"])),
        family=small.family,
        model=str(small.fields["model"]),
        factor=factor,
        nodes=(nodes[0], nodes[1]),
        measured=math.log(large.seconds / small.seconds),
        modelled=math.log(seconds[1] / seconds[0]),
    )


def coefficient_of(pairs: Sequence[Pair]) -> float:
    """The coefficient of the wait for nodes that fits these pairs best."""
    roots = np.array([pair.roots for pair in pairs])
    left = np.array([pair.measured - pair.modelled for pair in pairs])
    return float(roots @ left / (roots @ roots))


def percent(pairs: Sequence[Pair], predicted: Callable[[Pair], float]) -> float:
    """The mean error of the predicted times in percent."""
    return 100 * float(np.mean([abs(math.exp(predicted(pair) - pair.measured) - 1) for pair in pairs]))


def report_lines(pairs: Sequence[Pair]) -> list[str]:
    """The errors of one family's pairs by factor, and what the coefficient and its spread are fitted to."""
    by_model: dict[str, float] = {}
    of_factor = [pair for pair in pairs if pair.factor == FACTOR]
    for model in sorted({pair.model for pair in of_factor}):
        others = [pair for pair in of_factor if pair.model != model]
        by_model[model] = coefficient_of(others) if others else 0.0
    lines = []
    for factor in sorted({pair.factor for pair in pairs}):
        some = [pair for pair in pairs if pair.factor == factor]
        spread = full_size.scale_spread(factor)
        inside = sum(
            abs(pair.predicted(full_size.WAIT_A_ROOT_NODE) - pair.measured) <= 1.96 * spread for pair in some
        )
        same = percent(some, lambda _: 0.0)
        lines.append(
            f"{pairs[0].family}, x{factor}: {len(some)} pairs, same time {same:.2f} %, "
            f"predicted {percent(some, lambda pair: pair.predicted(full_size.WAIT_A_ROOT_NODE)):.2f} %, "
            f"left out {percent(some, lambda pair: pair.predicted(by_model.get(pair.model, 0.0))):.2f} %, "
            f"{inside} of {len(some)} inside of their 95 % interval"
        )
    if of_factor:
        words = ", ".join(f"without {model} {value:.4f}" for model, value in by_model.items())
        lines.append(f"coefficient of the wait, x{FACTOR}: {coefficient_of(of_factor):.4f}; {words}")
    return lines


def read_rows(path: Path) -> list[Measured]:
    """The measured runs of a data file."""
    rows: list[dict[str, Any]] = read_json(path)
    return [
        Measured(row, resolve(read_row(row)).run, float(row["iter_time_s"]))
        for row in rows
        if row.get("kind") == "e2e"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", action="store_true", help="print every pair")
    options = parser.parse_args()
    rows = read_rows(options.data)
    for family in sorted({pair.family for pair in pairs_of(rows, fitted())}):
        others = [row for row in rows if row.family != family]
        constants = fit(observations(others), start=fitted(), rounds=2)
        pairs = pairs_of([row for row in rows if row.family == family], constants)
        for pair in pairs if options.rows else ():
            predicted = pair.predicted(full_size.WAIT_A_ROOT_NODE)
            print(
                f"{pair.names[0]:12} {pair.names[1]:12} x{pair.factor:<4} "
                f"measured {math.exp(pair.measured):.4f} predicted {math.exp(predicted):.4f}"
            )
        for line in report_lines(pairs):
            print(line)


if __name__ == "__main__":
    main()
