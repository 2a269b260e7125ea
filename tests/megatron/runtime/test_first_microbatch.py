"""Orders that would make Transformer Engine's layers lose gradients are refused."""

import numpy as np
import pytest

from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.runtime.first_microbatch import check_first_microbatch
from quartet_plugin.runtime.programs import ProgramCache, lower_schedule
from quartet_plugin.schedule.action import Action
from quartet_plugin.schedule.schedule import Schedule
from tests.runtime.pipelines import SCHEDULES, spec_of, stage_costs


@pytest.mark.parametrize("name", SCHEDULES)
def test_named_orders_are_taken(name: str) -> None:
    check_first_microbatch(ProgramCache(spec_of(name, 2)).program(8))


@pytest.mark.parametrize(
    ("actions", "is_taken"),
    [
        ("F0 F1 I0 I1 W1 W0", True),
        ("F1 F0 B1 B0", True),
        ("F0 F1 I1 I0 W0 W1", False),
        ("F0 F1 B1 B0", False),
    ],
)
def test_an_order_by_hand(actions: str, is_taken: bool) -> None:
    codes = [Action.parse(f"0{text}").encode(2) for text in actions.split()]
    schedule = Schedule(
        num_devices=1, num_microbatches=2, placement=(0,), orders=(np.array(codes, dtype=np.int64),)
    )
    program = lower_schedule(schedule, stage_costs((0,)))
    if is_taken:
        check_first_microbatch(program)
    else:
        with pytest.raises(PlanError, match="stage 0 runs the forward of microbatch 0 first"):
            check_first_microbatch(program)
