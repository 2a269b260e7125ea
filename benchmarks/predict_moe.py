"""The error of the cost model on published runs of mixtures of experts and of dense models in low precision.

    python -m benchmarks.predict_moe MOE.json OTHERS.json          # each release predicted from earlier ones
    python -m benchmarks.predict_moe MOE.json OTHERS.json --rows   # the same with every row
    python -m benchmarks.predict_moe MOE.json OTHERS.json --known  # the same by what rows state

MOE.json and OTHERS.json are arrays of rows, each with the fields of a run and `iter_time_s`; those of
MOE.json have a `release`. A release is predicted with constants that are fitted to OTHERS.json, without the
family that has the same source, and to the releases before it. Errors are of rows from 25.11 on whose
configuration no earlier release has; pairs of layouts are counted among these, and among all rows with
experts that have equal batches. Predictions see the allowed fields only.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.predict_published import Measured, observations
from benchmarks.published_fit import fit
from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.predict import predict_row
from quartet_plugin.cost.rows import read_row, resolve
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import read_json

FIRST_RELEASE = "25.11"
# The family of OTHERS.json that prints rows of the same releases.
SAME_SOURCE = "mbridge"
# What makes a configuration, beside the release that measured it.
LAYOUT = ("mbs", "tp", "pp", "cp", "vpp", "ep")
CONFIGURATION = ("model", "gpu", "gpus", "precision", "gbs", "seq_len", *LAYOUT)
ALIKE = ("model", "gpu", "gpus", "seq_len")
# Two layouts of one model and machine whose times a sequence lie further apart are ordered.
APART = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A row, and the predicted seconds of its iteration; None where the model refuses it.

    `is_new`: the row is of a release from `FIRST_RELEASE` on, and no earlier one has its configuration.
    """

    row: dict[str, Any]
    seconds: float | None
    is_new: bool

    @property
    def error(self) -> float:
        """The relative error."""
        return float((self.seconds or 0.0) / self.row["iter_time_s"] - 1)

    @property
    def is_moe(self) -> bool:
        return str(self.row["arch"]).startswith("moe")


def configuration(row: dict[str, Any]) -> str:
    """The configuration of a row as text, its knobs included."""
    values = [row.get(name) for name in CONFIGURATION]
    return json.dumps([*values, row.get("recompute"), row.get("knobs")], sort_keys=True)


def measured(rows: Sequence[dict[str, Any]]) -> list[Measured]:
    """The rows that the cost model takes, for a fit."""
    kept = []
    for row in rows:
        try:
            kept.append(Measured(row, resolve(read_row(row)).run, float(row["iter_time_s"])))
        except ConfigError as error:
            print(f"  left out of fits: {row['id']}: {error}", file=sys.stderr)
    return kept


def predict_releases(
    rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], start: Constants
) -> list[Predicted]:
    """Every row, predicted with constants that are fitted to `others` and to earlier releases."""
    known = measured([row for row in others if row["kind"] == "e2e" and row["family"] != SAME_SOURCE])
    releases = sorted({row["release"] for row in rows})
    predicted = []
    for release in releases:
        earlier = [row for row in rows if row["release"] < release]
        seen = {configuration(row) for row in earlier}
        constants = fit(observations([*known, *measured(earlier)]), start=start, rounds=3)
        for row in (row for row in rows if row["release"] == release):
            is_new = release >= FIRST_RELEASE and configuration(row) not in seen
            seconds = predict_row(row, constants=constants).get("iter_time_s")
            predicted.append(Predicted(row=row, seconds=seconds, is_new=is_new))
        print(f"  {release}: fitted to {len(known)} + {len(earlier)} rows", file=sys.stderr)
    return predicted


def ordered_pairs(predicted: Sequence[Predicted], *, alike: Sequence[str] = ALIKE) -> tuple[int, int]:
    """The pairs of layouts with equal `alike` that lie `APART`, and those that are ordered right.

    They are compared by time a sequence, and may be of two releases.
    """
    num_right = num_pairs = 0
    for one, two in combinations(predicted, 2):
        is_alike = all(one.row[name] == two.row[name] for name in alike)
        is_other = any(one.row[name] != two.row[name] for name in LAYOUT)
        if not (is_alike and is_other) or one.seconds is None or two.seconds is None:
            continue
        ratio = (one.row["iter_time_s"] / one.row["gbs"]) / (two.row["iter_time_s"] / two.row["gbs"])
        predicted_ratio = (one.seconds / one.row["gbs"]) / (two.seconds / two.row["gbs"])
        if max(ratio, 1 / ratio) > 1 + APART:
            num_pairs += 1
            num_right += (ratio > 1) == (predicted_ratio > 1)
    return num_pairs, num_right


def print_errors(name: str, predicted: Sequence[Predicted]) -> None:
    """The line of one kind of model, by unweighted rows."""
    taken = [row for row in predicted if row.seconds is not None]
    if not taken:
        print(f"{name}: no rows")
        return
    errors = np.array([row.error for row in taken])
    pairs, right = ordered_pairs(taken)
    sizes = np.abs(errors)
    print(
        f"{name}: {len(taken)} rows, {len(predicted) - len(taken)} refused, mean {100 * sizes.mean():.1f} %, "
        f"median {100 * float(np.median(sizes)):.1f} %, bias {100 * errors.mean():+.1f} %, "
        f"worst {100 * errors[sizes.argmax()]:+.1f} %; pairs ordered right {right} of {pairs}"
    )


def knowledge(row: dict[str, Any]) -> list[tuple[str, str]]:
    """What a row of experts states, and what is assumed where it does not: a quantity and its state."""
    knobs = row.get("knobs") or {}
    backend, scope = knobs.get("moe_flex_dispatcher_backend"), knobs.get("cuda_graph_scope")
    parts = scope if isinstance(scope, list) and knobs.get("cuda_graph_impl") not in (None, "none") else []
    modules = knobs.get("recompute_modules")
    latent = str(row["arch"]) == "moe-mla"
    return [
        ("dispatcher", f"stated: {backend}" if backend else "assumed: one all-to-all"),
        ("CUDA graphs", f"stated: {', '.join(parts)}" if parts else "not stated, or none: none"),
        ("overlap of the all-to-all", f"stated: {'on' if knobs.get('moe_a2a_overlap') else 'off'}"),
        ("split", "stated: a layout" if knobs.get("pp_layout") else "assumed: balanced"),
        ("recompute", f"stated: {', '.join(modules)}" if modules else f"stated: {row.get('recompute')}"),
        ("attention", "assumed: DeepSeek's latent attention" if latent else "stated"),
        ("multi-token prediction", "stated" if row.get("mtp_layers") is not None else "assumed: none"),
        ("bandwidth between nodes", "assumed" if "inter_bw_Gbps_per_gpu" in row["inferred"] else "stated"),
    ]


def print_knowledge(predicted: Sequence[Predicted]) -> None:
    """The error of rows with experts by what they state and what is assumed of them."""
    groups: dict[tuple[str, str], list[Predicted]] = {}
    for each in predicted:
        for key in knowledge(each.row) if each.is_moe and each.seconds is not None else ():
            groups.setdefault(key, []).append(each)
    for (quantity, state), rows in sorted(groups.items()):
        errors = 100 * np.array([row.error for row in rows])
        print(
            f"{quantity}; {state}: {len(rows)} rows, mean {np.abs(errors).mean():.1f} %, "
            f"bias {errors.mean():+.1f} %"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("moe", type=Path)
    parser.add_argument("others", type=Path)
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--known", action="store_true", help="print errors by what rows state")
    parser.add_argument(
        "--host-operation-s", type=float, help="another time of the host for an operation, such as 2e-6"
    )
    options = parser.parse_args()
    start = Constants()
    if options.host_operation_s is not None:
        start = replace(start, host_operation_s=options.host_operation_s)
    rows = [row for row in read_json(options.moe) if row["usable"] and row["arch"] != "hybrid"]
    every = predict_releases(rows, read_json(options.others), start)
    predicted = [each for each in every if each.is_new]
    if options.rows:
        for each in sorted(predicted, key=lambda one: (one.row["arch"], one.row["id"])):
            row = each.row
            layout = " ".join(f"{name}{row[name]}" for name in ("tp", "pp", "cp", "vpp", "ep", "mbs"))
            shown = "refused" if each.seconds is None else f"{100 * each.error:+7.1f} %"
            what = f"{row['id']:16} {row['model']:16} {row['gpu']:14} {row['precision']:6}"
            print(f"{what} {layout:32} {shown}")
    print_errors("mixtures of experts", [each for each in predicted if each.is_moe])
    for model in sorted({each.row["model"] for each in predicted if each.is_moe}):
        print_errors(f"  {model}", [each for each in predicted if each.row["model"] == model])
    for words, names in (("batches", ("gbs",)), ("batches and precisions", ("gbs", "precision"))):
        pairs, right = ordered_pairs([each for each in every if each.is_moe], alike=(*ALIKE, *names))
        print(f"all rows with experts, pairs of equal {words}: ordered right {right} of {pairs}")
    dense = [each for each in predicted if not each.is_moe and each.row["low_precision"]]
    print_errors("dense, low precision", dense)
    if options.known:
        print_knowledge(predicted)


if __name__ == "__main__":
    main()
