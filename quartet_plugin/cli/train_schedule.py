"""The plan of `quartet train --schedule`: the user's command as it is, with the schedule of a file."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quartet_plugin.cli.command import Device, path_here
from quartet_plugin.cli.output import tell
from quartet_plugin.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from quartet_plugin.launchers.command import Command
    from quartet_plugin.model.plan import Plan
    from quartet_plugin.space.written_schedules import WrittenSchedule
    from quartet_plugin.trial.request import TrialResult

COMMAND = "the command"
# A plan may have it: the schedule is made for each number of microbatches, and the file's holds at the last.
_RAMP_UP = "rampup_batch_size"


def scheduled_plan(path: Path, *, command: "Command", device: Device, skip: bool) -> Path:
    """The file of the plan, beside the schedule's; made of a short run of the command unless it is there.

    Unless the check is to be skipped, the plan has passed the parity gate. Raises ConfigError or PlanError
    for a schedule that is not for this command: before a process starts where the command's flags tell.
    """
    from quartet_plugin.cli.check import STEPS, keep_receipt, parity_gate
    from quartet_plugin.launchers.local import check_one_node
    from quartet_plugin.launchers.megatron_flags import flags_of
    from quartet_plugin.model.megatron_arguments import REFUSED_WITH_PLAN
    from quartet_plugin.model.plan import write_plan
    from quartet_plugin.space.written_schedules import read_written_schedule

    written = read_written_schedule(path)
    flags = flags_of(command)
    if flags.step_batch_size_schedule is not None:
        reason = REFUSED_WITH_PLAN["step_batch_size_schedule"]
        raise PlanError(f"--step-batch-size-schedule cannot be used with a plan: {reason}; omit the flag")
    flags.check_sizes()
    counts = flags.counts(num_processes=command.num_processes)
    check_counts(
        written,
        path=path,
        num_layers=counts.num_layers,
        pipeline_parallel=counts.pipeline_parallel,
        virtual_stages=counts.virtual_stages,
        num_microbatches=counts.num_microbatches,
    )
    target = path.with_name(f"{path.name.removesuffix('.json')}.plan.json")
    if _is_ready(target, written, source=path, command=command, skip=skip):
        return target
    check_one_node(command)
    if skip:
        tell(f"quartet: {path_here(path)}: running one step of the command to read its job")
    else:
        tell(f"quartet: {path_here(path)}: no parity receipt for this command; running `quartet check` first")
    with parity_gate(target, command=command, device=device, steps=1 if skip else STEPS) as gate:
        plan = _plan_of(written, gate.command_result(is_compared=not skip), path=path)
        write_plan(plan, path=target)
        if not skip:
            receipt = gate.check(plan)
            keep_receipt(receipt, plan=target, place=gate.folder)
            tell(f"quartet: {path_here(target)}: trains as stock does")
    return target


def check_counts(
    written: "WrittenSchedule",
    *,
    path: Path,
    num_layers: int | None,
    pipeline_parallel: int | None,
    virtual_stages: int | None,
    num_microbatches: int | None,
) -> None:
    """Raise ConfigError for the first count of the schedule that is not the command's (None: not known)."""
    faults = written.faults(
        num_layers=num_layers,
        pipeline_parallel=pipeline_parallel,
        virtual_stages=virtual_stages,
        num_microbatches=num_microbatches,
        whose=COMMAND,
    )
    if faults:
        raise ConfigError(f"{path}: {faults[0]}")


def with_schedule(plan: "Plan", written: "WrittenSchedule") -> "Plan":
    """The plan with a schedule whose counts it has."""
    from quartet_plugin.model.plan import ScheduleChoice, Split
    from quartet_plugin.space.written_schedules import written_order

    order = written_order(written, shape=plan.shape, mtp_layers=plan.made_for.mtp_layers)
    return replace(
        plan,
        split=Split(transformer_layers_per_stage=order.split),
        schedule=ScheduleChoice(name="custom", custom=order.custom),
    )


def _plan_of(written: "WrittenSchedule", result: "TrialResult", *, path: Path) -> "Plan":
    """The plan of a command that ran, with the schedule.

    Raises ConfigError for a schedule with other counts, PlanError for a job that has no custom schedules.
    """
    from quartet_plugin.model.training_job import parse_training_job
    from quartet_plugin.space.features import Axis, locked_axes
    from quartet_plugin.space.plan_space import baseline_plan
    from quartet_plugin.tuner.trial_backend import LocalBackend

    job = parse_training_job(result.job or {}, where=str(result.folder))
    check_counts(
        written,
        path=path,
        num_layers=job.shape.num_layers,
        pipeline_parallel=job.layout.pipeline_parallel,
        virtual_stages=job.layout.virtual_stages,
        num_microbatches=job.layout.num_microbatches(job.global_batch_size),
    )
    features = [feature for feature in job.features if feature != _RAMP_UP]
    locked = locked_axes(features, change_class="B").get(Axis.SCHEDULE) or job.no_custom_schedules
    if locked is not None:
        raise PlanError(f"{path}: custom schedules cannot run, because of {locked}; train without --schedule")
    plan = baseline_plan(job, nodes=LocalBackend().nodes(result), run=plan_name(path), seed=0)
    return with_schedule(plan, written)


def plan_name(path: Path) -> str:
    """The name of the run that the plan of a schedule's file states."""
    return path.stem[:100]


def _is_ready(
    target: Path, written: "WrittenSchedule", *, source: Path, command: "Command", skip: bool
) -> bool:
    """Whether the plan of an earlier start is of this schedule and this command, and has its receipt.

    Raises ConfigError where something else has the plan's name: it is not replaced.
    """
    from quartet_plugin.cli.plan_checks import check_before_start, framework_version
    from quartet_plugin.launchers.megatron_flags import flags_of
    from quartet_plugin.model.plan import read_plan
    from quartet_plugin.model.receipt import require_receipt

    if not target.exists():
        return False
    try:
        plan = read_plan(target)
    except PlanError as error:
        raise ConfigError(f"{error}; remove it: the schedule's plan is written there") from error
    if plan.provenance.run != plan_name(source):
        raise ConfigError(
            f"{target}: holds another plan; rename it, since the schedule's plan is written there"
        )
    try:
        check_before_start(plan, command=command, path=target)
        if not skip:
            require_receipt(plan, path=target, torch_version=framework_version("torch"))
    except (ConfigError, PlanError):
        return False
    layout = plan.made_for.baseline.layout
    stated = flags_of(command).layout(num_processes=command.num_processes)
    faults = written.faults(
        num_layers=plan.shape.num_layers,
        pipeline_parallel=layout.pipeline_parallel,
        virtual_stages=layout.virtual_stages,
        num_microbatches=plan.num_microbatches,
        whose=COMMAND,
    )
    is_same = plan.layout == layout and stated in (None, layout) and not faults
    return is_same and with_schedule(plan, written).key == plan.key
