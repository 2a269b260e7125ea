"""Checkpoints across splits on real Megatron: what would swap layers is refused, the rest resumes exactly."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.model.plan import Plan, ScheduleChoice, write_plan
from quartet_plugin.runtime.programs import ScheduleSpec, make_schedule
from quartet_plugin.schedule.choice import choice_of
from tests.megatron.entry_launch import MEGATRON_FLAGS, ROOT, Launch, launch, make_plan
from tests.megatron.support import Step, read_steps
from tests.runtime.pipelines import stage_costs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("recording_pretrain.py")
# Its checkpoints are written without a process that is started anew for each rank.
SAVING = Path(__file__).with_name("saving_pretrain.py")
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
NUM_STEPS, SAVED_AT = 6, 3
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


def sharded(*split: int) -> Plan:
    """Two stages with the distributed optimizer."""
    plan = make_plan(split=split, pipeline=2)
    return replace(plan, layout=replace(plan.layout, distributed_optimizer=True))


def snake() -> Plan:
    """Three chunks a rank, back and forth, under our own runtime: every stage as large as in a loop."""
    placement = (0, 1, 1, 0, 0, 1)
    costs = stage_costs(placement)
    order = make_schedule(ScheduleSpec(costs=costs), 4)
    plan = loop()
    choice = choice_of(order, costs, with_orders=True)
    return replace(plan, schedule=ScheduleChoice(name="custom", custom=choice))


def loop() -> Plan:
    """Three chunks a rank, as Megatron places and orders them."""
    plan = make_plan(split=(1,) * 6, pipeline=2, chunks=3, group=2)
    return replace(plan, layout=replace(plan.layout, distributed_optimizer=True))


EVEN, UNEVEN = sharded(3, 3), sharded(4, 2)


def train(plan: Plan, folder: Path, *flags: str, script: Path = SCRIPT) -> Launch:
    """The example with the plan, as `quartet train` starts it."""
    folder.mkdir(parents=True)
    write_plan(plan, path=folder / "plan.json")
    # Dropout's masks would depend on the layout.
    length = (
        *("--hidden-dropout", "0", "--attention-dropout", "0", "--eval-iters", "0"),
        *("--train-iters", str(NUM_STEPS), "--save-interval", str(SAVED_AT)),
    )
    ours = ("--quartet-device", "cpu", "--quartet-plan", str(folder / "plan.json"))
    return launch(2, [str(folder / "steps"), *MEGATRON_FLAGS, *length, *flags, *ours], script=script)


def last_steps(folder: Path) -> list[Step]:
    """The steps after the checkpoint, from a rank that has the loss."""
    ranks = read_steps(folder / "steps").values()
    steps = next(steps for steps in ranks if steps[0].loss is not None)
    return steps[-(NUM_STEPS - SAVED_AT) :]


def saved(folder: Path, *flags: str, plan: Plan = EVEN, script: Path = SAVING) -> Path:
    """A run that left a checkpoint in its middle and went on."""
    done = train(plan, folder, *flags, "--save", str(folder / "ckpt"), script=script)
    assert done.code == 0, done.output[-3000:]
    return folder


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("default") / "run", script=SCRIPT)


@pytest.fixture(scope="module")
def reshardable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("reshardable") / "run", RESHARDABLE)


def load(plan: Plan, folder: Path, source: Path, *flags: str) -> Launch:
    where = ("--load", str(source / "ckpt"), "--ckpt-step", str(SAVED_AT), "--exit-on-missing-checkpoint")
    return train(plan, folder, *where, *flags)


def assert_continues(folder: Path, source: Path) -> None:
    resumed, expected = last_steps(folder), last_steps(source)
    assert len(resumed) == NUM_STEPS - SAVED_AT
    assert [one.loss for one in resumed] == pytest.approx([one.loss for one in expected], rel=1e-6)
    assert [one.grad_norm for one in resumed] == pytest.approx([one.grad_norm for one in expected], rel=1e-6)


def test_the_stages_lie_beside_the_checkpoint(default: Path) -> None:
    content = json.loads((default / "ckpt" / f"iter_{SAVED_AT:07d}" / "quartet.json").read_text())
    assert (content["layers"], content["placement"]) == ([3, 3], [0, 1])


def test_the_default_form_is_refused_under_another_split(default: Path, tmp_path: Path) -> None:
    done = load(UNEVEN, tmp_path / "run", default)
    assert done.code != 0
    told = [line for line in done.told if "checkpoint" in line]
    assert len(told) == 1, done.output[-3000:]
    assert RESHARDABLE in told[0]
    assert "split 3+3" in told[0]
    assert not list((tmp_path / "run").glob("steps/*.json"))


def test_the_default_form_resumes_under_its_own_split(default: Path, tmp_path: Path) -> None:
    done = load(EVEN, tmp_path / "run", default)
    assert done.code == 0, done.output[-3000:]
    assert_continues(tmp_path / "run", default)


def test_the_fully_reshardable_form_resumes_under_another_split(reshardable: Path, tmp_path: Path) -> None:
    done = load(UNEVEN, tmp_path / "run", reshardable, RESHARDABLE)
    assert done.code == 0, done.output[-3000:]
    assert_continues(tmp_path / "run", reshardable)


def test_state_behind_a_padded_bucket_resumes_under_another_split(tmp_path: Path) -> None:
    """The tied embedding lies in a bucket of its own, behind that of layers and positions, which 34 pad."""
    shape = replace(EVEN.shape, max_position_embeddings=34)
    even, uneven = (
        replace(plan, shape=shape, made_for=replace(plan.made_for, shape=shape)) for plan in (EVEN, UNEVEN)
    )
    flags = (RESHARDABLE, "--max-position-embeddings", "34")
    source = saved(tmp_path / "source", *flags, plan=even)
    done = load(uneven, tmp_path / "run", source, *flags)
    assert done.code == 0, done.output[-3000:]
    assert_continues(tmp_path / "run", source)


def test_weights_alone_load_under_another_split(default: Path, tmp_path: Path) -> None:
    done = load(UNEVEN, tmp_path / "run", default, "--no-load-optim")
    assert done.code == 0, done.output[-3000:]
    assert last_steps(tmp_path / "run")[0].loss == pytest.approx(last_steps(default)[0].loss, rel=1e-6)


def test_a_snake_in_the_default_form_is_refused_under_a_loop(tmp_path: Path) -> None:
    # Every buffer is equally large: Megatron itself would load other layers' state without a word.
    source = saved(tmp_path / "source", plan=snake())
    content = json.loads((source / "ckpt" / f"iter_{SAVED_AT:07d}" / "quartet.json").read_text())
    assert content["placement"] == [0, 1, 1, 0, 0, 1]
    done = load(loop(), tmp_path / "run", source)
    assert done.code != 0
    told = [line for line in done.told if "checkpoint" in line]
    assert len(told) == 1, done.output[-3000:]
    assert "placed on 0,1,1,0,0,1" in told[0]
    assert not list((tmp_path / "run").glob("steps/*.json"))


@pytest.mark.parametrize("is_snake", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_snake_resumes_as_a_loop_and_a_loop_as_a_snake_where_all_is_reshardable(
    is_snake: bool, tmp_path: Path
) -> None:
    first, second = (snake(), loop()) if is_snake else (loop(), snake())
    source = saved(tmp_path / "source", RESHARDABLE, plan=first)
    done = load(second, tmp_path / "run", source, RESHARDABLE)
    assert done.code == 0, done.output[-3000:]
    assert_continues(tmp_path / "run", source)


def converted(source: Path, new: Path, plan: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    """`quartet convert` of the checkpoint in the source's middle."""
    script = ROOT / "examples" / "pretrain_gpt.py"
    length = ("--hidden-dropout", "0", "--attention-dropout", "0", "--train-iters", str(NUM_STEPS))
    command = (*TORCHRUN, str(script), *MEGATRON_FLAGS, *length, *flags)
    where = (str(source / "ckpt" / f"iter_{SAVED_AT:07d}"), "-o", str(new), "--to", str(plan))
    return subprocess.run(
        [Path(sys.executable).with_name("quartet"), "convert", *where, "--device", "cpu", "--", *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_snake_is_converted_to_a_loop(tmp_path: Path) -> None:
    source = saved(tmp_path / "snake", RESHARDABLE, plan=snake())
    target = tmp_path / "loop.json"
    write_plan(loop(), path=target)
    done = converted(source, tmp_path / "new" / "ckpt", target)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    beside = json.loads((tmp_path / "new" / "ckpt" / f"iter_{SAVED_AT:07d}" / "quartet.json").read_text())
    assert beside["placement"] == [0, 1, 0, 1, 0, 1]
    done_again = load(loop(), tmp_path / "run", tmp_path / "new", RESHARDABLE)
    assert done_again.code == 0, done_again.output[-3000:]
    assert_continues(tmp_path / "run", source)


@pytest.mark.nightly
def test_the_default_form_is_converted_on_its_own_stages_alone(default: Path, tmp_path: Path) -> None:
    for name, plan in (("even", EVEN), ("uneven", UNEVEN)):
        write_plan(plan, path=tmp_path / f"{name}.json")
    refused = converted(default, tmp_path / "refused", tmp_path / "uneven.json")
    assert refused.returncode == 2, (refused.stdout + refused.stderr)[-3000:]
    told = [line for line in refused.stderr.splitlines() if line.startswith("quartet: ") and "split" in line]
    assert told
    assert "quartet convert" in told[-1]
    assert not (tmp_path / "refused").exists()
    done = converted(default, tmp_path / "new" / "ckpt", tmp_path / "even.json")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    elsewhere = load(UNEVEN, tmp_path / "run", tmp_path / "new", RESHARDABLE)
    assert elsewhere.code == 0, elsewhere.output[-3000:]
    assert_continues(tmp_path / "run", default)
