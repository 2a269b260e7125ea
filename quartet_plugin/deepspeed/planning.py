"""From the `quartet` section to a pipeline that every rank has agreed on, before anything is built."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from quartet_plugin.deepspeed import seams
from quartet_plugin.deepspeed.config import (
    batch_sizes,
    check_precision,
    check_summed_gradients,
    check_zero,
    clips_by_first_stage,
    zero_stage,
)
from quartet_plugin.deepspeed.describe import shape_of
from quartet_plugin.deepspeed.layer_builder import built_layers
from quartet_plugin.deepspeed.layers import LayerList, layer_list
from quartet_plugin.deepspeed.pipeline import PipelineSpec, pipeline_of_plan, pipeline_of_schedule
from quartet_plugin.errors import InfrastructureError, PlanError, QuartetError
from quartet_plugin.model import frameworks
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.schema import dump
from quartet_plugin.protocol.ds_config import Settings
from quartet_plugin.rank.mapping import Process, assign, gather_processes, table_of
from quartet_plugin.rank.rendezvous import RankEnv, Rendezvous, agree_on_plan
from quartet_plugin.schedule.files import read_schedule

# The sequence's length is a property of the data, which are not there when the module is made.
_NOT_COMPARED = ("seq_length", "max_position_embeddings")
# The axes that plans and schedule files describe.
_AXES = ("pipe", "data")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedPlan:
    """The pipeline that all ranks build from the layers `specs`, and notes for the user.

    `plan` is None for a schedule file. `specs` are the script's own list, or those of the plan's shape.
    """

    specs: Sequence[Any]
    pipeline: PipelineSpec
    plan: Plan | None
    notes: tuple[str, ...]


class GroupRendezvous(Rendezvous):
    """All ranks over the process group that DeepSpeed has made: it works under every launcher."""

    def all_gather(self, name: str, value: str) -> list[str]:
        """Every rank's value, in the launcher's order. Raises InfrastructureError when a rank has gone."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(values, value)
        except RuntimeError as error:
            raise InfrastructureError(f"no answer about {name} from every rank: {error}") from error
        return values


def decide(
    settings: Settings,
    *,
    specs: Sequence[Any],
    config: Mapping[str, Any],
    script_stages: int,
    topology: Any,
    rank_env: RankEnv,
) -> AgreedPlan:
    """The plan that all ranks follow for the layers `specs`; `script_stages`: the script's stages.

    `topology` is the script's process topology, None where it gives the number of stages alone.

    Collective. Raises PlanError or ConfigError, on all ranks alike, for a plan or a config that does not fit.
    """
    rendezvous = GroupRendezvous(rank_env)
    plan = None if settings.plan is None else agree_on_plan(settings.plan, rendezvous=rendezvous)
    processes = gather_processes(rendezvous, rank_env)
    agreed, refusal = None, None
    try:
        _check_topology(topology)
        check_zero(config)
        check_precision(config, has_fp16=bool(get_accelerator().is_fp16_supported()))
        own_copies = max(1, rank_env.world_size // max(1, script_stages))
        if plan is None:
            agreed = _of_schedule(
                settings, specs=specs, config=config, rank_env=rank_env, own_copies=own_copies
            )
        else:
            num_ranks = len(processes)
            _check_fit(plan, specs=specs, config=config, own_copies=own_copies, world_size=num_ranks)
            planned = specs if plan.shape == plan.made_for.shape else built_layers(settings, plan.shape)
            agreed = _of_plan(plan, settings, specs=planned, processes=processes, is_trial=rank_env.is_trial)
            _check_clipping(plan, agreed.pipeline, layers=layer_list(planned), config=config)
        copies = rank_env.world_size // agreed.pipeline.num_devices
        check_summed_gradients(config, before=own_copies, after=copies)
    except QuartetError as error:
        refusal = error
    rendezvous.agree_or_raise("fit", refusal)
    assert agreed is not None
    return agreed


def _check_topology(topology: Any) -> None:
    """Raise PlanError for a further axis, such as tensor parallelism, which planned stages would drop."""
    for axis in () if topology is None else topology.get_axis_names():
        size = topology.get_dim(axis)
        if axis not in _AXES and size > 1:
            raise PlanError(
                f"topology: {axis} {size}; plans and schedule files have pipe and data alone: "
                f"name none in the section quartet, or set {axis} 1"
            )


def _of_plan(
    plan: Plan, settings: Settings, *, specs: Sequence[Any], processes: Sequence[Process], is_trial: bool
) -> AgreedPlan:
    layers = layer_list(specs)
    assignment = assign(plan, processes, args=Namespace(), is_trial=is_trial)
    notes = [] if assignment.note is None else [assignment.note]
    rank_of = None
    if not assignment.is_stock:
        # assign() says which RANK a process plays; the topology asks which process plays a RANK.
        played = {rank: number for number, rank in enumerate(assignment.rank_of)}
        rank_of = tuple(played[rank] for rank in range(len(played)))
        notes.append(table_of(processes, assignment))
    if settings.schedule is None:
        pipeline = pipeline_of_plan(plan, layers=layers, rank_of=rank_of)
    else:
        schedule = read_schedule(settings.schedule)
        if schedule.num_devices != plan.layout.pipeline_parallel:
            raise PlanError(
                f"{settings.schedule}: num_devices: {schedule.num_devices}; the plan has "
                f"{plan.layout.pipeline_parallel}"
            )
        pipeline = pipeline_of_schedule(
            schedule, layers=layers, num_microbatches=plan.num_microbatches, rank_of=rank_of
        )
    return AgreedPlan(specs=specs, pipeline=pipeline, plan=plan, notes=tuple(notes))


def _of_schedule(
    settings: Settings,
    *,
    specs: Sequence[Any],
    config: Mapping[str, Any],
    rank_env: RankEnv,
    own_copies: int,
) -> AgreedPlan:
    """The stages of a schedule file. `own_copies` is the script's own data-parallel size.

    Raises PlanError where another size would change a global batch that follows from it.
    """
    assert settings.schedule is not None
    schedule = read_schedule(settings.schedule)
    if rank_env.world_size % schedule.num_devices:
        raise PlanError(
            f"{settings.schedule}: num_devices: {schedule.num_devices}; must divide the "
            f"{rank_env.world_size} processes"
        )
    copies = rank_env.world_size // schedule.num_devices
    sizes = batch_sizes(config, data_parallel=copies)
    if copies != own_copies and config.get("train_batch_size") in (None, "auto"):
        before = sizes.global_batch_size // copies * own_copies
        raise PlanError(
            f"{settings.schedule}: num_devices: {schedule.num_devices}; the global batch would be "
            f"{sizes.global_batch_size} and not {before}; set train_batch_size"
        )
    num_microbatches = sizes.num_microbatches
    pipeline = pipeline_of_schedule(schedule, layers=layer_list(specs), num_microbatches=num_microbatches)
    return AgreedPlan(specs=specs, pipeline=pipeline, plan=None, notes=())


def _check_fit(
    plan: Plan, *, specs: Sequence[Any], config: Mapping[str, Any], own_copies: int, world_size: int
) -> None:
    made_for, layout = plan.made_for, plan.layout
    for name in ("tensor_parallel", "context_parallel", "expert_parallel"):
        if getattr(layout, name) > 1:
            raise PlanError(f"layout.{name}: {getattr(layout, name)}; DeepSpeed pipelines here take 1")
    shape = dump(shape_of(specs, seq_length=made_for.shape.seq_length))
    sizes = batch_sizes(config, data_parallel=own_copies)
    made_for.check_same_job(
        {
            "framework": frameworks.DEEPSPEED.framework,
            "framework_version": seams.DEEPSPEED.installed_version(),
            "world_size": world_size,
            "global_batch_size": sizes.global_batch_size,
            "zero_optimization.stage": zero_stage(config),
            **{name: value for name, value in shape.items() if name not in _NOT_COMPARED},
        }
    )


def _check_clipping(
    plan: Plan, pipeline: PipelineSpec, *, layers: LayerList, config: Mapping[str, Any]
) -> None:
    """Refuse a plan that would train another model, where the first device decides about clipping."""
    baseline = plan.made_for.baseline
    before, after = baseline.layout.pipeline_parallel, pipeline.num_devices
    affected = []
    for layout, degree in ((baseline.layout, before), (plan.layout, after)):
        config_of_layout = {**config, "zero_optimization": {"stage": int(layout.distributed_optimizer)}}
        affected.append(clips_by_first_stage(config_of_layout, pipeline_parallel=degree))
    if not any(affected):
        return
    counts = baseline.split.transformer_layers_per_stage
    on_first_before = tuple(counts[stage] for stage in range(0, len(counts), before))
    planned = layers.counts(pipeline.bounds)
    on_first_after = tuple(planned[stage] for stage in pipeline.stages_of(0))
    if affected[0] != affected[1] or on_first_before != on_first_after or before != after:
        raise PlanError(
            "gradient_clipping: in fp32 with ZeRO 0 DeepSpeed clips all stages by the first stage's norm "
            "alone, so this plan would train another model; set zero_optimization.stage 1 or "
            "gradient_clipping 0"
        )
