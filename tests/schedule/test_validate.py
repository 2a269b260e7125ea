"""Every rule of a schedule, broken once: the reason in one line, the cell in the table."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import PlanError
from quartet_plugin.model.costs import Costs, LayerCost
from quartet_plugin.schedule.placement import fault_of
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.validate import (
    check_actions,
    check_costs,
    check_progress,
    validate,
)
from tests.schedule.orders import Rows, edited, one_f_one_b, schedule_of, v_schedule


def swap(row: list[str], first: str, second: str) -> None:
    a, b = row.index(first), row.index(second)
    row[a], row[b] = row[b], row[a]


def move(row: list[str], text: str, before: str) -> None:
    row.remove(text)
    row.insert(row.index(before), text)


@given(devices=st.integers(1, 8), microbatches=st.integers(1, 12))
@settings(deadline=None, max_examples=30)
def test_one_f_one_b_is_valid(devices: int, microbatches: int) -> None:
    validate(schedule_of(one_f_one_b(devices, microbatches), microbatches))


def test_a_split_backward_on_a_v_is_valid() -> None:
    validate(v_schedule())


def whole_for_half(row: list[str], half: str) -> None:
    row.remove("2B3")
    row.append(half)


def deadlock(rows: Rows) -> None:
    move(rows[3], "3F3", before="3B0")
    move(rows[0], "0F3", before="0B3")


BROKEN: list[tuple[str, Callable[[Rows], object], str, str]] = [
    ("missing B", lambda r: r[2].remove("2B3"), "2B3 of device 2: missing", "[2F3]"),
    ("missing F", lambda r: r[2].remove("2F3"), "2F3 of device 2: missing", "[2B3]"),
    ("missing last", lambda r: r[0].clear(), "0F0 of device 0: missing", "[-]"),
    ("W missing", lambda r: whole_for_half(r[2], "2I3"), "2W3 of device 2: missing", "[2I3]"),
    ("I missing", lambda r: whole_for_half(r[2], "2W3"), "2I3 of device 2: missing", "[2W3]"),
    ("double", lambda r: r[2].append("2F3"), "2F3 at device 2, position 16: twice", "[2F3]"),
    ("wrong device", lambda r: r[2].append("1F3"), "stage 1 is on device 1", "[1F3]"),
    ("unknown stage", lambda r: r[2].insert(5, "9F3"), "stages are numbered 0 to 3", "[9F3]"),
    ("I and B", lambda r: r[2].insert(8, "2I3"), "both I and B", "[2B3]"),
    ("W and B", lambda r: r[2].append("2W3"), "both W and B", "[2B3]"),
    ("B before F", lambda r: swap(r[2], "2F3", "2B3"), "must come after 2F3", "[2B3]"),
    ("deadlock", deadlock, "deadlock at device 2, position 2: device 2 waits at 2B0 for 3B0", "[2B0]"),
]


@pytest.mark.parametrize(("edit", "reason", "cell"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_a_broken_rule_is_named_and_shown(edit: Callable[[Rows], object], reason: str, cell: str) -> None:
    schedule = schedule_of(edited(one_f_one_b(4, 8), edit), 8)
    with pytest.raises(PlanError) as caught:
        validate(schedule)
    line, *table = str(caught.value).splitlines()
    assert reason in line
    assert sum(cell in row for row in table) == 1
    assert all(row.startswith(("device", "position")) for row in table)


def test_w_before_i() -> None:
    schedule = v_schedule()
    rows = [[str(action) for action in schedule.actions(device)] for device in range(2)]
    swap(rows[1], "2I0", "2W0")
    with pytest.raises(PlanError, match=r"2W0 .*out of order, must come after 2I0"):
        validate(schedule_of(rows, 2, schedule.placement))


def test_a_device_that_waits_for_itself() -> None:
    schedule = v_schedule()
    rows = [[str(action) for action in schedule.actions(device)] for device in range(2)]
    swap(rows[1], "1F0", "2F0")
    with pytest.raises(PlanError, match="deadlock at device 1, position 0: device 1 waits at 2F0 for 1F0"):
        validate(schedule_of(rows, 2, schedule.placement))


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_a_shuffled_list_is_refused_or_can_run(data: st.DataObject) -> None:
    """`check_progress` against the plainest executor: sweep over the devices until nothing moves."""
    devices, microbatches = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 4))
    rows = one_f_one_b(devices, microbatches)
    device = data.draw(st.integers(0, devices - 1))
    at = data.draw(st.integers(0, len(rows[device]) - 1))
    to = data.draw(st.integers(0, len(rows[device]) - 1))
    rows[device].insert(to, rows[device].pop(at))
    schedule = schedule_of(rows, microbatches)
    if sweeps_through(rows):
        validate(schedule)
    else:
        with pytest.raises(PlanError, match=r"out of order|deadlock"):
            validate(schedule)


def sweeps_through(rows: Rows) -> bool:
    waiting = [list(row) for row in rows]
    done: set[str] = set()
    moved = True
    while moved:
        moved = False
        for row in waiting:
            while row:
                stage, kind, microbatch = row[0].partition("F") if "F" in row[0] else row[0].partition("B")
                s, last = int(stage), len(rows) - 1
                needs = [f"{s - 1}F{microbatch}"] if kind == "F" and s else []
                if kind == "B":
                    needs = [f"{s}F{microbatch}", *([f"{s + 1}B{microbatch}"] if s < last else [])]
                if not done.issuperset(needs):
                    break
                done.add(row.pop(0))
                moved = True
    return not any(waiting)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_microbatches": 0}, "num_microbatches: 0"),
        ({"num_microbatches": 70_000}, "num_microbatches: 70000"),
        ({"orders": (np.empty(0, dtype=np.int64),)}, "orders: 1 lists for 2 devices"),
        ({"placement": (0, 0)}, "device 1 holds 0 stages"),
        ({"placement": (0, 2)}, r"placement\[1\]: device 2"),
        ({"placement": ()}, "0 stages"),
        ({"layers_per_stage": (1,)}, "layers_per_stage: 1 counts for 2 stages"),
        ({"routes": ((0, 1), (1, 0))}, "only one is given"),
        ({"routes": ((1, 0), (0, 1)), "route_of_microbatch": (0, 0, 0)}, "the first must be the placement"),
        ({"routes": ((0, 1), (1, 0)), "route_of_microbatch": (0, 2, 0)}, "route_of_microbatch"),
    ],
)
def test_sizes(change: dict[str, object], reason: str) -> None:
    schedule = replace(schedule_of(one_f_one_b(2, 3), 3), **change)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=reason):
        check_actions(schedule)


def test_more_actions_than_are_handled() -> None:
    order = np.empty(0, dtype=np.int64)
    schedule = Schedule(num_devices=1, num_microbatches=60_000, placement=(0,) * 100, orders=(order,))
    with pytest.raises(PlanError, match="orders: 12000000 actions; at most 5000000"):
        check_actions(schedule)


def test_two_copies_take_their_routes() -> None:
    """Microbatch 1 goes through the devices the other way round."""
    rows = [["0F0", "1F1", "1B1", "0B0"], ["0F1", "1F0", "1B0", "0B1"]]
    schedule = replace(schedule_of(rows, 2), routes=((0, 1), (1, 0)), route_of_microbatch=(0, 1))
    validate(schedule)
    swapped = replace(schedule, orders=tuple(reversed(schedule.orders)))
    with pytest.raises(PlanError, match="stage 0 on the route of microbatch 1 is on device 1"):
        validate(swapped)


@pytest.mark.parametrize("placement", [(0, 1, 1, 0), (0, 1, 0, 1), (1, 0)])
def test_legal_placements(placement: tuple[int, ...]) -> None:
    assert fault_of(placement, num_devices=2) is None


def costs(names: list[str]) -> Costs:
    layers = (
        LayerCost(name=n, forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, activation_bytes=1.0)
        for n in names
    )
    return Costs(
        num_devices=2,
        num_microbatches=3,
        layers=tuple(layers),
        device_slowdown=np.ones(2),
        transfer_s=np.zeros((2, 2)),
        memory_limit_bytes=None,
        weight_grad_held_fraction=1.0,
        backward_fused_s=None,
    )


@pytest.mark.parametrize(
    ("layers", "names", "reason"),
    [
        ((1, 2), ["a", "b"], "sums to 3"),
        ((0, 2), ["embedding", "b"], "stage 0 must hold the embedding"),
        ((2, 0), ["a", "head"], "the last stage must hold the head"),
        (None, ["a", "b"], "not known"),
    ],
)
def test_a_schedule_for_other_costs(layers: tuple[int, ...] | None, names: list[str], reason: str) -> None:
    schedule = replace(schedule_of(one_f_one_b(2, 3), 3), layers_per_stage=layers)
    with pytest.raises(PlanError, match=reason):
        check_costs(schedule, costs(names))


def test_a_schedule_for_these_costs() -> None:
    check_costs(schedule_of(one_f_one_b(2, 3), 3), costs(["a", "b"]))
    with pytest.raises(PlanError, match="num_microbatches: 4 in the schedule, 3 in the costs"):
        check_costs(schedule_of(one_f_one_b(2, 4), 4), costs(["a", "b"]))


def test_progress_alone_finds_the_circle() -> None:
    schedule = schedule_of(edited(one_f_one_b(4, 8), deadlock), 8)
    check_actions(schedule)
    with pytest.raises(PlanError, match="device 3 waits at 3F3 for 2F3") as caught:
        check_progress(schedule)
    assert "(3F3)" in str(caught.value)
