"""From the `quartet` section to a choice that every rank has agreed on, before anything is built."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from quartet_plugin.deepspeed import seams
from quartet_plugin.deepspeed.choice import Choice, choice_of_plan, choice_of_schedule
from quartet_plugin.deepspeed.config import (
    batch_sizes,
    check_precision,
    check_zero,
    clips_by_first_stage,
    zero_stage,
)
from quartet_plugin.deepspeed.describe import shape_of
from quartet_plugin.deepspeed.layers import LayerList, layer_list
from quartet_plugin.deepspeed.settings import Settings
from quartet_plugin.errors import InfrastructureError, PlanError, QuartetError
from quartet_plugin.model import frameworks
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.schema import dump
from quartet_plugin.rank.mapping import Process, assign, gather_processes, table_of
from quartet_plugin.rank.rendezvous import RankEnv, Rendezvous, agree_on_plan
from quartet_plugin.schedule.files import read_schedule

# The sequence's length is the data's, which is not there when the module is made.
_NOT_COMPARED = ("seq_length", "max_position_embeddings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The choice, the plan it came from (None: a schedule file), and lines for the user."""

    choice: Choice
    plan: Plan | None
    notes: tuple[str, ...]


class GroupMeeting(Rendezvous):
    """All ranks over the process group that DeepSpeed has made: any launcher will do."""

    def __init__(self, rank_env: RankEnv) -> None:
        super().__init__(rank_env, None)

    def all_gather(self, name: str, value: str) -> list[str]:
        """Every rank's value, in the launcher's order. Raises InfrastructureError when a rank has gone."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return [value]
        words: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(words, value)
        except RuntimeError as error:
            raise InfrastructureError(f"no word about {name} from every rank: {error}") from error
        return words


def decide(
    settings: Settings,
    *,
    specs: Sequence[Any],
    config: Mapping[str, Any],
    script_stages: int,
    rank_env: RankEnv,
) -> Planned:
    """The plan that all ranks follow for the module's layers; `script_stages` are the pipeline stages that
    the script asks for.

    Collective. Raises PlanError (or ConfigError), on all ranks alike, for what does not fit.
    """
    rendezvous = GroupMeeting(rank_env)
    plan = None if settings.plan is None else agree_on_plan(settings.plan, rendezvous=rendezvous)
    processes = gather_processes(rendezvous, rank_env)
    planned, refusal = None, None
    try:
        check_zero(config)
        check_precision(config, has_fp16=bool(get_accelerator().is_fp16_supported()))
        layers = layer_list(specs)
        if plan is None:
            planned = _of_schedule(settings, layers=layers, config=config, rank_env=rank_env)
        else:
            planned = _of_plan(
                plan,
                settings,
                specs=specs,
                layers=layers,
                config=config,
                script_stages=script_stages,
                processes=processes,
            )
    except QuartetError as error:
        refusal = error
    rendezvous.agree_or_raise("fit", refusal)
    assert planned is not None
    return planned


def _of_plan(
    plan: Plan,
    settings: Settings,
    *,
    specs: Sequence[Any],
    layers: LayerList,
    config: Mapping[str, Any],
    script_stages: int,
    processes: Sequence[Process],
) -> Planned:
    _check_fit(plan, specs=specs, config=config, script_stages=script_stages, world_size=len(processes))
    assignment = assign(plan, processes, args=Namespace())
    notes = [] if assignment.note is None else [assignment.note]
    rank_of = None
    if not assignment.is_stock:
        # assign() says which RANK a process plays; the topology asks which process plays a RANK.
        played = {rank: number for number, rank in enumerate(assignment.rank_of)}
        rank_of = tuple(played[rank] for rank in range(len(played)))
        notes.append(table_of(processes, assignment))
    if settings.schedule is None:
        choice = choice_of_plan(plan, layers=layers, rank_of=rank_of)
    else:
        schedule = read_schedule(settings.schedule)
        if schedule.num_devices != plan.layout.pipeline_parallel:
            raise PlanError(
                f"{settings.schedule}: num_devices: {schedule.num_devices}; the plan has "
                f"{plan.layout.pipeline_parallel}"
            )
        choice = choice_of_schedule(
            schedule, layers=layers, num_microbatches=plan.num_microbatches, rank_of=rank_of
        )
    _check_clipping(plan, choice, layers=layers, config=config)
    return Planned(choice=choice, plan=plan, notes=tuple(notes))


def _of_schedule(
    settings: Settings, *, layers: LayerList, config: Mapping[str, Any], rank_env: RankEnv
) -> Planned:
    assert settings.schedule is not None
    schedule = read_schedule(settings.schedule)
    if rank_env.world_size % schedule.num_devices:
        raise PlanError(
            f"{settings.schedule}: num_devices: {schedule.num_devices}; must divide the "
            f"{rank_env.world_size} processes"
        )
    sizes = batch_sizes(config, data_parallel=rank_env.world_size // schedule.num_devices)
    choice = choice_of_schedule(schedule, layers=layers, num_microbatches=sizes.num_microbatches)
    return Planned(choice=choice, plan=None, notes=())


def _check_fit(
    plan: Plan, *, specs: Sequence[Any], config: Mapping[str, Any], script_stages: int, world_size: int
) -> None:
    made_for, layout = plan.made_for, plan.layout
    if plan.shape != made_for.shape:
        raise PlanError("shape: a plan for DeepSpeed cannot change the model, which is the script's own")
    for name in ("tensor_parallel", "context_parallel", "expert_parallel"):
        if getattr(layout, name) > 1:
            raise PlanError(f"layout.{name}: {getattr(layout, name)}; DeepSpeed pipelines here take 1")
    shape = dump(shape_of(specs, seq_length=made_for.shape.seq_length))
    sizes = batch_sizes(config, data_parallel=max(1, world_size // max(1, script_stages)))
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


def _check_clipping(plan: Plan, choice: Choice, *, layers: LayerList, config: Mapping[str, Any]) -> None:
    """Refuse a plan that would train something else, where the first device decides about clipping."""
    baseline = plan.made_for.baseline
    before, after = baseline.layout.pipeline_parallel, choice.num_devices
    affected = [
        clips_by_first_stage(_with_stage(config, layout.distributed_optimizer), pipeline_parallel=degree)
        for layout, degree in ((baseline.layout, before), (plan.layout, after))
    ]
    if not any(affected):
        return
    counts = baseline.split.transformer_layers_per_stage
    on_first_before = tuple(counts[stage] for stage in range(0, len(counts), before))
    planned = layers.counts(choice.bounds)
    on_first_after = tuple(planned[stage] for stage in choice.stages_of(0))
    if affected[0] != affected[1] or on_first_before != on_first_after or before != after:
        raise PlanError(
            "gradient_clipping: in fp32 with ZeRO 0 DeepSpeed clips all stages by the first stage's norm "
            "alone, so this plan would train something else; set zero_optimization.stage 1 or "
            "gradient_clipping 0"
        )


def _with_stage(config: Mapping[str, Any], is_sharded: bool) -> Mapping[str, Any]:
    return {**config, "zero_optimization": {"stage": 1 if is_sharded else 0}}
