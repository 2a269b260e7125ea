"""A plan whose runtime lacks one hook is no measurement of that plan."""

from pathlib import Path

import pytest

from quartet_plugin.errors import QuartetError
from quartet_plugin.megatron.seams import Seam, declared
from quartet_plugin.model.plan import write_plan
from tests.megatron.entry_launch import MEGATRON_FLAGS, launch, write_trial
from tests.megatron.runtime.test_plan import custom_plan, difference_of
from tests.megatron.runtime.without_hook import DROPPED

# What a step of ZB-V with tied embeddings needs. Not here: hooks that touch no step. `evaluate` only prints a
# loss, and the gradient hook only lets reductions start earlier (test_training.py); the tokenizer's check
# only refuses (test_entry.py), the checkpoint guard is of training alone (test_checkpoint_guard.py), and an
# interleaved runtime never calls the other schedule.
HOOKS: tuple[Seam, ...] = (
    declared.SCHEDULES[0],
    declared.TRAIN_STEP,
    declared.LINEAR,
    declared.DDP_INIT,
    declared.FROM_STR,
    declared.IS_PP_LAST_STAGE,
    declared.GET_PP_LAST_RANK,
    declared.IS_FIRST,
    declared.IS_LAST,
    declared.INITIALIZE,
    declared.GET_OPTIMIZER,
    declared.WORD_EMBEDDING_GRADS,
)

# Tried in every run: the order of actions, the split backward, the split. The others nightly.
FIRST = (declared.SCHEDULES[0], declared.LINEAR, declared.FROM_STR)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "hook",
    [
        pytest.param(hook, id=hook.name, marks=pytest.mark.slow if hook in FIRST else pytest.mark.nightly)
        for hook in HOOKS
    ],
)
def test_without_a_hook_there_is_no_measurement_of_the_plan(
    hook: Seam, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DROPPED, hook.name)
    assert is_measured(tmp_path) is False


@pytest.mark.slow
def test_with_every_hook_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DROPPED, "none")
    assert is_measured(tmp_path)


def is_measured(folder: Path) -> bool:
    """Whether both ranks of a trial report all iterations, and did as the plan says."""
    plan = custom_plan()
    trial = write_trial(folder, measure=3, plan=plan)
    write_plan(plan, path=folder / "plan.json")
    ours = ["--quartet-plan", str(folder / "plan.json"), "--quartet-trial", str(trial)]
    flags = [*MEGATRON_FLAGS, *ours, "--quartet-device", "cpu", "--distributed-timeout-minutes", "1"]
    done = launch(
        2, flags, folder=folder, entry=("-m", "tests.megatron.runtime.without_hook"), timeout_s=150.0
    )
    if len(done.ranks) < 2 or any(len(rank["iterations"]) < 3 for rank in done.ranks.values()):
        return False
    try:
        difference = difference_of(plan, folder)
    except QuartetError:
        return False
    print(difference)
    return difference is None
