"""The pipeline that a plan or a schedule file describes: bounds, placement, schedule, rank order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.deepspeed.layers import LayerList
from quartet_plugin.errors import PlanError
from quartet_plugin.model.costs import StageCosts
from quartet_plugin.model.plan import Plan
from quartet_plugin.runtime.programs import ScheduleSpec, make_schedule, schedule_spec_of
from quartet_plugin.schedule.placement import linear, loop
from quartet_plugin.schedule.schedule import Schedule

_TRANSFER_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """Stage s holds layer specifications `bounds[s]` to `bounds[s + 1] - 1`, on device `placement[s]`.

    `schedule` is None where DeepSpeed's stock schedule runs. `rank_of[c]` is the launcher's rank that plays
    the c-th process of DeepSpeed's topology; None for the launcher's order.
    """

    bounds: tuple[int, ...]
    placement: tuple[int, ...]
    schedule: ScheduleSpec | None
    rank_of: tuple[int, ...] | None = None

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return max(self.placement) + 1

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @property
    def last_device(self) -> int:
        """The device that computes the loss."""
        return self.placement[-1]

    def stages_of(self, device: int) -> tuple[int, ...]:
        """The stages of a device, in model order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == device)


def pipeline_of_plan(plan: Plan, *, layers: LayerList, rank_of: tuple[int, ...] | None) -> PipelineSpec:
    """The pipeline of a plan. Raises PlanError where the model's layers do not allow the plan's split."""
    layout, custom = plan.layout, plan.schedule.custom
    bounds = layers.bounds(plan.split.transformer_layers_per_stage)
    spec = None
    placement = linear(layout.pipeline_parallel)
    if custom is not None:
        placement = custom.placement
        _check_ends(placement)
        spec = schedule_spec_of(custom, num_microbatches=plan.num_microbatches)
    elif layout.virtual_stages > 1:
        placement = loop(layout.pipeline_parallel, layout.virtual_stages)
        spec = ScheduleSpec(
            costs=unit_costs(bounds, placement), name=plan.schedule.name, group=plan.schedule.group
        )
    if spec is not None:
        make_schedule(spec, plan.num_microbatches)
    return PipelineSpec(bounds=bounds, placement=placement, schedule=spec, rank_of=rank_of)


def pipeline_of_schedule(
    schedule: Schedule,
    *,
    layers: LayerList,
    num_microbatches: int | None = None,
    rank_of: tuple[int, ...] | None = None,
) -> PipelineSpec:
    """The pipeline of a schedule file.

    Raises PlanError for an order that is not valid, has no split, or has another number of microbatches.
    """
    if schedule.layers_per_stage is None:
        raise PlanError("layers_per_stage: missing; a schedule to run needs its split")
    if schedule.routes is not None:
        raise PlanError("routes: a schedule with two copies of the model can only be simulated")
    if num_microbatches is not None and schedule.num_microbatches != num_microbatches:
        raise PlanError(
            f"num_microbatches: the schedule is for {schedule.num_microbatches}, the ds_config asks for "
            f"{num_microbatches} (gradient_accumulation_steps); make a schedule for that number"
        )
    placement = tuple(schedule.placement)
    _check_ends(placement)
    bounds = layers.bounds(layers.counts_of_entries(schedule.layers_per_stage))
    spec = ScheduleSpec(costs=unit_costs(bounds, placement), written=schedule)
    make_schedule(spec, schedule.num_microbatches)
    return PipelineSpec(bounds=bounds, placement=placement, schedule=spec, rank_of=rank_of)


def _check_ends(placement: Sequence[int]) -> None:
    if placement[-1] not in (0, max(placement)):
        raise PlanError(
            f"placement: the last stage is on device {placement[-1]}; DeepSpeed reads labels only on the "
            "first and the last device"
        )


def unit_costs(bounds: Sequence[int], placement: Sequence[int]) -> StageCosts:
    """Stage costs in units of a layer's forward pass: they only decide when receives are posted."""
    num_layers = np.diff(np.asarray(bounds, dtype=np.float64))
    device = np.asarray(placement, dtype=np.int64)
    crosses = (device[:-1] != device[1:]).astype(np.float64) * _TRANSFER_SHARE
    return StageCosts(
        device_of_stage=device,
        forward_s=num_layers,
        input_grad_s=num_layers,
        weight_grad_s=num_layers,
        backward_s=2.0 * num_layers,
        activation_bytes=num_layers,
        forward_transfer_s=np.append(crosses, 0.0),
        backward_transfer_s=np.concatenate(([0.0], crosses)),
        held_fraction=1.0,
    )
