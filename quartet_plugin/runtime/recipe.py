"""A plan's schedule as what makes its orders."""

import numpy as np

from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.model.custom_schedule import CustomSchedule
from quartet_plugin.runtime.programs import ScheduleSpec, make_schedule
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.choice import costs_of, family_of, written_of
from quartet_plugin.schedule.named import lookup


def schedule_spec_of(
    choice: CustomSchedule, *, num_microbatches: int, is_whole: bool = False
) -> ScheduleSpec:
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
    return ScheduleSpec(
        costs=costs_of(choice),
        written=written_of(choice, num_microbatches=num_microbatches),
        name=choice.named,
        group=choice.group,
        family=family_of(choice),
        whole=frozenset(range(len(choice.placement))) if is_whole else frozenset(),
        memory_limit_bytes=None if limits is None else np.array(limits, dtype=np.float64),
    )


def splits_backward(recipe: ScheduleSpec, num_microbatches: int) -> bool:
    """Whether some backward comes in two parts."""
    schedule = make_schedule(recipe, num_microbatches)
    return any(bool(((order & 3) == ActionKind.W).any()) for order in schedule.orders)
