"""Schedules written out by hand, for tests that must not depend on the generators."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from quartet_plugin.model.costs import StageCosts
from quartet_plugin.schedule.action import Action
from quartet_plugin.schedule.schedule import Schedule

Rows = list[list[str]]


def one_f_one_b(num_devices: int, num_microbatches: int) -> Rows:
    """Stage d on device d; device d runs num_devices - d forwards before its first backward."""
    rows = []
    for device in range(num_devices):
        warm = min(num_devices - device, num_microbatches)
        row = [f"{device}F{i}" for i in range(warm)]
        for i in range(num_microbatches):
            row.append(f"{device}B{i}")
            if i + warm < num_microbatches:
                row.append(f"{device}F{i + warm}")
        rows.append(row)
    return rows


def schedule_of(rows: Rows, num_microbatches: int, placement: tuple[int, ...] | None = None) -> Schedule:
    """A schedule of these rows, one layer a stage."""
    stages = tuple(range(len(rows))) if placement is None else placement
    schedule = Schedule.of_actions(
        [[Action.parse(text) for text in row] for row in rows],
        num_microbatches=num_microbatches,
        placement=stages,
    )
    return replace(schedule, layers_per_stage=(1,) * len(stages), origin={"name": "1f1b"})


def v_schedule() -> Schedule:
    """Two devices, stages 0 1 | 1 0, two microbatches, backward split."""
    rows = [
        ["0F0", "0F1", "3F0", "3I0", "3W0", "3F1", "3I1", "3W1", "0I0", "0W0", "0I1", "0W1"],
        ["1F0", "2F0", "1F1", "2F1", "2I0", "1I0", "2W0", "1W0", "2I1", "1I1", "2W1", "1W1"],
    ]
    return schedule_of(rows, 2, (0, 1, 1, 0))


def unit_costs(schedule: Schedule, *, transfer_s: float = 0.0) -> StageCosts:
    """F, I and W take 1, B takes 2, activations 1."""
    stages = schedule.num_stages
    device = np.asarray(schedule.placement, dtype=np.int64)
    crossing = np.where(device[1:] != device[:-1], transfer_s, 0.0)
    return StageCosts(
        device_of_stage=device,
        forward_s=np.ones(stages),
        input_grad_s=np.ones(stages),
        weight_grad_s=np.ones(stages),
        backward_s=np.full(stages, 2.0),
        activation_bytes=np.ones(stages),
        forward_transfer_s=np.append(crossing, 0.0),
        backward_transfer_s=np.append(0.0, crossing),
        held_fraction=1.0,
    )


def edited(rows: Rows, edit: Callable[[Rows], object]) -> Rows:
    """A copy of the rows after `edit`."""
    copy = [list(row) for row in rows]
    edit(copy)
    return copy
