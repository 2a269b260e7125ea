"""Every plan trains the same: real Megatron, one weights-only checkpoint, dropout off, compared as floats."""

import queue
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quartet_plugin.megatron.expert_loads import ExpertLoads
from quartet_plugin.megatron.parity import ParityMeter, save_weights
from quartet_plugin.model.plan import Plan, write_plan
from tests.megatron.entry_launch import MEGATRON_FLAGS, SCRIPT, Launch, launch, make_plan, write_trial
from tests.megatron.same_training import Alone, assert_same_training, reports_as_planned, train_alone

DP2 = make_plan(split=(6,), data=2)
OVERLAPPED = (
    replace(DP2.layout, distributed_optimizer=True)
    .with_setting("overlap_grad_reduce", True)
    .with_setting("overlap_param_gather", True)
    .with_setting("ddp_bucket_size", 2000)
)
PP2 = make_plan(split=(4, 2), pipeline=2)
BLOCK = (
    replace(PP2.layout, recompute="full")
    .with_setting("recompute_method", "block")
    .with_setting("recompute_num_layers", 2)
)
MODULES = replace(PP2.layout, recompute="selective").with_setting("recompute_modules", "core_attn+mlp")
PLANS = {
    "pp2": make_plan(split=(4, 2), pipeline=2),
    "tp2": make_plan(split=(6,), tensor=2),
    "dp2-overlapped": replace(DP2, layout=OVERLAPPED),
    "pp2-recompute": replace(PP2, layout=replace(PP2.layout, recompute="full")),
    "pp2-block": replace(PP2, layout=BLOCK),
    "pp2-dp2": make_plan(split=(2, 4), pipeline=2, data=2, micro_batch=1),
    "pp2-chunks2": make_plan(split=(1, 2, 2, 1), pipeline=2, chunks=2, group=4),
    # Rank 1 on slot 2, rank 2 on slot 3, rank 3 on slot 1: not its own inverse, and every stage differs.
    "pp4-permuted": make_plan(split=(2, 1, 3, 0), pipeline=4, order=(0, 2, 3, 1)),
}

# The output says whose each line is.
TEE = ("--tee", "3")

# Each of the others is a part of these, and runs nightly.
FIRST = ("dp2-overlapped", "pp2-block", "pp2-chunks2")


def train(
    plan: Plan,
    *,
    folder: Path,
    weights: Path,
    torchrun: tuple[str, ...] = (),
    command: Sequence[str] = MEGATRON_FLAGS,
    is_cold: bool = False,
    script: Path = SCRIPT,
) -> Launch:
    """Five iterations of the user's command with the plan, as a trial."""
    trial = write_trial(folder, measure=5, plan=plan, weights=weights)
    write_plan(plan, path=folder / "plan.json")
    flags = [*command, "--quartet-plan", str(folder / "plan.json"), "--quartet-trial", str(trial)]
    done = launch(
        plan.layout.world_size,
        [*flags, "--quartet-device", "cpu"],
        script=script,
        folder=folder,
        torchrun=torchrun,
        is_cold=is_cold,
    )
    assert done.code == 0, done.output[-3000:]
    assert "successfully loaded checkpoint" in done.output
    return done


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return train_alone(make_plan(split=(6,)), folder=tmp_path_factory.mktemp("one"), command=MEGATRON_FLAGS)


# The mapping is only held here, so it runs with every test; the others' splits and schedules elsewhere too.
@pytest.mark.parametrize(
    "name",
    [
        "pp4-permuted",
        *(pytest.param(name, marks=pytest.mark.slow) for name in FIRST),
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in sorted(PLANS.keys() - FIRST - {"pp4-permuted"})
        ),
    ],
)
def test_plan_trains_as_one_process_does(name: str, alone: Alone, tmp_path: Path) -> None:
    plan = PLANS[name]
    check(plan, train(plan, folder=tmp_path, weights=alone.weights, torchrun=TEE), alone.launch)
    reports_as_planned(plan, tmp_path)


@pytest.mark.slow
def test_recomputed_modules_train_as_one_process_does(tmp_path: Path) -> None:
    # With biases Megatron's checkpoint of the FFN does not end.
    command = [*MEGATRON_FLAGS, "--disable-bias-linear"]
    alone = train_alone(make_plan(split=(6,)), folder=tmp_path / "one", command=command)
    plan = replace(PP2, layout=MODULES)
    folder = tmp_path / "modules"
    check(
        plan,
        train(plan, folder=folder, weights=alone.weights, torchrun=TEE, command=command),
        alone.launch,
    )


@pytest.mark.nightly
def test_ranks_that_import_for_themselves_train_alike(alone: Alone, tmp_path: Path) -> None:
    plan = PLANS["pp4-permuted"]
    done = train(plan, folder=tmp_path, weights=alone.weights, torchrun=TEE, is_cold=True)
    check(plan, done, alone.launch)


def check(plan: Plan, done: Launch, reference: Launch) -> None:
    """It trained as the reference did, with all that the plan says."""
    assert_same_training(plan, done, reference)
    job = next(content["job"] for content in done.ranks.values() if content["rank"] == 0)
    assert tuple(job["split"]["transformer_layers_per_stage"]) == plan.split.transformer_layers_per_stage
    assert job["layout"]["virtual_stages"] == plan.layout.virtual_stages
    read_back = {setting["name"]: setting["value"] for setting in job["settings"]}
    assert {x.name: read_back[x.name] for x in plan.layout.settings or ()} == {
        x.name: x.value for x in plan.layout.settings or ()
    }
    for name in ("recompute", "distributed_optimizer", "sequence_parallel"):
        assert job["layout"][name] == getattr(plan.layout, name)
    assert job["schedule"] == {"name": plan.schedule.name, "group": plan.schedule.group}
    assert all(content["plan_key"] == plan.key for content in done.ranks.values())
    check_places(plan, done)


def check_places(plan: Plan, done: Launch) -> None:
    """Each process plays the rank of its slot, and holds the stage that Megatron itself says it holds."""
    for rank, slot in enumerate(plan.mapping.slots):
        assert done.ranks[slot.local]["rank"] == rank
        assert done.ranks[slot.local]["local_rank"] == slot.local
    if plan.mapping.is_stock:
        return
    pattern = r"\[default(\d)\]: > number of parameters on .* model parallel rank \([0, ]*(\d)\)"
    stage_of_slot = {int(slot): int(stage) for slot, stage in re.findall(pattern, done.output)}
    assert stage_of_slot == {slot.local: rank for rank, slot in enumerate(plan.mapping.slots)}
    with_loss = [slot for slot, content in done.ranks.items() if content["iterations"][0]["loss"] is not None]
    assert with_loss == [plan.mapping.slots[-1].local]
    assert any(line.startswith("quartet: mapping: rank 0 on ") for line in done.told)


@pytest.mark.slow
def test_a_run_that_saves_its_weights_trains_as_a_run_that_loads_them(tmp_path: Path) -> None:
    """To the last bit, as the parity gate's reference and its plans do."""
    plan, command = PLANS["dp2-overlapped"], [*MEGATRON_FLAGS, "--bf16"]
    saving = train_alone(plan, folder=tmp_path / "saving", command=command)
    loading = train(plan, folder=tmp_path / "loading", weights=saving.weights, command=command)
    assert "successfully loaded checkpoint" in saving.launch.output
    assert (loading.losses(), loading.grad_norms()) == (saving.launch.losses(), saving.launch.grad_norms())
    for rank, sheet in loading.sheets.items():
        assert sheet["steps"] == saving.launch.sheets[rank]["steps"]


def test_a_run_that_saves_its_weights_loads_them_and_saves_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron saves into `--save` where the number of microbatches changes: the plan would load that."""
    args = SimpleNamespace(save="/weights", load=None)
    calls: list[tuple[Any, ...]] = []

    def save_checkpoint(_iteration: int, *objects: Any) -> None:
        calls.append(("save", args.save, args.load, *objects[:3]))

    def load_checkpoint(*objects: Any) -> None:
        calls.append(("load", args.save, args.load, *objects))

    # A script may replace the name by which Megatron loads at a start, so that is the one to call.
    modules: dict[str, dict[str, Any]] = {
        "checkpointing": {"save_checkpoint": save_checkpoint},
        "training": {"load_checkpoint": load_checkpoint},
        "global_vars": {"get_args": lambda: args},
    }
    for name, contents in modules.items():
        monkeypatch.setitem(sys.modules, f"megatron.training.{name}", SimpleNamespace(**contents))
    monkeypatch.setattr(ExpertLoads, "begin", lambda _, model: calls.append(("count", model)))
    model, optimizer, scheduler = object(), object(), object()
    meter = ParityMeter(cast(Any, SimpleNamespace(spec=SimpleNamespace(save_weights="/weights"))))
    meter._begin(model, optimizer, scheduler)
    assert calls == [
        ("save", "/weights", None, model, optimizer, scheduler),
        ("load", None, "/weights", model, optimizer, scheduler),
        ("count", model),
    ]
    assert args.save is None


def test_weights_are_written_without_another_process() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    def save_checkpoint(*_: object) -> None:
        queues.append(filesystem_async.get_write_results_queue())

    queues: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            sys.modules, "megatron.training.checkpointing", SimpleNamespace(save_checkpoint=save_checkpoint)
        )
        save_weights(None, None, None)
    assert [type(given) for given in queues] == [queue.Queue]
    # What the command saves itself later, perhaps from a process of its own, has Megatron's own queue.
    assert filesystem_async._results_queue is None
