"""Programs for any number of microbatches: valid, free of dead-locks under both libraries' rules."""

import gc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import PlanError
from quartet_plugin.runtime.programs import KEPT_PROGRAMS, ProgramCache, ScheduleSpec, make_schedule
from quartet_plugin.schedule.action import ActionKind, parse_entry
from quartet_plugin.schedule.channels import Backend, check_program
from quartet_plugin.schedule.instruction import Compute, Program
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.schedule import Schedule
from tests.runtime.pipelines import SCHEDULES, spec_of, stage_costs


@settings(deadline=None, max_examples=30)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    num_devices=st.integers(2, 5),
    num_microbatches=st.integers(1, 11),
    full_backward_stages=st.frozensets(st.integers(0, 3), max_size=2),
)
def test_any_number_of_microbatches_runs_under_both_libraries(
    name: str, num_devices: int, num_microbatches: int, full_backward_stages: frozenset[int]
) -> None:
    made = spec_of(name, num_devices)
    known = frozenset(stage for stage in full_backward_stages if stage < len(made.placement))
    program = ProgramCache(spec_of(name, num_devices, full_backward_stages=known)).program(num_microbatches)
    for backend in Backend:
        check_program(program, backend=backend)


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_evaluation_has_the_forwards_in_their_order(name: str) -> None:
    spec = spec_of(name, 3)
    schedule, program = make_schedule(spec, 7), ProgramCache(spec).program(7, forward_only=True)
    for device, instructions in enumerate(program.instructions):
        ran = [item.action for item in instructions if isinstance(item, Compute)]
        assert ran == [action for action in schedule.actions(device) if action.kind is ActionKind.F]


def test_programs_of_a_ramp_up_do_not_pile_up() -> None:
    def number() -> int:
        gc.collect()
        return sum(type(each) is Program for each in gc.get_objects())

    programs, before = ProgramCache(spec_of("zb-h1", 2)), number()
    for count in range(1, 3 * KEPT_PROGRAMS):
        last = programs.program(count)
    assert number() - before == KEPT_PROGRAMS
    assert programs.program(count) is last


def written(rows: list[list[str]], **changes: Any) -> ScheduleSpec:
    schedule = Schedule.of_actions(
        [[parse_entry(text) for text in row] for row in rows],
        num_microbatches=2,
        placement=(0, 1),
    )
    return ScheduleSpec(costs=stage_costs((0, 1)), written=schedule, **changes)


GOOD = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


def test_a_written_order_is_used_for_its_own_number_and_replaced_elsewhere() -> None:
    made = written(GOOD)
    assert [str(a) for a in make_schedule(made, 2).actions(0)] == GOOD[0]
    assert len(make_schedule(made, 3).actions(0)) == 6


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([["0F0", "0F1", "0B0"], GOOD[1]], "0B1"),
        ([GOOD[0], ["1F0", "1B0", "1F1"]], "1B1"),
        ([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]], "deadlock|wait"),
        ([["0B0", "0F0", "0F1", "0B1"], GOOD[1]], "0B0"),
        ([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"], GOOD[1]], "overlapped pairs can only be simulated"),
    ],
)
def test_a_wrong_written_order_is_refused(rows: list[list[str]], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        make_schedule(written(rows), 2)


def test_an_order_for_another_placement_is_refused() -> None:
    other = named("1f1b", num_devices=3, num_microbatches=2)
    with pytest.raises(PlanError, match="placement"):
        make_schedule(ScheduleSpec(costs=stage_costs((0, 1)), written=other), 2)
