"""Lowered programs: nothing deadlocks, nothing is lost, nothing waits that need not."""

import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import PlanError
from quartet_plugin.model.costs import Costs, stage_costs
from quartet_plugin.schedule.action import Action
from quartet_plugin.schedule.channels import Backend, check_program
from quartet_plugin.schedule.instruction import (
    Compute,
    Instruction,
    Message,
    Post,
    Program,
    Side,
    Transfer,
    Wait,
)
from quartet_plugin.schedule.lowering import lower
from quartet_plugin.schedule.named import NAMED, named
from quartet_plugin.schedule.schedule import Schedule
from tests.schedule.pipelines import random_costs, random_placement, random_schedule, with_random_pairs
from tests.schedule.reference_simulator import ReferenceResult, simulate_reference

SEEDS = st.integers(0, 100_000)
V3, LOOP3 = [0, 1, 2, 2, 1, 0], [0, 1, 2, 0, 1, 2]


def predict(schedule: Schedule, costs: Costs) -> tuple[ReferenceResult, dict[str, Any]]:
    """Simulated times, and the same as `lower` takes them."""
    stages = stage_costs(costs, placement=schedule.placement, layers_per_stage=[1] * schedule.num_stages)
    result = simulate_reference(schedule, stages)
    rows = [schedule.actions(d) for d in range(schedule.num_devices)]
    return result, {
        "start_s": [np.array([result.start_s[a] for a in row]) for row in rows],
        "end_s": [np.array([result.end_s[a] for a in row]) for row in rows],
    }


def make(
    seed: int, placement: list[int] | None = None, *, may_pair: bool = True
) -> tuple[Schedule, Costs, Program]:
    """A random schedule of a random pipeline, lowered by its predicted times; some have overlapped pairs."""
    rng = np.random.default_rng(seed)
    placement = placement or random_placement(rng, int(rng.integers(1, 6)), int(rng.integers(1, 4)))
    num_microbatches = int(rng.integers(1, 9))
    costs = random_costs(
        rng, num_devices=max(placement) + 1, num_microbatches=num_microbatches, num_layers=len(placement)
    )
    schedule = random_schedule(rng, placement=placement, num_microbatches=num_microbatches)
    if may_pair and rng.random() < 0.3:
        schedule = with_random_pairs(rng, schedule)
    times = predict(schedule, costs)[1]
    return schedule, costs, lower(schedule, transfer_s=costs.transfer_s, **times)


def timed_makespan(program: Program, schedule: Schedule, costs: Costs) -> float:
    """Run the program with durations: a message leaves when both ends are posted and the one before has."""
    stages = stage_costs(costs, placement=schedule.placement, layers_per_stage=[1] * schedule.num_stages)
    seconds = (stages.forward_s, stages.input_grad_s, stages.weight_grad_s, stages.backward_s)
    clock = [0.0] * program.num_devices
    at = [0] * program.num_devices
    posted: dict[tuple[Side, Message], float] = {}
    queue: dict[tuple[int, int, int], list[Message]] = defaultdict(list)
    over: dict[Message, float] = {}
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(program.instructions):
            while at[device] < len(row):
                instruction = row[at[device]]
                if isinstance(instruction, Compute):
                    # Without exchanges a pair takes the sum of its parts.
                    clock[device] += sum(float(seconds[a.kind][a.stage]) for a in instruction.parts)
                elif isinstance(instruction, Post):
                    for transfer in instruction.transfers:
                        message = transfer.message
                        posted[transfer.side, message] = clock[device]
                        if transfer.side is Side.SEND:
                            queue[device, message.target_device, message.group].append(message)
                elif instruction.transfer.message not in over:
                    break
                else:
                    clock[device] = max(clock[device], over[instruction.transfer.message])
                at[device] += 1
                moved = True
        for messages in queue.values():
            while messages and all((side, messages[0]) in posted for side in Side):
                message = messages.pop(0)
                wire = float(costs.transfer_s[message.source_device, message.target_device])
                over[message] = max(posted[side, message] for side in Side) + wire
                moved = True
    assert all(n == len(row) for n, row in zip(at, program.instructions, strict=True))
    return max(clock)


@settings(deadline=None, max_examples=150)
@given(seed=SEEDS)
def test_no_program_deadlocks_under_any_rules(seed: int) -> None:
    schedule, _, program = make(seed)
    for backend in Backend:
        check_program(program, backend=backend)
    for device, row in enumerate(program.instructions):
        computed = [action for i in row if isinstance(i, Compute) for action in i.parts]
        assert computed == schedule.actions(device)


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS)
def test_wrong_predictions_cost_time_only(seed: int) -> None:
    schedule, costs, _ = make(seed)
    rng = np.random.default_rng(seed)
    end_s = [np.sort(rng.uniform(0, 10, len(order))) for order in schedule.orders]
    start_s = [np.concatenate(([0.0], row[:-1])) for row in end_s]
    program = lower(schedule, start_s=start_s, end_s=end_s, transfer_s=costs.transfer_s)
    for backend in Backend:
        check_program(program, backend=backend)


@settings(deadline=None, max_examples=80)
@given(seed=SEEDS)
def test_posting_by_arrival_adds_no_waiting(seed: int) -> None:
    """With true predictions the program is exactly as fast as the simulated schedule."""
    schedule, costs, program = make(seed)
    expected = predict(schedule, costs)[0].makespan_s
    assert timed_makespan(program, schedule, costs) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", [name for name, spec in NAMED.items() if spec.copies == 1])
def test_every_named_schedule_can_be_lowered(name: str) -> None:
    schedule = named(name, num_devices=4, num_microbatches=8)
    rng = np.random.default_rng(7)
    for _ in range(3):
        costs = random_costs(rng, num_devices=4, num_microbatches=8, num_layers=schedule.num_stages)
        result, times = predict(schedule, costs)
        program = lower(schedule, transfer_s=costs.transfer_s, **times)
        for backend in Backend:
            check_program(program, backend=backend)
        assert timed_makespan(program, schedule, costs) == pytest.approx(result.makespan_s, rel=1e-12)


def posts(program: Program, device: int) -> list[tuple[int, Transfer]]:
    """Number of actions done before, and the transfer."""
    done, found = 0, []
    for instruction in program.instructions[device]:
        done += isinstance(instruction, Compute)
        if isinstance(instruction, Post):
            found += [(done, t) for t in instruction.transfers]
    return found


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS)
def test_sends_follow_their_producer_and_receives_are_not_early(seed: int) -> None:
    schedule, costs, program = make(seed, may_pair=False)
    times = predict(schedule, costs)[1]
    left: dict[Message, float] = {}
    for device in range(program.num_devices):
        for done, transfer in posts(program, device):
            if transfer.side is Side.SEND:
                producer = schedule.actions(device)[done - 1]
                message = transfer.message
                assert (producer.stage, producer.microbatch) == (message.source_stage, message.microbatch)
                left[message] = float(times["end_s"][device][done - 1])
    for device in range(program.num_devices):
        row = program.instructions[device]
        for done, transfer in posts(program, device):
            if transfer.side is Side.RECV and done < len(schedule.orders[device]):
                reads = next(
                    n
                    for n, i in enumerate(row)
                    if isinstance(i, Wait) and i.transfer.message == transfer.message
                )
                next_compute = next(n for n in range(reads, len(row)) if isinstance(row[n], Compute))
                waits_at = sum(isinstance(i, Compute) for i in row[:next_compute])
                in_time = float(times["end_s"][device][done]) > left[transfer.message]
                same_queue = any(
                    other.message.group == transfer.message.group and other.peer == transfer.peer
                    for at, other in posts(program, device)
                    if at == done and other is not transfer
                )
                assert in_time or done == waits_at or same_queue


@pytest.mark.parametrize(
    ("placement", "groups"),
    [
        ([0, 1, 2], ("forward", "backward")),
        (LOOP3, ("forward", "backward")),
        (V3, ("forward", "backward", "forward_return", "backward_return")),
        ([0, 1, 0, 1], ("forward", "backward", "forward_return", "backward_return")),
        ([0], ()),
    ],
)
def test_groups_are_as_many_as_a_pair_has_streams(placement: list[int], groups: tuple[str, ...]) -> None:
    _, _, program = make(3, placement)
    assert program.groups == groups
    streams = defaultdict(set)
    for device in range(program.num_devices):
        for _, transfer in posts(program, device):
            m = transfer.message
            pair = frozenset((m.source_device, m.target_device))
            streams[pair, m.group].add((m.source_device, m.is_forward))
    assert all(len(found) == 1 for found in streams.values())


def test_no_message_stays_inside_a_device() -> None:
    _, _, program = make(4, V3)
    boundaries = {
        (t.message.source_stage, t.message.target_stage) for d in range(3) for _, t in posts(program, d)
    }
    assert (2, 3) not in boundaries
    assert (3, 2) not in boundaries
    assert (1, 2) in boundaries


def one_forward_one_backward() -> Program:
    """Two devices, one microbatch after the other, by hand."""
    rows = [
        [Action.parse(t) for t in ("0F0", "0F1", "0B0", "0B1")],
        [Action.parse(t) for t in ("1F0", "1B0", "1F1", "1B1")],
    ]
    schedule = Schedule.of_actions(rows, num_microbatches=2, placement=[0, 1])
    start_s = [np.array([0.0, 1.0, 4.0, 6.0]), np.array([1.0, 2.0, 4.0, 5.0])]
    end_s = [np.array([1.0, 2.0, 6.0, 8.0]), np.array([2.0, 4.0, 5.0, 7.0])]
    return lower(schedule, start_s=start_s, end_s=end_s)


def test_text_is_readable() -> None:
    assert [" ".join(map(str, row)) for row in one_forward_one_backward().instructions] == [
        "0F0 [0SEND_F0] 0WAIT_SEND_F0 0F1 [0SEND_F1 0RECV_B0] 0WAIT_SEND_F1 0WAIT_RECV_B0 0B0 "
        "[0RECV_B1] 0WAIT_RECV_B1 0B1",
        "[1RECV_F0] 1WAIT_RECV_F0 1F0 [1RECV_F1] 1B0 [1SEND_B0] 1WAIT_SEND_B0 1WAIT_RECV_F1 1F1 1B1 "
        "[1SEND_B1] 1WAIT_SEND_B1",
    ]


def test_transfers_have_peers_groups_and_buffers() -> None:
    program = one_forward_one_backward()
    assert program.groups == ("forward", "backward")
    assert (program.num_receive_buffers, program.num_send_buffers) == ((1, 1), (1, 1))
    compute, post, wait = program.instructions[0][:3]
    assert str(compute) == "0F0"
    assert isinstance(post, Post)
    (transfer,) = post.transfers
    assert (transfer.peer, transfer.message.group, transfer.buffer) == (1, 0, 0)
    assert isinstance(wait, Wait)
    assert wait.transfer == transfer


def changed(program: Program, device: int, rows: list[Instruction]) -> Program:
    instructions = list(program.instructions)
    instructions[device] = tuple(rows)
    return replace(program, instructions=tuple(instructions))


def test_receives_in_another_order_than_sends_are_found_under_nccl_only() -> None:
    program = one_forward_one_backward()
    first, second = (i for i in program.instructions[1] if isinstance(i, Post) and "RECV" in str(i))
    second = Post(transfers=(second.transfers[0]._replace(buffer=1),))
    rest = [i for i in program.instructions[1] if i not in (first,) and "[1RECV_F1]" not in str(i)]
    wrong = replace(changed(program, 1, [second, first, *rest]), num_receive_buffers=(1, 2))
    check_program(wrong, backend=Backend.GLOO)
    with pytest.raises(PlanError, match=r"posted 1RECV_F1 but device 0 sends 0SEND_F0"):
        check_program(wrong, backend=Backend.NCCL)


def written(*lines: str, groups: tuple[int, int]) -> Program:
    """A program for two devices and two microbatches as text; activations and gradients in these groups."""

    def transfer(text: str) -> Transfer:
        stage, side, kind, microbatch = re.fullmatch(r"(\d)(SEND|RECV)_([FB])(\d)", text).groups()  # type: ignore[union-attr]
        source = 0 if kind == "F" else 1
        message = Message(
            source_stage=source,
            target_stage=1 - source,
            microbatch=int(microbatch),
            source_device=source,
            target_device=1 - source,
            group=groups[source],
        )
        assert int(stage) == (source if side == "SEND" else 1 - source)
        return Transfer(side=Side(side), message=message, buffer=int(microbatch))

    def instruction(token: str) -> Instruction:
        if token.startswith("["):
            return Post(transfers=tuple(map(transfer, token.strip("[]").split())))
        if "WAIT" in token:
            return Wait(transfer=transfer(token.replace("WAIT_", "")))
        return Compute(action=Action.parse(token))

    return Program(
        num_devices=2,
        num_microbatches=2,
        placement=(0, 1),
        groups=("forward", "backward")[: len(set(groups))],
        instructions=tuple(tuple(map(instruction, re.findall(r"\[.*?\]|\S+", line))) for line in lines),
        num_send_buffers=(2, 2),
        num_receive_buffers=(2, 2),
    )


ENDS = (
    "0WAIT_RECV_B0 0B0 [0RECV_B1] 0WAIT_RECV_B1 0B1 0WAIT_SEND_F0 0WAIT_SEND_F1",
    "1WAIT_RECV_F1 1F1 1B1 [1SEND_B1] 1WAIT_SEND_B0 1WAIT_SEND_B1",
)
BEGINNINGS = ("0F0 [0SEND_F0] 0F1", "[1RECV_F0] 1WAIT_RECV_F0 1F0 1B0")


def test_both_ends_sending_first_in_one_group_deadlock_under_nccl_only() -> None:
    """F1 and B0 cross: in one queue each end's send waits for the other's; apart or as batches they pass."""
    lines = [
        f"{BEGINNINGS[0]} [0SEND_F1] [0RECV_B0] {ENDS[0]}",
        f"{BEGINNINGS[1]} [1SEND_B0] [1RECV_F1] {ENDS[1]}",
    ]
    together = written(*lines, groups=(0, 0))
    check_program(together, backend=Backend.GLOO)
    with pytest.raises(PlanError, match="device 0 at 0WAIT_RECV_B0; device 1 at 1WAIT_RECV_F1"):
        check_program(together, backend=Backend.NCCL)
    check_program(written(*lines, groups=(0, 1)), backend=Backend.NCCL)
    batched = [line.replace("] [", " ") for line in lines]
    check_program(written(*batched, groups=(0, 0)), backend=Backend.NCCL)


def test_waiting_for_sends_on_both_sides_is_a_deadlock_everywhere() -> None:
    """Nothing buffers: a send is over only when the other side receives."""
    lines = [
        "0F0 [0SEND_F0] 0F1 [0SEND_F1] 0WAIT_SEND_F1 [0RECV_B0] " + ENDS[0].replace(" 0WAIT_SEND_F1", ""),
        f"{BEGINNINGS[1]} [1SEND_B0] 1WAIT_SEND_B0 [1RECV_F1] " + ENDS[1].replace(" 1WAIT_SEND_B0", ""),
    ]
    for backend in Backend:
        with pytest.raises(PlanError, match="device 0 at 0WAIT_SEND_F1; device 1 at 1WAIT_SEND_B0"):
            check_program(written(*lines, groups=(0, 1)), backend=backend)


@pytest.mark.parametrize("drop", ["1WAIT_RECV_F0", "[1SEND_B0]", "1F1", "0WAIT_SEND_F0", "[1RECV_F1]"])
def test_programs_that_lack_something_are_refused(drop: str) -> None:
    program = one_forward_one_backward()
    for device, row in enumerate(program.instructions):
        program = changed(program, device, [i for i in row if str(i) != drop])
    for backend in Backend:
        with pytest.raises(PlanError):
            check_program(program, backend=backend)


def test_a_schedule_that_deadlocks_is_refused() -> None:
    rows = [[Action.parse("0B0"), Action.parse("0F0")], [Action.parse("1F0"), Action.parse("1B0")]]
    schedule = Schedule.of_actions(rows, num_microbatches=1, placement=[0, 1])
    times = [np.zeros(2), np.zeros(2)]
    with pytest.raises(PlanError, match="deadlock"):
        lower(schedule, start_s=times, end_s=times)


def test_times_of_another_shape_and_two_copies_are_refused() -> None:
    schedule, _, _ = make(1, [0, 1])
    short = [np.zeros(1), np.zeros(1)]
    with pytest.raises(PlanError, match="times: need one start and end"):
        lower(schedule, start_s=short, end_s=short)
    with pytest.raises(PlanError, match="two copies"):
        lower(replace(schedule, routes=((0, 1), (1, 0))), start_s=short, end_s=short)
