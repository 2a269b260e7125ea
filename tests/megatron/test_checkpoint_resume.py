"""Checkpoints across splits on real Megatron: what would swap layers is refused, the rest resumes exactly."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.model.plan import Plan, write_plan
from tests.megatron.entry_launch import MEGATRON_FLAGS, Launch, launch, make_plan
from tests.megatron.support import Step, read_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("recording_pretrain.py")
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
NUM_STEPS, SAVED_AT = 6, 3


def sharded(*split: int) -> Plan:
    """Two stages with the distributed optimizer."""
    plan = make_plan(split=split, pipeline=2)
    return replace(plan, layout=replace(plan.layout, distributed_optimizer=True))


EVEN, UNEVEN = sharded(3, 3), sharded(4, 2)


def train(plan: Plan, folder: Path, *flags: str) -> Launch:
    """The example with the plan, as `quartet train` starts it."""
    folder.mkdir(parents=True)
    write_plan(plan, path=folder / "plan.json")
    # Dropout's masks would depend on the layout.
    length = (
        *("--hidden-dropout", "0", "--attention-dropout", "0", "--eval-iters", "0"),
        *("--train-iters", str(NUM_STEPS), "--save-interval", str(SAVED_AT)),
    )
    ours = ("--quartet-device", "cpu", "--quartet-plan", str(folder / "plan.json"))
    return launch(2, [str(folder / "steps"), *MEGATRON_FLAGS, *length, *flags, *ours], script=SCRIPT)


def last_steps(folder: Path) -> list[Step]:
    """The steps after the checkpoint, from the rank that has the loss."""
    ranks = read_steps(folder / "steps").values()
    (steps,) = [steps for steps in ranks if steps[0].loss is not None]
    return steps[-(NUM_STEPS - SAVED_AT) :]


def saved(folder: Path, *flags: str) -> Path:
    """A run under the even split that left a checkpoint in its middle and went on."""
    done = train(EVEN, folder, *flags, "--save", str(folder / "ckpt"))
    assert done.code == 0, done.output[-3000:]
    return folder


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("default") / "run")


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


def test_weights_alone_load_under_another_split(default: Path, tmp_path: Path) -> None:
    done = load(UNEVEN, tmp_path / "run", default, "--no-load-optim")
    assert done.code == 0, done.output[-3000:]
    assert last_steps(tmp_path / "run")[0].loss == pytest.approx(last_steps(default)[0].loss, rel=1e-6)
