"""Schedules that a file holds (`SCHEDULE.json`), searched or written by hand, as plans of a job take them.

The file says placement, order and split. Its costs are not known, so those that the plan carries are relative
to a layer's forward, by FLOPs, as for every other custom schedule.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from quartet_plugin.errors import ConfigError, PlanError, QuartetError
from quartet_plugin.model.costs import stage_costs
from quartet_plugin.model.custom_schedule import PAIRS_ONLY_SIMULATED, CustomSchedule
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.schedule.choice import choice_of, family_of
from quartet_plugin.schedule.files import read_schedule
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.validate import validate
from quartet_plugin.space.schedules import CustomOrder, cost_table
from quartet_plugin.split.layers import entries_of, flops_end_loads, layers_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WrittenSchedule:
    """A schedule of a file that the runtime can execute; two of them are equal where they are one object."""

    schedule: Schedule

    @property
    def num_devices(self) -> int:
        """Devices of the pipeline."""
        return self.schedule.num_devices

    @property
    def chunks(self) -> int:
        """Stages a device."""
        return self.schedule.num_stages // self.schedule.num_devices

    @property
    def entries(self) -> tuple[int, ...]:
        """The file's counts, one a stage."""
        assert self.schedule.layers_per_stage is not None, "a file holds the split"
        return self.schedule.layers_per_stage

    def split(self, num_layers: int) -> tuple[int, ...] | None:
        """Transformer layers of each stage; None where the file is for another number of them.

        The counts of a file are those of its cost table, whose embedding and head may be entries or not.
        """
        if sum(self.entries) == num_layers:
            return self.entries
        return layers_of(self.entries) if sum(self.entries) == num_layers + 2 else None

    def faults(
        self,
        *,
        num_layers: int | None = None,
        pipeline_parallel: int | None = None,
        virtual_stages: int | None = None,
        num_microbatches: int | None = None,
        whose: str,
    ) -> list[str]:
        """A line for each count that differs: field, value and the count of `whose` (None: not known)."""
        lines = []
        if pipeline_parallel not in (None, self.num_devices):
            lines.append(
                f"num_devices: {self.num_devices}; must be the pipeline parallel size of {whose}, "
                f"{pipeline_parallel}"
            )
        if virtual_stages not in (None, self.chunks):
            lines.append(
                f"placement: {len(self.entries)} stages, {self.chunks} a device; must be the stages a device "
                f"of {whose}, {virtual_stages}"
            )
        if num_layers is not None and self.split(num_layers) is None:
            lines.append(
                f"layers_per_stage: sums to {sum(self.entries)}; must be the {num_layers} layers of {whose}, "
                f"or {num_layers + 2} with embedding and head"
            )
        if num_microbatches not in (None, self.schedule.num_microbatches):
            lines.append(
                f"num_microbatches: {self.schedule.num_microbatches}; must be the microbatches per iteration "
                f"of {whose}, {num_microbatches}"
            )
        return lines


def read_written_schedule(path: Path) -> WrittenSchedule:
    """The schedule of a file. Raises ConfigError or PlanError for one that the runtime cannot execute."""
    schedule = read_schedule(path)
    if schedule.routes is not None:
        raise ConfigError(f"{path}: routes: two copies of the model; such a schedule can only be simulated")
    if schedule.pairs:
        raise ConfigError(f"{path}: orders: {PAIRS_ONLY_SIMULATED}")
    if schedule.num_devices < 2:
        raise ConfigError(f"{path}: num_devices: 1; a schedule needs a pipeline of at least 2 devices")
    for stage, count in enumerate(schedule.layers_per_stage or ()):
        if count == 0:
            raise ConfigError(
                f"{path}: layers_per_stage[{stage}]: 0; a schedule with an empty stage can only be simulated"
            )
    try:
        validate(schedule)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    return WrittenSchedule(schedule=schedule)


@lru_cache(maxsize=1024)
def written_order(
    written: WrittenSchedule, *, shape: ModelShape, mtp_layers: int | None = None
) -> CustomOrder:
    """The order and split of a written schedule for a model whose number of layers it fits."""
    split = written.split(shape.num_layers)
    assert split is not None, "the file is for another number of layers"
    entries = entries_of(split)
    schedule = replace(written.schedule, layers_per_stage=entries, origin=_checked_origin(written.schedule))
    costs = cost_table(
        shape,
        end_loads=flops_end_loads(shape, mtp_layers=mtp_layers).rounded(),
        placement=schedule.placement,
        num_devices=schedule.num_devices,
        num_microbatches=schedule.num_microbatches,
    )
    custom = choice_of(
        schedule,
        stage_costs(costs, placement=schedule.placement, layers_per_stage=entries),
        with_orders=schedule.origin.get("name") is None,
    )
    return CustomOrder(split=split, custom=_with_known_family(custom))


def _checked_origin(schedule: Schedule) -> dict[str, Any]:
    """The origin; without a name that makes another order than the file's, which may have been edited."""
    name = schedule.origin.get("name")
    if name is None:
        return dict(schedule.origin)
    try:
        known = named(
            name,
            num_devices=schedule.num_devices,
            num_microbatches=schedule.num_microbatches,
            num_chunks=schedule.num_stages // schedule.num_devices,
        )
    except QuartetError:
        return {}
    is_same = known.placement == schedule.placement and all(
        np.array_equal(made, written) for made, written in zip(known.orders, schedule.orders, strict=True)
    )
    return {"name": name} if is_same else {}


def _with_known_family(custom: CustomSchedule) -> CustomSchedule:
    """The schedule without parameters that are not the family's: the order is written out."""
    try:
        family_of(custom)
    except PlanError:
        return replace(custom, family=None)
    return custom
