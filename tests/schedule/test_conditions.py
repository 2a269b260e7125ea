"""Programs under the conditions that a framework's process adds: which of them deadlock, which never do."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.channels import Backend, check_for_every_backend, check_program
from quartet_plugin.schedule.conditions import Condition, under
from quartet_plugin.schedule.instruction import Post, Program, Side, Wait
from quartet_plugin.schedule.lowering import lower
from quartet_plugin.schedule.named import NAMED, named
from tests.schedule.communicators import blocked_first_uses, blocked_with_bound_devices
from tests.schedule.pipelines import random_costs, random_placement, random_schedule
from tests.schedule.test_lowering import make, predict, written

SEEDS = st.integers(0, 100_000)
EXECUTABLE = [name for name, spec in NAMED.items() if spec.copies == 1]
# Every condition that Megatron's and DeepSpeed's processes meet.
MET: tuple[tuple[Condition, ...], ...] = ((), (Condition.SYNCED,), (Condition.DESCRIBED,))


def check(program: Program, *conditions: Condition) -> None:
    check_program(program, backend=Backend.NCCL, conditions=conditions)


def make_named(name: str, num_devices: int, seed: int) -> Program:
    """A named schedule, lowered by the predicted times of random costs."""
    schedule = named(name, num_devices=num_devices, num_microbatches=2 * num_devices)
    rng = np.random.default_rng(seed)
    costs = random_costs(
        rng,
        num_devices=num_devices,
        num_microbatches=schedule.num_microbatches,
        num_layers=schedule.num_stages,
    )
    return lower(schedule, transfer_s=costs.transfer_s, **predict(schedule, costs)[1])


def make_timed(seed: int) -> Program:
    """A random order on a random placement, every action of which takes some time."""
    rng = np.random.default_rng(seed)
    placement = random_placement(rng, int(rng.integers(1, 6)), int(rng.integers(1, 4)))
    num_microbatches = int(rng.integers(1, 9))
    costs = random_costs(
        rng, num_devices=max(placement) + 1, num_microbatches=num_microbatches, num_layers=len(placement)
    )
    layers = tuple(
        replace(
            layer,
            forward_s=layer.forward_s + 0.1,
            input_grad_s=layer.input_grad_s + 0.1,
            weight_grad_s=layer.weight_grad_s + 0.1,
        )
        for layer in costs.layers
    )
    costs = replace(costs, layers=layers)
    schedule = random_schedule(rng, placement=placement, num_microbatches=num_microbatches)
    return lower(schedule, transfer_s=costs.transfer_s, **predict(schedule, costs)[1])


@settings(deadline=None, max_examples=80)
@given(seed=SEEDS, conditions=st.sampled_from(MET))
def test_no_program_deadlocks_under_the_conditions_that_processes_meet(
    seed: int, conditions: tuple[Condition, ...]
) -> None:
    program = make_timed(seed)
    assert not blocked_first_uses(under(program, conditions))
    check_for_every_backend(program, conditions=conditions)


@pytest.mark.parametrize("name", EXECUTABLE)
def test_no_named_schedule_deadlocks_under_the_conditions_that_processes_meet(name: str) -> None:
    for num_devices in (2, 4):
        program = make_named(name, num_devices, seed=7)
        for conditions in MET:
            assert not blocked_first_uses(under(program, conditions))
            check(program, *conditions)


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS)
def test_with_its_communicators_made_before_a_described_program_needs_no_true_prediction(seed: int) -> None:
    check(lower_by_wrong_times(seed), Condition.DESCRIBED)


def lower_by_wrong_times(seed: int) -> Program:
    schedule, costs, _ = make(seed)
    rng = np.random.default_rng(seed)
    end_s = [np.sort(rng.uniform(0, 10, len(order))) for order in schedule.orders]
    start_s = [np.concatenate(([0.0], row[:-1])) for row in end_s]
    return lower(schedule, start_s=start_s, end_s=end_s, transfer_s=costs.transfer_s)


@pytest.mark.parametrize("seed", [0, 1])
def test_wrong_predictions_let_first_transfers_wait_in_a_circle(seed: int) -> None:
    """Why communicators are made before the first step: the lowering assumes that no post blocks."""
    program = lower_by_wrong_times(seed)
    check(program)
    assert blocked_first_uses(program)


def test_first_transfers_that_cross_are_named() -> None:
    """Each device begins in the group that the other comes to later; no message is out of order."""
    program = written(
        "0F0 [0SEND_F0] 0F1 [0RECV_B0] [0SEND_F1] 0WAIT_SEND_F0 0WAIT_RECV_B0 0B0 [0RECV_B1] "
        "0WAIT_RECV_B1 0B1 0WAIT_SEND_F1",
        "[1RECV_F0] 1WAIT_RECV_F0 1F0 1B0 [1SEND_B0] [1RECV_F1] 1WAIT_SEND_B0 1WAIT_RECV_F1 1F1 1B1 "
        "[1SEND_B1] 1WAIT_SEND_B1",
        groups=(0, 1),
    )
    check(program)
    assert not blocked_first_uses(program)
    first, *rest = program.instructions[0]
    early = next(i for i in rest if str(i) == "[0RECV_B0]")
    crossed = (early, first, *(i for i in rest if i is not early))
    program = replace(program, instructions=(crossed, program.instructions[1]))
    check(program)
    assert blocked_first_uses(program) == [
        "device 0 with 1 in group backward",
        "device 1 with 0 in group forward",
    ]


@pytest.mark.parametrize("num_devices", [4, 8])
@pytest.mark.parametrize("name", ["interleaved", "breadth-first"])
def test_a_loop_that_receives_at_need_deadlocks_with_one_communicator_a_group(
    name: str, num_devices: int
) -> None:
    """DeepSpeed binds the device: unbound groups alone let its first step end on three GPUs and more."""
    for seed in range(3):
        described = under(make_named(name, num_devices, seed), [Condition.DESCRIBED])
        assert blocked_with_bound_devices(described)
        check(described)
        assert not blocked_first_uses(described)


@pytest.mark.parametrize("num_devices", [4, 8])
def test_a_chain_that_receives_at_need_ends_with_one_communicator_a_group(num_devices: int) -> None:
    for seed in range(3):
        described = under(make_named("gpipe", num_devices, seed), [Condition.DESCRIBED])
        assert not blocked_with_bound_devices(described)


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS)
def test_under_synchronization_nothing_is_under_way_when_a_forward_starts(seed: int) -> None:
    for row in under(make_timed(seed), [Condition.SYNCED]).instructions:
        pending = set()
        for instruction in row:
            if isinstance(instruction, Post):
                pending |= {t.end for t in instruction.transfers}
            elif isinstance(instruction, Wait):
                pending.remove(instruction.transfer.end)
            elif instruction.action.kind is ActionKind.F:
                assert not pending
        assert not pending


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS)
def test_described_activations_are_received_at_need_and_sends_waited_for_last(seed: int) -> None:
    for row in under(make_timed(seed), [Condition.DESCRIBED]).instructions:
        for instruction, after in zip(row, [*row[1:], None], strict=True):
            if isinstance(instruction, Post):
                for transfer in instruction.transfers:
                    if transfer.side is Side.RECV and transfer.message.is_forward:
                        assert after == Wait(transfer=transfer)
        last = [i for i in row if isinstance(i, Wait) and i.transfer.side is Side.SEND]
        assert list(row[len(row) - len(last) :]) == last
