"""The error of the cost model on published runs that it was not fitted to.

    python benchmarks/predict_published.py DATA.json          # each family predicted without its own rows
    python benchmarks/predict_published.py DATA.json --rows   # the same with every row
    python benchmarks/predict_published.py DATA.json --apart  # also each device and each generation
    python benchmarks/predict_published.py DATA.json --fit    # fit to all rows, write the package's constants

DATA.json is an array of rows, each with the fields of a run and `iter_time_s`. Predictions see the allowed
fields only.
"""

import argparse
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.published_fit import PublishedRun, fit
from quartet_plugin.cost import constants as package_constants
from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.predict import predict, predict_row
from quartet_plugin.cost.rows import read_row, resolve
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.model.files import read_json, write_json_atomic

SPREAD = 0.06
ROWS_THAT_COUNT_FULLY = 10
WHY = {
    "bloom": "a network slower than its nominal rate, small micro-batches on 8-way tensor parallelism",
    "mbridge": "experts, recompute and graphs not printed; software alone changes a row up to 2.3 times",
    "megatron-2020": "early kernels: unfused parts cost less there than bandwidth says",
    "mindspeed": "another vendor's device and compiler; links not printed",
    "mlperf": "releases differ by 15 %; one microbatch on 32 B200 across nodes",
    "mpt": "Triton attention at 16k tokens and more",
    "nemo-24.07": "older fp8 recipes and kernels",
    "ptdp": "ZeRO-3 of 2021 on hundreds of devices",
    "torchtitan": "row-wise fp8 casts; context parallel from 4 on at 131k tokens and more",
    "dgxc": "little: how much of tensor parallelism hides",
    "internevo": "gradient reduction over a slow network with one or two microbatches",
    "korthikanti": "8-way shards lose less in tiles than counted",
    "simumax-b200": "experts; the power limit of half precision on Blackwell",
    "zerobubble": "little",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """A row's fields, the run that the allowed ones describe, and its measured seconds."""

    fields: dict[str, Any]
    run: TrainingRun
    seconds: float

    @property
    def family(self) -> str:
        return str(self.fields["family"])

    @property
    def is_core(self) -> bool:
        return bool(self.fields["core"]) and self.fields["tier"] == "A"


def observations(rows: Sequence[Measured]) -> list[PublishedRun]:
    """The input of the fit: a large family counts like ten rows, unverified and expert rows less."""
    sizes = Counter(row.family for row in rows)
    runs = []
    for row in rows:
        spread = SPREAD * (1.0 if row.fields["tier"] == "A" else 1.6) * (3.0 if row.run.experts else 1.0)
        spread *= max(1.0, sizes[row.family] / ROWS_THAT_COUNT_FULLY) ** 0.5
        runs.append(
            PublishedRun(run=row.run, seconds=row.seconds, spread=spread / (1.6 if row.is_core else 1.0))
        )
    return runs


# What rows have in common that are left out of a fit together.
COMMON: dict[str, Callable[[Measured], str]] = {
    "family": lambda row: row.family,
    "device": lambda row: row.run.cluster.device.name,
    "generation": lambda row: row.run.cluster.device.generation,
}


def left_out(rows: Sequence[Measured], start: Constants, *, common: str) -> dict[str, Constants]:
    """The constants fitted to all other families, devices or generations, by name."""
    name_of = COMMON[common]
    constants = {}
    for name in sorted({name_of(row) for row in rows}):
        others = [row for row in rows if name_of(row) != name]
        constants[name] = fit(observations(others), start=start, rounds=2)
        print(f"  fitted without {name}", file=sys.stderr)
    return constants


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Rank correlation, ties averaged."""
    from scipy.stats import spearmanr

    return float(spearmanr(predicted, measured).statistic)


def percent(values: Sequence[float]) -> str:
    return f"{100 * float(np.mean(values)):5.1f}" if len(values) else "    -"


def print_table(rows: Sequence[Measured], predicted: Sequence[float], in_sample: Sequence[float]) -> None:
    """Errors of iteration time: all figures in percent, the means unweighted over rows."""
    error = np.array([p / row.seconds - 1 for p, row in zip(predicted, rows, strict=True)])
    inside = np.array([p / row.seconds - 1 for p, row in zip(in_sample, rows, strict=True)])
    size = np.abs(error)
    core = np.array([row.is_core for row in rows])
    first = np.array([row.fields["tier"] == "A" for row in rows])
    print(
        f"{'family':14} {'rows':>4} {'mean':>5} {'bias':>6} {'worst':>6} | {'A':>5} | core n mean | "
        "fitted | due to"
    )
    for family in sorted({row.family for row in rows}):
        members = np.array([row.family == family for row in rows])
        worst = float(error[members][np.argmax(size[members])])
        print(
            f"{family:14} {members.sum():4d} {percent(size[members])} {100 * error[members].mean():+6.1f} "
            f"{100 * worst:+6.1f} | {percent(size[members & first])} | "
            f"{(members & core).sum():4d} {percent(size[members & core])}   | "
            f"{percent(np.abs(inside[members]))}  | {WHY.get(family, '')}"
        )
    for name, chosen in (("core, tier A", core), ("tier A", first), ("tier B", ~first)):
        if chosen.any():
            print(
                f"{name}: {chosen.sum()} rows, mean {100 * size[chosen].mean():.2f} %, "
                f"median {100 * float(np.median(size[chosen])):.2f} %, "
                f"fitted to them {100 * np.abs(inside[chosen]).mean():.2f} %"
            )


def print_apart(rows: Sequence[Measured], start: Constants, *, common: str) -> None:
    """Mean errors where no row of the same device, or generation, was fitted to."""
    constants = left_out(rows, start, common=common)
    name_of = COMMON[common]
    sizes: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        seconds = predict(row.run, constants[name_of(row)]).iter_time_s
        size = abs(seconds / row.seconds - 1)
        if row.is_core:
            sizes["core"].append(size)
        if row.fields["tier"] == "A":
            sizes["tier A"].append(size)
            sizes[name_of(row)].append(size)
    errors = ", ".join(
        f"{name} {percent(values).strip()} % ({len(values)})" for name, values in sizes.items()
    )
    print(f"without its {common}, mean (rows): {errors}")


def print_ranks(rows: Sequence[Measured], predicted: Sequence[float]) -> None:
    """The rank correlation of layouts and schedules, by seconds per sample."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for measured, seconds in zip(rows, predicted, strict=True):
        row = measured.fields
        pair = (seconds / row["gbs"], measured.seconds / row["gbs"])
        if measured.family == "zerobubble":
            groups[f"zerobubble {row['model']}"].append(pair)
        elif (
            measured.family == "bloom"
            and row["heads"] == 64
            and (row.get("options") or {}).get("date") == "02-25"
        ):
            groups[f"bloom {row['model']} 02-25"].append(pair)
    for name, pairs in groups.items():
        if len(pairs) > 2:
            print(f"rank correlation, {name}, {len(pairs)} rows: {spearman(*zip(*pairs, strict=True)):.3f}")


def print_memory(data: Sequence[dict[str, Any]]) -> None:
    """Errors of the peak memory, of which nothing is fitted; some families print the driver's figure."""
    errors: dict[str, list[float]] = defaultdict(list)
    refused: list[str] = []
    for row in data:
        if row.get("kind") not in ("e2e", "oom"):
            continue
        prediction = predict_row(row)
        if "error" in prediction:
            continue
        if row["kind"] == "oom":
            peak = prediction["peak_memory_bytes"] / 2**30
            print(f"{row['id']} ran out of memory: predicted {peak:.1f} GiB, "
                  f"{'fits' if prediction['fits'] else 'does not fit'}")  # fmt: skip
        elif not prediction["fits"]:
            refused.append(str(row["id"]))
        if isinstance(row.get("memory_gb"), int | float):
            errors[row["family"]].append(prediction["peak_memory_bytes"] / 2**30 / row["memory_gb"] - 1)
    for family, values in sorted(errors.items()):
        print(f"memory, {family}, {len(values)} rows: mean {percent([abs(v) for v in values])} %, "
              f"bias {100 * float(np.mean(values)):+.1f} %")  # fmt: skip
    print(f"measured runs predicted not to fit: {', '.join(refused) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--fit", action="store_true", help="write the constants fitted to all rows")
    parser.add_argument("--apart", action="store_true", help="also leave out each device and generation")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path(package_constants.__file__).with_name(package_constants.FILE),
        help="where --fit writes",
    )
    options = parser.parse_args()
    data = read_json(options.data)
    rows = [
        Measured(row, resolve(read_row(row)).run, float(row["iter_time_s"]))
        for row in data
        if row.get("kind") == "e2e"
    ]
    best = fit(observations(rows), rounds=5)
    if options.fit:
        values = {name: float(f"{value:.4g}") for name, value in asdict(best).items()}
        write_json_atomic(options.output, {"schema_version": 1, "num_rows": len(rows), "values": values})
        print(f"wrote {options.output}")
        return
    without = left_out(rows, best, common="family")
    predicted = [predict_row(row.fields, constants=without[row.family])["iter_time_s"] for row in rows]
    inside = [predict_row(row.fields, constants=best)["iter_time_s"] for row in rows]
    if options.rows:
        for row, seconds in zip(rows, predicted, strict=True):
            error = 100 * (seconds / row.seconds - 1)
            print(f"{row.fields['id']:20} {row.seconds:10.4f} {seconds:10.4f} {error:+7.1f}")
    print_table(rows, predicted, inside)
    for common in ("device", "generation") if options.apart else ():
        print_apart(rows, best, common=common)
    print_ranks(rows, predicted)
    print_memory(data)


if __name__ == "__main__":
    main()
