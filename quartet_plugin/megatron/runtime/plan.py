"""From a plan's schedule to an installed runtime, or to the line that says why Megatron's own stays."""

from argparse import Namespace
from datetime import timedelta

from quartet_plugin.megatron.runtime.install import Prepared, prepare
from quartet_plugin.megatron.runtime.refusals import needs_whole_backwards, refusal, without_alignment
from quartet_plugin.model.plan import Plan
from quartet_plugin.runtime.recipe import schedule_spec_of, splits_backward
from quartet_plugin.runtime.records import Clock, CudaClock, HostClock, Recorder


def prepare_plan(plan: Plan, args: Namespace, *, on_cpu: bool) -> tuple[Prepared | None, list[str]]:
    """The runtime of a plan with a schedule of ours, and lines for the user.

    `args` are the arguments with the plan in them. None where a feature of the command keeps Megatron's own
    schedule. Raises PlanError for a schedule that could not run, before any process group exists.
    """
    choice = plan.schedule.custom
    assert choice is not None
    reason = refusal(args)
    if reason is not None:
        return None, [
            f"{reason}; Megatron's own schedule stays instead of {choice.label}, the rest of the plan applies"
        ]
    recipe = schedule_spec_of(choice, num_microbatches=plan.num_microbatches)
    whole = needs_whole_backwards(args)
    notes = []
    if whole is not None and splits_backward(recipe, plan.num_microbatches):
        recipe = schedule_spec_of(choice, num_microbatches=plan.num_microbatches, is_whole=True)
        notes.append(whole)
    if without_alignment(args):
        notes.append(
            "--no-align-grad-reduce is set: each chunk's gradients are reduced when its last microbatch is "
            "through"
        )
    clock: Clock = HostClock() if on_cpu else CudaClock()
    prepared = prepare(
        recipe,
        num_microbatches=plan.num_microbatches,
        recorder=Recorder(clock),
        # gloo cannot take GPU memory: several processes on one GPU meet in host memory.
        host_transport=not on_cpu and getattr(args, "distributed_backend", None) == "gloo",
        delays_te=getattr(args, "transformer_impl", "local") == "transformer_engine",
        timeout=timedelta(minutes=getattr(args, "distributed_timeout_minutes", None) or 10),
    )
    return prepared, notes
