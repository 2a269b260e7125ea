"""`quartet train --schedule`: refusals before a process starts, the gate once, then a plan as any other."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli import plan_checks
from quartet_plugin.cli import train as train_command
from quartet_plugin.cli.main import main
from quartet_plugin.model.plan import Plan, read_plan, write_plan
from quartet_plugin.model.receipt import Receipt
from quartet_plugin.model.schema import dump
from quartet_plugin.trial.parity import NotAsPlannedError, ParityGate
from quartet_plugin.trial.request import TrialResult
from quartet_plugin.tuner.trial_backend import LocalBackend
from tests.cli.test_train import script
from tests.model.plans import PLAN
from tests.model.test_receipt import FAILED, receipt_of
from tests.space.jobs import make_job, make_layout, make_nodes
from tests.space.test_written_schedules import by_hand, edited, saved

FLAGS = (
    "--num-layers 8 --micro-batch-size 8 --global-batch-size 32 --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2"
)
JOB = make_job(layout=make_layout(micro_batch_size=8, virtual_stages=2))


class FakeGate:
    """The runs of the gate: how often the command was run, and which plans were compared with it."""

    def __init__(self, *, job: Any = JOB, passes: bool = True, executes: bool = True) -> None:
        self.job, self.passes, self.executes = job, passes, executes
        self.num_runs = 0
        self.checked: list[Plan] = []
        self.trained: list[Sequence[str]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ParityGate, "command_result", self.command_result)
        monkeypatch.setattr(ParityGate, "check", self.check)
        monkeypatch.setattr(LocalBackend, "nodes", lambda *_: make_nodes(2))
        monkeypatch.setattr(train_command, "run_wrapped", self.train)
        monkeypatch.setattr(plan_checks, "framework_version", lambda name: None)

    def command_result(self, *, is_compared: bool = True) -> TrialResult:
        self.num_runs += 1
        return TrialResult.__new__(TrialResult) if self.job is None else _result(self.job)

    def check(self, plan: Plan) -> Receipt:
        self.checked.append(plan)
        if not self.executes:
            raise NotAsPlannedError("rank 0: executed schedule 1f1b, planned zb-v")
        failed: dict[str, Any] = {"verdict": "failed", "failure": FAILED}
        return receipt_of(plan_key=plan.key, plan_digest=plan.digest, **({} if self.passes else failed))

    def train(self, command: Any, *, flags: Sequence[str], device: str) -> int:
        self.trained.append(flags)
        return 0


def _result(job: Any) -> Any:
    class Result:
        folder = Path("attempt-1")

    Result.job = dump(job)  # type: ignore[attr-defined]
    return Result()


def train(path: Path, *options: str, flags: str = FLAGS, processes: int = 2) -> int:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command = [*torchrun, script(path.parent), "0", *flags.split()]
    return main(["train", "--schedule", str(path), *options, "--", *command])


def test_a_plan_of_the_users_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = FakeGate()
    gate.install(monkeypatch)
    path = saved(tmp_path)
    plan = path.with_suffix(".plan.json")
    write_plan(PLAN, path=plan)
    assert train(path) == 2
    assert "holds another plan; rename it" in capsys.readouterr().err
    assert read_plan(plan) == PLAN
    plan.write_text("{}")
    assert train(path) == 2
    assert "remove it: the schedule's plan is written there" in capsys.readouterr().err
    assert gate.num_runs == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            FLAGS.replace("parallel-size 2", "parallel-size 1"),
            "num_devices: 2; must be the pipeline parallel size of the command, 1",
        ),
        (
            FLAGS.replace("rank 2", "rank 4"),
            "placement: 4 stages, 2 a device; must be the stages a device of the command, 4",
        ),
        (FLAGS.replace("layers 8", "layers 7"), "layers_per_stage: sums to 10; must be the 7 layers"),
        (FLAGS.replace("size 32", "size 64"), "num_microbatches: 4; must be the microbatches per iteration"),
    ],
)
def test_other_counts_are_refused_before_a_process_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: str, words: str
) -> None:
    path = saved(tmp_path)
    assert train(path, flags=flags) == 2
    shown = capfd.readouterr()
    assert f"{path}: {words}" in shown.err
    assert len(shown.err.strip().splitlines()) == 1
    assert "began" not in shown.out
    assert {one.name for one in tmp_path.iterdir()} == {path.name, "train.py"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers_per_stage": [4, 0, 3, 3]}, "layers_per_stage[1]: 0; a schedule with an empty stage"),
        ({"routes": [[0, 1, 1, 0], [0, 1, 1, 0]], "route_of_microbatch": [0, 1, 0, 1]}, "routes: two copies"),
        (
            {"orders": [["(0F1;0B0)OVERLAP_F_B"], ["1F0"]]},
            "orders: overlapped pairs can only be simulated",
        ),
        ({"placement": [0, 1, 1, 1]}, "placement"),
        ({"num_microbatches": 0}, "num_microbatches"),
    ],
)
def test_a_file_that_cannot_run_is_refused_before_a_process_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    assert train(saved(tmp_path, **changes)) == 2
    shown = capfd.readouterr()
    assert words in shown.err
    assert "began" not in shown.out


def test_a_plan_beside_a_schedule_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--plan", "a.json", "--schedule", "b.json", "--", "torchrun", "x.py"]) == 2
    assert "a plan has a schedule, so give only one" in capsys.readouterr().err


def test_the_gate_runs_once_and_the_plan_trains(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = FakeGate()
    gate.install(monkeypatch)
    path = saved(tmp_path, edited(by_hand()))
    assert train(path) == 0
    assert "no parity receipt for this command; running `quartet check` first" in capfd.readouterr().err
    plan = read_plan(tmp_path / "mine.plan.json")
    assert plan == gate.checked[0]
    assert plan.layout == plan.made_for.baseline.layout == JOB.layout
    assert plan.split.transformer_layers_per_stage == (3, 1, 2, 2)
    assert plan.mapping.is_stock
    custom = plan.schedule.custom
    assert custom is not None
    assert custom.orders is not None
    assert (tmp_path / "mine.plan.parity.json").exists()
    assert gate.trained == [["--quartet-plan", str(tmp_path / "mine.plan.json")]]
    # The second start finds plan and receipt.
    assert train(path, flags=f"{FLAGS} --lr 1e-3 --load checkpoints") == 0
    assert capfd.readouterr().err == ""
    assert (gate.num_runs, len(gate.checked), len(gate.trained)) == (1, 1, 2)


@pytest.mark.parametrize("added", ["", "--use-distributed-optimizer"])
def test_another_schedule_or_command_is_checked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, added: str
) -> None:
    gate = FakeGate()
    gate.install(monkeypatch)
    path = saved(tmp_path)
    assert train(path) == 0
    if not added:
        saved(tmp_path, edited(by_hand()))
    assert train(path, flags=f"{FLAGS} {added}") == 0
    assert (gate.num_runs, len(gate.checked)) == (2, 2)


@pytest.mark.parametrize(
    "flag", ["--micro-batch-size", "--expert-model-parallel-size", "--tensor-model-parallel-size"]
)
@pytest.mark.parametrize("size", [0, -2])
def test_a_size_below_1_is_refused_before_a_process_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flag: str, size: int
) -> None:
    gate = FakeGate()
    gate.install(monkeypatch)
    path = saved(tmp_path)
    assert train(path) == 0
    capfd.readouterr()
    assert train(path, flags=f"{FLAGS} {flag} {size}") == 2
    assert f"{flag}: {size}; must be at least 1; correct the command" in capfd.readouterr().err
    assert (gate.num_runs, len(gate.trained)) == (1, 1)


def test_a_failed_check_refuses_with_its_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = FakeGate(passes=False)
    gate.install(monkeypatch)
    assert train(saved(tmp_path)) == 2
    assert "does not train as stock does: step 2" in capfd.readouterr().err
    assert gate.trained == []
    assert train(saved(tmp_path)) == 2
    assert len(gate.checked) == 2


def test_a_schedule_that_the_runtime_left_to_the_framework_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = FakeGate(executes=False)
    gate.install(monkeypatch)
    assert train(saved(tmp_path)) == 3
    assert gate.trained == []
    assert not (tmp_path / "mine.plan.parity.json").exists()


def test_what_only_the_ranks_know_is_refused_in_the_same_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = FakeGate(job=make_job(layout=make_layout(micro_batch_size=4, virtual_stages=2)))
    gate.install(monkeypatch)
    assert train(saved(tmp_path), flags="--yaml-cfg model.yaml") == 2
    assert (
        "num_microbatches: 4; must be the microbatches per iteration of the command, 8"
        in capfd.readouterr().err
    )
    assert (gate.checked, gate.trained) == ([], [])


def test_a_batch_that_changes_in_steps_is_refused_before_a_process_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = FakeGate()
    gate.install(monkeypatch)
    steps = FLAGS.replace("--global-batch-size 32", "--step-batch-size-schedule 0:16,1K:32")
    assert train(saved(tmp_path), flags=steps) == 2
    assert "--step-batch-size-schedule cannot be used with a plan: Megatron refuses" in capfd.readouterr().err
    assert gate.num_runs == 0


def test_a_feature_without_custom_schedules_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_layout(micro_batch_size=8, virtual_stages=2)
    gate = FakeGate(job=make_job(layout=layout, features=("fsdp", "rampup_batch_size")))
    gate.install(monkeypatch)
    assert train(saved(tmp_path)) == 2
    assert "custom schedules cannot run, because of fsdp" in capfd.readouterr().err


def test_the_check_can_be_skipped_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = FakeGate()
    gate.install(monkeypatch)
    assert train(saved(tmp_path), "--skip-parity-check") == 0
    assert "parity check skipped" in capfd.readouterr().err
    assert (gate.num_runs, gate.checked, len(gate.trained)) == (1, [], 1)
    assert train(saved(tmp_path), "--skip-parity-check") == 0
    assert gate.num_runs == 1
