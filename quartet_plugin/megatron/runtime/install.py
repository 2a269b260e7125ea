"""Prepares the runtime of a plan: Megatron calls it as its schedule, with the plan's placement and split.

The entry collects the wrappers of all its parts and installs them together; `prepare` makes the runtime's.
"""

from argparse import Namespace
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from quartet_plugin.megatron.runtime.first_microbatch import check_first_microbatch
from quartet_plugin.megatron.runtime.refusals import needs_full_backwards, without_alignment
from quartet_plugin.megatron.seams import Seam, Wrapper
from quartet_plugin.megatron.seams.declared import SCHEDULES
from quartet_plugin.megatron.support import require_known_sources
from quartet_plugin.model.plan import Plan
from quartet_plugin.rank.rendezvous import AgreedRefusalError
from quartet_plugin.runtime.programs import ProgramCache, ScheduleSpec, schedule_spec_of, splits_backward
from quartet_plugin.schedule.channels import check_for_every_backend
from quartet_plugin.schedule.conditions import Condition
from quartet_plugin.space.layouts import is_legal_group
from quartet_plugin.space.runtime_refusals import refusal

# Of `--timing-log-level`: from here on timers around single forwards and backwards are on.
_SYNCHRONIZING_LEVEL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A runtime that is ready to be installed, by its `wrappers`, before models are built."""

    runtime: Any
    wrappers: dict[Seam, Wrapper]
    # The queues of deferred weight gradients, which partitioned linears use too.
    gradients: Any = None


def prepare_plan(plan: Plan, args: Namespace, *, on_cpu: bool) -> tuple[Prepared | None, list[str]]:
    """The runtime of a plan with a custom schedule, and lines for the user.

    `args` are the arguments with the plan in them. None where a feature of the command keeps Megatron's
    schedule. Raises PlanError for a schedule that could not run, the plan's or Megatron's, before any process
    group exists, SeamError where Megatron's functions are not as known.
    """
    choice = plan.schedule.custom
    assert choice is not None
    require_known_sources()
    reason = refusal(args)
    if reason is not None:
        _check_interleaved(plan, args, reason=reason)
        return None, [
            f"{reason}; Megatron's own schedule replaces {choice.label}, the rest of the plan applies"
        ]
    spec = schedule_spec_of(choice, num_microbatches=plan.num_microbatches)
    full_backward = needs_full_backwards(args)
    notes = []
    if full_backward is not None and splits_backward(spec, plan.num_microbatches):
        spec = schedule_spec_of(choice, num_microbatches=plan.num_microbatches, full_backward=True)
        notes.append(full_backward)
    if without_alignment(args):
        notes.append(
            "--no-align-grad-reduce is set: each chunk's gradients are reduced after its last microbatch"
        )
    is_synchronized = (getattr(args, "timing_log_level", None) or 0) >= _SYNCHRONIZING_LEVEL
    if is_synchronized:
        notes.append(
            f"--timing-log-level {args.timing_log_level}: Megatron's timers wait for the device around every "
            "forward and backward, and so for transfers that the schedule overlaps with them; use 0 or 1"
        )
    prepared = prepare(
        spec,
        num_microbatches=plan.num_microbatches,
        conditions=(Condition.SYNCED,) if is_synchronized else (),
        # gloo cannot take GPU memory: several processes on one GPU meet in host memory.
        host_transport=not on_cpu and getattr(args, "distributed_backend", None) == "gloo",
        delays_te=getattr(args, "transformer_impl", "local") == "transformer_engine",
        is_hybrid=bool(getattr(args, "hybrid_layer_pattern", None)),
        timeout=timedelta(minutes=getattr(args, "distributed_timeout_minutes", None) or 10),
    )
    return prepared, notes


def _check_interleaved(plan: Plan, args: Namespace, *, reason: str) -> None:
    """Raise AgreedRefusalError where Megatron's schedule cannot replace the plan's either; `reason`: why."""
    layout, choice = plan.layout, plan.schedule.custom
    assert choice is not None
    group = getattr(args, "microbatch_group_size_per_vp_stage", None) or layout.pipeline_parallel
    if layout.virtual_stages == 1 or is_legal_group(group, layout, num_microbatches=plan.num_microbatches):
        return
    raise AgreedRefusalError(
        f"{reason}; Megatron's own schedule cannot replace {choice.label}: it does not interleave "
        f"{plan.num_microbatches} microbatches in groups of {group} on {layout.pipeline_parallel} pipeline "
        "ranks; omit the flag, or make a plan for this command"
    )


def prepare(
    spec: ScheduleSpec,
    *,
    num_microbatches: int,
    conditions: Collection[Condition] = (),
    host_transport: bool = False,
    timeout: timedelta | None = None,
    delays_te: bool = False,
    is_hybrid: bool = False,
) -> Prepared:
    """Check the schedule for this number of microbatches, by NCCL's and gloo's rules too; make the runtime.

    `conditions`: what the job adds to these rules; `delays_te`: the model has Transformer Engine's layers;
    `is_hybrid`: its stages are those of a pattern. No process group exists yet. Raises PlanError for an order
    that is not valid or could dead-lock.
    """
    programs = ProgramCache(spec)
    program = programs.program(num_microbatches)
    if delays_te:
        check_first_microbatch(program)
    check_for_every_backend(program, conditions=conditions)
    # Only from here on is Megatron imported.
    from quartet_plugin.megatron import split_backward
    from quartet_plugin.megatron.placement import end_stages, layout
    from quartet_plugin.megatron.placement.state import StagePlacement
    from quartet_plugin.megatron.runtime.binding import Runtime
    from quartet_plugin.megatron.runtime.reduction import GradReductions

    placement = StagePlacement(spec.placement)
    placed = layout.wrappers(placement, is_hybrid=is_hybrid)
    require_known_sources(placed)
    gradients = split_backward.WeightGradients()
    reductions = GradReductions()
    runtime = Runtime(
        programs,
        placement=placement,
        gradients=gradients,
        reductions=reductions,
        host_transport=host_transport,
        timeout=timeout,
    )
    wrappers: dict[Seam, Wrapper] = dict.fromkeys(SCHEDULES, lambda _: runtime.forward_backward)
    wrappers |= end_stages.wrappers(placement) | placed | reductions.wrappers()
    if splits_backward(spec, num_microbatches):
        wrappers |= split_backward.wrappers(gradients, delays_te=delays_te)
    return Prepared(runtime=runtime, wrappers=wrappers, gradients=gradients)
