"""Trials of real Megatron that are forked from a trial server compute what those that are started anew do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet_plugin.launchers.command import parse_command
from quartet_plugin.launchers.local import LocalLauncher
from quartet_plugin.launchers.protocol import Launcher
from quartet_plugin.launchers.warm import WarmLauncher
from quartet_plugin.model.plan import Plan
from quartet_plugin.protocol.rank_files import RankFileReader
from quartet_plugin.trial.request import TrialRequest, TrialResult
from quartet_plugin.trial.runner import run_trial
from tests.megatron.entry_launch import MEGATRON_FLAGS, ROOT, SCRIPT
from tests.megatron.runtime.test_plan import custom_plan
from tests.megatron.test_parity_gate import TORCHRUN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmLauncher]:
    with WarmLauncher() as launcher:
        yield launcher


def measured(folder: Path, plan: Plan | None, launcher: Launcher) -> TrialResult:
    request = TrialRequest(
        folder=folder,
        command=parse_command([*TORCHRUN, str(SCRIPT), *MEGATRON_FLAGS], environment={}),
        plan=plan,
        warmup=1,
        measure=4,
        device="cpu",
        max_spread=10.0,
        cwd=ROOT,
    )
    return run_trial(request, launcher=launcher, is_subreaper=True)


@pytest.mark.parametrize("kind", [pytest.param("command", marks=pytest.mark.nightly), "custom"])
def test_losses_are_those_of_a_cold_start(tmp_path: Path, warm: WarmLauncher, kind: str) -> None:
    plans = {"command": None, "custom": custom_plan()}
    results = {
        name: measured(tmp_path / name, plans[kind], launcher)
        for name, launcher in (("warm", warm), ("cold", LocalLauncher()))
    }
    assert {name: result.start for name, result in results.items()} == {"warm": "warm", "cold": "cold"}
    assert [result.outcome for result in results.values()] == ["OK", "OK"], results["warm"].reason
    assert results["warm"].loss == results["cold"].loss
    assert results["warm"].grad_norm == results["cold"].grad_norm
    assert results["warm"].job == results["cold"].job
    peaks = [result.peak_memory_bytes for result in results.values()]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)
    executions = {
        name: [
            report.execution
            for _, report in sorted(
                RankFileReader(result.folder, attempt_id=result.attempt_id).scan().reports.items()
            )
        ]
        for name, result in results.items()
    }
    assert executions["warm"] == executions["cold"]
    assert len(executions["warm"]) == 2
