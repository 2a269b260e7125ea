"""The first run on a GPU, as far as a machine without one can try it: limits, files, and the short steps."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from benchmarks.gpu_first_run.__main__ import left_out, run
from benchmarks.gpu_first_run.one_device import staged
from benchmarks.gpu_first_run.page import page
from benchmarks.gpu_first_run.steps import STEPS
from benchmarks.gpu_first_run.training import custom_plan
from quartet_plugin.schedule.placement import PlacementKind, kind_of
from tests.megatron.entry_launch import ROOT

VERSIONS = STEPS[0]


def test_the_steps_have_different_names_and_measures() -> None:
    from benchmarks.gpu_first_run.measure import MEASURES

    assert [step.name for step in STEPS] == list(MEASURES)
    assert all(0 < min(step.least_s) <= max(step.least_s) <= 2 * step.limit_s for step in STEPS)


@pytest.mark.parametrize(
    ("index", "device", "left_s", "is_brief", "reason"),
    [
        (0, "cpu", 600.0, False, None),
        (1, "cpu", 600.0, False, "needs a GPU"),
        (1, "cuda", 600.0, False, None),
        (0, "cuda", 2.0, False, "needs 5 s, 2 s are left"),
        (0, "cuda", -3.0, False, "needs 5 s, 0 s are left"),
        (5, "cuda", 600.0, True, "not one of the short steps"),
    ],
)
def test_what_is_left_out_is_said(
    index: int, device: Literal["cuda", "cpu"], left_s: float, is_brief: bool, reason: str | None
) -> None:
    assert left_out(STEPS[index], device=device, left_s=left_s, is_brief=is_brief) == reason


def at_startup(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every interpreter that is started from now on run a program first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_step_takes_interrupts_although_its_parent_ignores_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import pathlib, signal\npathlib.Path({!r}).write_text(str(signal.getsignal(signal.SIGINT)))"
    at_startup(tmp_path / "site", program.format(str(tmp_path / "handler")), monkeypatch)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run(replace(VERSIONS, name="nothing"), device="cpu", folder=tmp_path / "step", left_s=100.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "default_int_handler" in (tmp_path / "handler").read_text()


def test_a_step_ends_at_its_limit_and_a_broken_one_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as slowly:
        at_startup(tmp_path / "site", "import time\ntime.sleep(600)", slowly)
        slow = run(replace(VERSIONS, limit_s=0.1), device="cpu", folder=tmp_path / "slow", left_s=100.0)
    assert (slow["state"], slow["found"]) == ("out of time", {})
    broken = run(replace(VERSIONS, name="nothing"), device="cpu", folder=tmp_path / "broken", left_s=100.0)
    assert broken["state"] == "failed"
    assert "nothing" in broken["reason"]
    steps = {"slow": slow, "broken": broken}
    text = page(
        {
            "device": "cpu",
            "device_name": "cpu",
            "started": "2026-01-01 00:00 UTC",
            "wall_s": 3.0,
            "limit_s": 600.0,
            "steps": steps,
        }
    )
    assert "## slow: out of time" in text
    assert "KeyError" in text


@pytest.mark.parametrize(("name", "kind"), [("zb-h1", PlacementKind.LINEAR), ("zb-v", PlacementKind.V)])
def test_the_plans_are_made_without_starting_anything(name: str, kind: PlacementKind) -> None:
    from benchmarks.gpu_first_run import training

    words = [*training._SIZE["cpu"], *training._COMMON, *training.batch(2, 8)]
    plan = custom_plan(name, [*words, "--pipeline-model-parallel-size", "2"], num_processes=2)
    custom = plan.schedule.custom
    assert custom is not None
    assert kind_of(custom.placement, num_devices=2) is kind
    assert sum(plan.split.transformer_layers_per_stage) == 4


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_short_steps_run_on_the_cpu_and_the_others_are_named(tmp_path: Path) -> None:
    words = ["-m", "benchmarks.gpu_first_run", "--device", "cpu", "--brief", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=800, check=False
    )
    result = json.loads((tmp_path / "first-run.json").read_text())
    states = {name: step["state"] for name, step in result["steps"].items()}
    ran = {step.name for step in STEPS if step.is_brief}
    assert states == {step.name: "holds" if step.name in ran else "left out" for step in STEPS}, done.stdout
    assert done.returncode == 0
    named = done.stdout.splitlines()[-1].partition("; left out: ")[2].split(", ")
    assert set(named) == states.keys() - ran
    assert result["steps"]["communicators"]["reason"] == "needs a GPU"
    kinds = {name: found["kind"] for name, found in result["steps"]["failures"]["found"].items()}
    assert set(kinds.values()) == {"out-of-memory", "network"}
    assert "layer_times: holds" in (tmp_path / "first-run.md").read_text()


@dataclass
class DeviceTensor:
    """Stands for a tensor on a GPU; its `value` is what was written into it."""

    value: str
    is_cuda: bool = True
    shape: tuple[int, ...] = (1,)

    def cpu(self) -> str:
        return f"host copy of {self.value}"

    def new_empty(self, shape: tuple[int, ...], *, device: str) -> str:
        assert (shape, device) == ((1,), "cpu")
        return "host buffer"

    def copy_(self, host: str) -> None:
        self.value = host


def test_transfers_of_a_devices_tensors_go_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    posted: list[tuple[str, Any, int]] = []

    def transfer(name: str) -> Any:
        def post(host: Any, peer: int, *, group: Any, tag: int) -> Any:
            posted.append((name, host, peer))
            return SimpleNamespace(wait=lambda: posted.append((f"{name} waited", host, peer)))

        return post

    monkeypatch.setattr(dist, "isend", transfer("send"))
    monkeypatch.setattr(dist, "irecv", transfer("receive"))
    sent, received = DeviceTensor("activations"), DeviceTensor("nothing")
    operations = [
        SimpleNamespace(op=dist.isend, tensor=sent, peer=1, group=None, tag=0),
        SimpleNamespace(op=dist.irecv, tensor=received, peer=1, group=None, tag=0),
    ]
    works = staged(lambda _: [])(operations)
    assert posted == [("send", "host copy of activations", 1), ("receive", "host buffer", 1)]
    assert received.value == "nothing"
    for work in works:
        work.wait()
    assert received.value == "host buffer"
    assert sent.value == "activations"
    plain = [SimpleNamespace(tensor=SimpleNamespace(is_cuda=False))]
    assert staged(lambda given: [given])(plain) == [plain]
