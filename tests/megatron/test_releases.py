"""Real training with every release and with changed trees: tuned, and trained with the winner.

Each test leaves what it saw of a release in the folder that QUARTET_MATRIX names; `make support-matrix` makes
the table of docs/support.md of it.
"""

import datetime
import json
import os
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.megatron.doctor import CUSTOM_SCHEDULES
from quartet_plugin.model.plan import Plan, read_plan
from quartet_plugin.space.features import Axis
from tests.megatron.clones import INSTALLED, VARIANTS, make_clone, run_there, training_command

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]

CONFIG = """\
run: tuned
search: {{pipeline_parallel: [1, 2], virtual_stages: 1, schedule: {schedule}}}
trial: {{warmup: 1, measure: 3, deadline_s: 300}}
study: {{trials: {trials}, top_k: 1, rounds: 3}}
device: cpu
"""
PIPELINE = ("--pipeline-model-parallel-size", "2")
CUSTOM = [name for name, variant in VARIANTS.items() if variant.state == "works"]


def record(release: str, states: dict[str, str]) -> None:
    """Leave the states of axes for the matrix, where one is being made."""
    folder = os.environ.get("QUARTET_MATRIX")
    if folder:
        path = Path(folder, f"{release}.json")
        known = json.loads(path.read_text()) if path.exists() else {}
        today = datetime.date.today().isoformat()
        path.write_text(json.dumps({**known, **states, "date": today}, indent=1))


def tune(clone: Path, *, schedule: str, trials: int, options: tuple[str, ...] = ()) -> tuple[str, Path]:
    """Tune the clone's command; its output and the run's folder."""
    (clone / "q.yaml").write_text(CONFIG.format(schedule=schedule, trials=trials))
    words = ("quartet", "tune", *options, "--config", "q.yaml", "--run-dir", "runs", "--")
    done = run_there(clone, *words, *training_command(*PIPELINE), timeout_s=2000)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout, clone / "runs" / "tuned"


def finished_plans(run: Path) -> list[Plan]:
    """The plans of the run's trials that trained."""
    results = sorted(run.glob("trials/*/attempt-*/result.json"))
    good = [path.parent for path in results if json.loads(path.read_text())["outcome"] in ("OK", "UNSTABLE")]
    return [read_plan(folder / "plan.json") for folder in good if (folder / "plan.json").exists()]


def axes_of(plan: Plan) -> set[str]:
    """The axes that a plan changes in the command."""
    baseline = plan.made_for.baseline
    changed = {
        Axis.SPLIT: plan.split != baseline.split,
        Axis.MAPPING: not plan.mapping.is_stock,
        Axis.DEGREES: plan.layout.tensor_parallel != baseline.layout.tensor_parallel
        or plan.layout.pipeline_parallel != baseline.layout.pipeline_parallel,
        Axis.MICRO_BATCH: plan.layout.micro_batch_size != baseline.layout.micro_batch_size,
    }
    return {axis.value for axis, is_changed in changed.items() if is_changed}


@pytest.mark.parametrize("name", VARIANTS)
def test_it_is_tuned_over_native_axes_and_trains_with_a_plan(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    clone = make_clone(tmp_path / "Megatron-LM", variant)
    output, run = tune(clone, schedule="[1f1b, no-pipelining]", trials=6)
    if variant.state == "kept":
        assert "changed source (megatron." in output
    plans = finished_plans(run)
    changed = set().union(*(axes_of(plan) for plan in plans))
    assert {"split", "degrees"} <= changed
    best = run / "best" / "plan.json"
    plan = best if best.exists() else run / "trials" / "000001" / "attempt-1" / "plan.json"
    words = ("quartet", "train", "--device", "cpu", "--plan", str(plan), "--")
    done = run_there(clone, *words, *training_command(*PIPELINE, "--train-iters", "3"))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "iteration        3/       3" in done.stdout
    record(name, {**dict.fromkeys(changed, "works"), CUSTOM_SCHEDULES: variant.state})


@pytest.mark.parametrize("name", CUSTOM)
def test_custom_schedules_pass_the_gate(name: str, tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "Megatron-LM", VARIANTS[name])
    output, run = tune(clone, schedule="[zb-h1]", trials=1)
    assert "parity check of zb-h1 (linear) passed: losses" in output
    # In the trial itself, which is made twice where its times scatter.
    assert {plan.schedule.label for plan in finished_plans(run)} == {"zb-h1"}
    assert not list((run / "parity").rglob("attempt-*"))
    record(name, {CUSTOM_SCHEDULES: "works"})


def test_a_changed_source_is_accepted_under_the_gate(tmp_path: Path) -> None:
    name = f"{INSTALLED} with a changed line"
    clone = make_clone(tmp_path / "Megatron-LM", VARIANTS[name])
    output, run = tune(clone, schedule="[zb-h1]", trials=1, options=("--accept-changed-source",))
    assert "parity check of zb-h1 (linear) passed: losses" in output
    assert [plan.schedule.label for plan in finished_plans(run)] == ["zb-h1"]
    output, run = tune(clone, schedule="[zb-h1]", trials=2, options=("--resume",))
    path = "megatron.core.pipeline_parallel.schedules.backward_step"
    assert f"changed source ({path}) is accepted as in an earlier session" in output
    # A trial is made twice where its times scatter.
    assert {plan.schedule.label for plan in finished_plans(run)} == {"zb-h1"}
    assert {plan.provenance.trial for plan in finished_plans(run)} == {1, 2}
    file = clone / "megatron" / "core" / "pipeline_parallel" / "schedules.py"
    file.write_text(file.read_text().replace("len('changed')", "len('changed again')"))
    (clone / "q.yaml").write_text(CONFIG.format(schedule="[zb-h1]", trials=3))
    words = ("quartet", "tune", "--resume", "--config", "q.yaml", "--run-dir", "runs", "--")
    done = run_there(clone, *words, *training_command(*PIPELINE), timeout_s=2000)
    assert done.returncode == 4, done.stdout + done.stderr
    assert f"{path}: source differs" in done.stderr
    assert "--accept-changed-source allows" in done.stderr


def test_the_doctor_names_the_changed_function_and_shows_its_difference(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "Megatron-LM", VARIANTS[f"{INSTALLED} with a changed line"])
    stock = make_clone(tmp_path / "stock", VARIANTS[INSTALLED])
    done = run_there(clone, "quartet", "doctor", "--against", str(stock), "-f", "json")
    assert done.returncode == 0, done.stderr
    (node,) = json.loads(done.stdout)["nodes"]
    (report,) = node["frameworks"]
    path = "megatron.core.pipeline_parallel.schedules.backward_step"
    assert [item["path"] for item in report["functions"] if item["fault"] is not None] == [path]
    assert "+    _ = len('changed')" in report["differences"][path]
    states: dict[str, Any] = {row["axis"]: row["state"] for row in report["axes"]}
    assert {axis for axis, state in states.items() if state != "works"} == {CUSTOM_SCHEDULES}
