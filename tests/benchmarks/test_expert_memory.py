"""The table of predicted and measured peaks of models with experts."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import expert_memory
from benchmarks.expert_memory import CASES, MIB, Case, Row
from quartet_plugin.cost.memory import memory_by_device
from quartet_plugin.model.job_description import Experts
from quartet_plugin.model.schema import dump
from tests.space.jobs import make_job, make_layout

EXPERTS = Experts(num_experts=8, experts_per_token=2, ffn_hidden_size=64)
JOB = make_job(layout=make_layout(pipeline_parallel=1, data_parallel=2, expert_parallel=2), experts=EXPERTS)
TINY_JOB = replace(JOB, shape=replace(JOB.shape, vocab_size=128))


def test_an_error_is_of_the_measured_peak() -> None:
    row = Row(name="ep2", measured=200.0 * MIB, predicted=190.0 * MIB)
    assert row.error == pytest.approx(-0.05)
    assert expert_memory.line_of(row, width=5) == "ep2           200.0          190.0    -5.0%"
    worse = Row(name="pp2", measured=100.0 * MIB, predicted=109.0 * MIB)
    assert expert_memory.summary([row, worse]) == ("2 plans: mean error 7.0%, largest 9.0%; goal 8% each")


@pytest.mark.parametrize(("share", "code"), [(1.05, 0), (1.09, 1), (0.91, 1)])
def test_the_peak_beside_an_empty_process_is_compared(
    share: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Launches with tiny sizes say what a process holds without tensors, once for each number of ranks."""
    launched = []

    def trained(words: list[str]) -> SimpleNamespace:
        launched.append(words)
        is_tiny = words[-len(expert_memory.TINY.split()) :] == expert_memory.TINY.split()
        job = TINY_JOB if is_tiny else JOB
        run = expert_memory.run_of(job, num_processes=2)
        predicted = max(memory.total_bytes for memory in memory_by_device(run))
        size = 500 * MIB + predicted / (1.0 if is_tiny else share)
        return SimpleNamespace(peak_memory_bytes=round(size), job=dump(job))

    monkeypatch.setattr(expert_memory, "trained", trained)
    assert expert_memory.main(["--only", "ep2", "ep2, natural"]) == code
    assert len(launched) == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:3]] == ["ep2", "ep2, natural"]
    assert f"{share - 1:+.1%}" in lines[1]


def test_every_plan_has_a_name_and_its_routing() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert Path(CASES[0].words()[3]).name == "freeing_pretrain.py"
    forced = [case.name for case in CASES if expert_memory.FORCED in case.words()]
    assert forced == [case.name for case in CASES if "natural" not in case.name]
    assert Case(name="a", flags="--b 1", num_processes=4).words("--c")[1:3] == ["--nproc-per-node", "4"]
