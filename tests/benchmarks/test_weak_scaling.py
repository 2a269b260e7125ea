"""Pairs of published runs that differ in the number of replicas alone, and what is fitted to them."""

import math
from typing import Any

import pytest

from benchmarks.predict_published import Measured
from benchmarks.weak_scaling import FACTOR, coefficient_of, pairs_of, percent, report_lines
from quartet_plugin.calibration.full_size import WAIT_A_ROOT_NODE, wait_for_nodes
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.rows import read_row, resolve

pytestmark = pytest.mark.timeout(60)

ROW: dict[str, Any] = {
    "kind": "e2e",
    "family": "made",
    "model": "GPT",
    "layers": 8,
    "hidden": 1024,
    "heads": 16,
    "kv_heads": 16,
    "ffn": 4096,
    "gated_ffn": False,
    "vocab": 51200,
    "seq_len": 2048,
    "mbs": 1,
    "gpu": "H100-SXM-80GB",
    "tp": 1,
    "pp": 1,
    "vpp": 1,
    "cp": 1,
    "ep": 1,
    "precision": "bf16",
    "zero": 1,
    "recompute": "none",
}


def measured(gpus: int, seconds: float, **changes: Any) -> Measured:
    """A run of eight microbatches a replica."""
    fields = {**ROW, "id": f"made-{gpus}", "gpus": gpus, "dp": gpus, "gbs": 8 * gpus, **changes}
    return Measured(fields, resolve(read_row(fields)).run, seconds)


def test_pairs_differ_in_replicas_and_batch_alone() -> None:
    rows = [
        measured(8, 1.0),
        measured(64, 1.02),
        measured(64, 1.5, mbs=2, gbs=1024),
        measured(128, 1.1, gbs=512),
    ]
    (pair,) = pairs_of(rows, fitted())
    assert pair.names == ("made-8", "made-64")
    assert pair.factor == FACTOR
    assert pair.nodes == (1.0, 8.0)
    assert pair.measured == pytest.approx(math.log(1.02))
    assert pair.predicted(WAIT_A_ROOT_NODE) == pytest.approx(pair.modelled + wait_for_nodes(8))


def test_the_coefficient_is_the_one_that_made_the_times() -> None:
    modelled = {
        pair.names: pair.modelled for pair in pairs_of([measured(8, 1.0), measured(64, 1.0)], fitted())
    }
    wait = 0.005 * (math.sqrt(8) - 1.0)
    seconds = math.exp(modelled[("made-8", "made-64")] + wait)
    pairs = pairs_of([measured(8, 1.0), measured(64, seconds)], fitted())
    assert coefficient_of(pairs) == pytest.approx(0.005)
    assert percent(pairs, lambda pair: pair.predicted(0.005)) == pytest.approx(0.0, abs=1e-9)
    lines = report_lines(pairs)
    assert lines[0].startswith("made, x8: 1 pairs, same time")
    assert "0.0050" in lines[-1]
