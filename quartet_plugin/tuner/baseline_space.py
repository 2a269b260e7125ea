"""The search space that trial 0 determines from the user's command, and messages on what it excludes."""

from collections.abc import Iterator

from quartet_plugin.errors import InfrastructureError, SeamError
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import dump
from quartet_plugin.model.training_job import TrainingJob, parse_training_job
from quartet_plugin.space.features import WHOLE_NODES, Axis, lock_lines
from quartet_plugin.space.knobs.cp_comm_type import HIERARCHICAL_SIZES
from quartet_plugin.space.partition_limits import stock_partition_reason
from quartet_plugin.space.plan_space import Space
from quartet_plugin.trial.request import Outcome, TrialResult
from quartet_plugin.tuner.context import TuningContext
from quartet_plugin.tuner.early_plans import EarlyPlans
from quartet_plugin.tuner.proposer import Proposer
from quartet_plugin.tuner.run_space import space_around


def check_baseline(context: TuningContext, result: TrialResult) -> None:
    """Raise SeamError or InfrastructureError, with advice, where the user's command was not measured."""
    if result.is_measured and result.job is not None:
        return
    for line in result.last_lines:
        context.observer.message(f"  | {line}")
    if result.outcome is Outcome.HARNESS:
        raise SeamError(f"your command could not be measured: {result.reason}")
    advice = "make it run without quartet first; nothing was searched"
    if result.outcome is Outcome.INFEASIBLE and result.wall_s >= context.run.config.trial.deadline_s:
        advice = "raise trial.deadline_s, or make it start faster; nothing was searched"
    if result.reason.startswith("hang:"):
        advice = "if it only starts slowly, raise trial.deadline_s; nothing was searched"
    if result.outcome is Outcome.WRONG:
        advice = "the training itself diverges: fix that first; nothing was searched"
    raise InfrastructureError(f"your command failed: {result.reason}; {advice}")


def open_space(
    context: TuningContext, result: TrialResult, *, early: EarlyPlans
) -> tuple[Space, Proposer | None]:
    """The space around the baseline, and its proposer where `early` has made it.

    The cluster is written, and the user reads the limits.
    """
    run = context.run
    job = parse_training_job(result.job or {}, where=str(result.folder))
    nodes = context.backend.nodes(result)
    content = {"schema_version": 1, "nodes": [dump(node) for node in nodes]}
    write_json_atomic(run.folder.cluster_file, content)
    space, proposer = early.take(job, nodes=nodes)
    space = space or space_around(job, nodes=nodes, run=run)
    _show_limits(context, space, job)
    return space, proposer


def _show_limits(context: TuningContext, space: Space, job: TrainingJob) -> None:
    """Show which axes are not tuned and why, and what trials leave out: never silently."""
    say = context.observer.message
    if job.stage_divisor is not None:
        say(
            f"a replica is larger than a trial: a trial runs 1/{job.stage_divisor} of its stages, with "
            f"{job.shape.num_layers} layers in all; the cost model predicts the whole replica"
        )
    for line in (*lock_lines(space.locked, change_class=space.search.change_class), *_order_limits(space)):
        say(line)
    if space.no_custom_schedules is not None and Axis.SCHEDULE not in space.locked:
        say(f"{space.no_custom_schedules}; the framework's own schedules stay")
    elif job.full_backward is not None and Axis.SCHEDULE not in space.locked:
        say(
            f"{job.full_backward}; schedules with a split backward are tried only if search.schedule lists "
            "them"
        )
    if (reason := stock_partition_reason(space)) is not None:
        say(f"{reason}; tensor_partition stays stock")
    if job.neutralised:
        say(f"left out in trials: {', '.join(job.neutralised)}")
    if context.run.config.search.scaling is not None and space.shapes == (job.shape,):
        say(
            "search.scaling: no other shape is within scaling.tolerance and scaling.depth_width_band; "
            "widen one of them"
        )


def _order_limits(space: Space) -> Iterator[str]:
    """Which orders of ranks the job's features leave, one line a feature; none where the order stays."""
    if Axis.MAPPING in space.locked:
        return
    for feature in space.job.features:
        if feature in WHOLE_NODES:
            yield f"{feature}: whole nodes move, each with its ranks in order"
    if space.order_rules.keeps_nodes and WHOLE_NODES.isdisjoint(space.job.features):
        yield f"{HIERARCHICAL_SIZES.name}: whole nodes move, each with its ranks in order"
    if space.order_rules.keeps_experts:
        yield "moe_flex_dispatcher: ranks that share experts move together, or inside their nodes"
