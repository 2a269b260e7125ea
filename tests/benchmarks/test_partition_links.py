"""Phases of a partition's linears between processes on shaped links take at least the time of their price."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.partition_links import CASES, phase_ratios
from tests.launchers import namespaces

ROOT = Path(__file__).resolve().parents[2]
PRODUCT_MS = 60


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["grid:4:whole", "rings:4:step"])
def test_no_measured_phase_is_shorter_than_its_price(name: str, tmp_path: Path) -> None:
    """A phase takes c/q + (q - 1) max(c/q, ring); its products sleep, its messages are real.

    Other work on the machine can only lengthen a phase; by how much a quiet one does, the benchmark prints.
    """
    namespaces.require()
    output = tmp_path / "result.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.partition_links", name, "--pairs", "3"),
            *("--product-ms", str(PRODUCT_MS), "--namespaces", "phases", "--output", str(output)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = json.loads(output.read_text())
    ratios = phase_ratios(CASES[name], result["phases_s"], PRODUCT_MS / 1e3)
    assert len(ratios) == 4 * 3
    assert min(ratios) > 0.9
