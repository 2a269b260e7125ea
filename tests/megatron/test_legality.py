"""What our rules call legal Megatron accepts, and what they refuse for a rule of Megatron's it refuses."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.megatron.support import REPOSITORY

RELEASES = REPOSITORY / ".venv" / "releases"
_PROGRAM = [sys.executable, "-W", "ignore", "-m", "tests.megatron.legality"]


def verdicts(*options: str, release: str | None = None) -> dict[str, Any]:
    """Counts and disagreements of random plans, with the installed Megatron or another release."""
    folders = [str(REPOSITORY)]
    if release is not None:
        folders.insert(0, str(RELEASES / f"megatron-core-{release}"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*_PROGRAM, *options], env=environment, capture_output=True, text=True, timeout=2300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_megatron_agrees_with_the_rules_on_a_few_plans() -> None:
    result = verdicts("--plans", "40", "--seed", "4")
    assert result["disagreements"] == []
    assert result["accepted"] == 40
    assert result["spread_over_tensor"] > 0
    assert result["hybrid"] > 0
    assert result["refused"] > 20


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("release", [None, "0.18.2", "0.17.1"], ids=str)
def test_every_release_agrees_with_the_rules_on_1000_plans(release: str | None) -> None:
    result = verdicts("--plans", "1000", release=release)
    assert result["disagreements"] == []
    assert result["accepted"] == 1000
    assert result["spread_over_tensor"] > 25
    assert result["hybrid"] > 100
    assert result["refused"] > 3000
