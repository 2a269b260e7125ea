"""From a plan's schedule to an installed runtime, or to the line that says why Megatron's own stays."""

from argparse import Namespace
from datetime import timedelta

import numpy as np

from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.megatron.runtime.install import Prepared, prepare
from quartet_plugin.megatron.runtime.programs import Recipe
from quartet_plugin.megatron.runtime.records import Clock, CudaClock, HostClock, Recorder
from quartet_plugin.megatron.runtime.refusals import needs_whole_backwards, refusal
from quartet_plugin.model.custom_schedule import CustomSchedule
from quartet_plugin.model.plan import Plan
from quartet_plugin.schedule.choice import costs_of, family_of, written_of
from quartet_plugin.schedule.named import lookup


def recipe_of(choice: CustomSchedule, *, num_microbatches: int, is_whole: bool = False) -> Recipe:
    """What makes the choice's orders; `is_whole`: no backward is split, whatever they say.

    Raises PlanError for an unknown name, two copies of the model, or parameters that are none.
    """
    if choice.named is not None:
        try:
            known = lookup(choice.named)
        except ConfigError as error:
            raise PlanError(f"schedule.custom.named: {error}") from error
        if not known.executable:
            raise PlanError(f"schedule.custom.named: {choice.named} has two copies of the model")
    limits = choice.profile.memory_limit_bytes
    return Recipe(
        costs=costs_of(choice),
        written=written_of(choice, num_microbatches=num_microbatches),
        name=choice.named,
        group=choice.group,
        family=family_of(choice),
        whole=frozenset(range(len(choice.placement))) if is_whole else frozenset(),
        memory_limit_bytes=None if limits is None else np.array(limits, dtype=np.float64),
    )


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
    recipe = recipe_of(choice, num_microbatches=plan.num_microbatches)
    whole = needs_whole_backwards(args)
    notes = []
    if whole is not None and recipe_splits(recipe, plan.num_microbatches):
        recipe = recipe_of(choice, num_microbatches=plan.num_microbatches, is_whole=True)
        notes.append(whole)
    clock: Clock = HostClock() if on_cpu else CudaClock()
    prepared = prepare(
        recipe,
        num_microbatches=plan.num_microbatches,
        recorder=Recorder(clock),
        # gloo cannot take GPU memory: several processes on one GPU meet in host memory.
        host_transport=not on_cpu and getattr(args, "distributed_backend", None) == "gloo",
        timeout=timedelta(minutes=getattr(args, "distributed_timeout_minutes", None) or 10),
    )
    return prepared, notes


def recipe_splits(recipe: Recipe, num_microbatches: int) -> bool:
    """Whether some backward comes in two parts."""
    from quartet_plugin.megatron.runtime.programs import make_schedule
    from quartet_plugin.schedule.action import Kind

    schedule = make_schedule(recipe, num_microbatches)
    return any(bool(((order & 3) == Kind.W).any()) for order in schedule.orders)
