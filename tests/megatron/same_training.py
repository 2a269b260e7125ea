"""What tests of plans that have to train as one process does share: weights, the comparison, the records."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan, ScheduleChoice, write_plan
from quartet_plugin.protocol.attempt_files import read_shared
from quartet_plugin.protocol.rank_files import RankReport, rank_file
from quartet_plugin.schedule.choice import choice_of
from quartet_plugin.schedule.named import named
from quartet_plugin.trial.as_planned import difference_from
from tests.megatron.entry_launch import SCRIPT, Launch, launch, write_trial
from tests.runtime.pipelines import stage_costs


@dataclass(frozen=True, slots=True)
class Alone:
    """A training, and a checkpoint of the weights alone that it began with."""

    weights: Path
    launch: Launch


def train_alone(plan: Plan, *, folder: Path, command: Sequence[str], script: Path = SCRIPT) -> Alone:
    """Five iterations of a plan; its first weights are kept and load under any layout."""
    weights = folder / "weights"
    trial = write_trial(folder, measure=5, plan=plan, save_weights=weights)
    write_plan(plan, path=folder / "plan.json")
    words = ["--quartet-plan", str(folder / "plan.json"), "--quartet-trial", str(trial)]
    flags = [*command, *words, "--quartet-device", "cpu"]
    done = launch(plan.layout.world_size, flags, script=script, folder=folder)
    assert done.code == 0, done.output[-3000:]
    assert (weights / "latest_checkpointed_iteration.txt").exists(), done.output[-2000:]
    return Alone(weights, done)


def assert_same_training(plan: Plan, done: Launch, reference: Launch) -> None:
    """Five losses and gradient norms are the reference's, up to rounding, and every expert's tokens.

    Prints the largest deviations.
    """
    tolerance = 5e-6 if plan.layout.tensor_parallel > 1 else 1e-6
    assert len(reference.losses()) == 5
    loss, norm = (
        max(abs(here / there - 1.0) for here, there in zip(*pair, strict=True))
        for pair in ((done.losses(), reference.losses()), (done.grad_norms(), reference.grad_norms()))
    )
    print(f"{plan.layout.label}: largest deviation of the loss {loss:.1e}, of the gradient norm {norm:.1e}")
    assert done.losses() == pytest.approx(reference.losses(), rel=tolerance)
    assert done.grad_norms() == pytest.approx(reference.grad_norms(), rel=tolerance)
    assert len(reference.expert_loads()) == 5
    assert done.expert_loads() == reference.expert_loads()


def with_settings(plan: Plan, **settings: Any) -> Plan:
    """The plan with these fields of its layout, and these settings.

    Gathering of parameters that is overlapped brings the distributed optimizer.
    """
    names = {field.name for field in fields(Layout)}
    layout = replace(plan.layout, **{name: value for name, value in settings.items() if name in names})
    for name, value in settings.items():
        if name not in names:
            layout = layout.with_setting(name, value)
    if "overlap_param_gather" in settings:
        layout = replace(layout, distributed_optimizer=True)
    return replace(plan, layout=layout)


def with_named_schedule(plan: Plan, name: str) -> Plan:
    """The plan with a named schedule, its stages in a line, or in a V where there are two a device."""
    layout = plan.layout
    microbatches = layout.num_microbatches(plan.made_for.global_batch_size)
    order = named(name, num_devices=layout.pipeline_parallel, num_microbatches=microbatches)
    custom = choice_of(order, stage_costs((0, 1, 1, 0) if layout.virtual_stages > 1 else (0, 1)))
    return replace(plan, schedule=ScheduleChoice(name="custom", custom=custom))


def reports_as_planned(plan: Plan, folder: Path) -> list[RankReport]:
    """The reports of all ranks, which say that they ran the plan."""
    reports = [
        read_shared(RankReport, rank_file(RankReport, folder=folder, launch_rank=rank))
        for rank in range(plan.layout.world_size)
    ]
    assert difference_from(plan, reports) is None
    return reports
