"""The terms of a step once an iteration: the optimizer's step of dense weights and of experts'."""

from dataclasses import replace

import pytest

from quartet_plugin.cost.constants import NEUTRAL
from quartet_plugin.cost.iteration.step import clearing_s, held_layers, held_weights, optimizer_s
from quartet_plugin.cost.memory import Weights, memory_by_device
from quartet_plugin.cost.run import ON_CPU, TrainingRun
from quartet_plugin.model.job_description import Experts
from tests.cost.live import cpu_run
from tests.cost.runs import EXPERTS, run

NUM = 1e9


def passes(run: TrainingRun, held: Weights) -> float:
    """Bytes that the step passes through memory, for each of a billion weights."""
    seconds = optimizer_s(run, NEUTRAL, held, counts=held_layers(run, 0))
    memory = run.cluster.device.memory_bandwidth_bytes_per_s * 0.85
    return seconds * memory / NEUTRAL.optimizer / NUM


@pytest.mark.parametrize(
    ("tp", "dp", "ep", "is_whole", "copies"),
    [
        (1, 8, 8, False, 1),
        (1, 8, 2, False, 4),
        (2, 4, 4, False, 1),
        (2, 4, 4, True, 2),
        (2, 4, 8, True, 1),
        (8, 1, 4, True, 2),
    ],
)
def test_the_copies_of_an_expert_share_its_optimizer_states(
    tp: int, dp: int, ep: int, is_whole: bool, copies: int
) -> None:
    """Of 28 bytes that a step passes each copy has its part; 6 bytes of gradients' norm and clearing stay."""
    found = replace(run(EXPERTS, tp=tp, dp=dp, ep=ep, gbs=4 * dp), has_whole_experts=is_whole)
    assert found.expert_copies == copies
    assert found.optimizer_shards == (float(dp), float(copies))
    assert passes(found, Weights(num_dense=NUM, num_expert=0.0)) == pytest.approx(28 / dp + 6)
    assert passes(found, Weights(num_dense=0.0, num_expert=NUM)) == pytest.approx(28 / copies + 6)
    unsharded = replace(found, zero_stage=0)
    assert passes(unsharded, Weights(num_dense=0.0, num_expert=NUM)) == pytest.approx(34)


def test_memory_and_time_share_the_states_alike() -> None:
    found = run(EXPERTS, dp=8, ep=2)
    held = held_weights(found, 0)
    dense, expert = found.optimizer_shards
    states = memory_by_device(found)[0].optimizer_bytes
    assert states == pytest.approx(12.0 * (held.num_dense / dense + held.num_expert / expert))


def test_a_sharded_models_experts_are_cleared_in_their_own_shards() -> None:
    found = replace(run(EXPERTS, dp=8, ep=2), zero_stage=3, shard_group=8)
    dense, expert = (
        clearing_s(found, NEUTRAL, held)
        for held in (Weights(num_dense=NUM, num_expert=0.0), Weights(num_dense=0.0, num_expert=NUM))
    )
    assert expert == pytest.approx(2 * dense)


def test_every_experts_tensors_are_stepped_by_themselves() -> None:
    """On processors: a router, and of each expert two weights and two biases in place of the dense FFN's."""
    experts = Experts(num_experts=8, experts_per_token=2, ffn_hidden_size=512, num_dense_layers=3)
    found = replace(cpu_run(layers=8, pp=1), experts=experts)
    assert found.software == ON_CPU
    assert held_layers(found, 0) == (3, 5)
    held = held_weights(found, 0)
    few, many = (optimizer_s(found, NEUTRAL, held, counts=counts) for counts in ((8, 0), (3, 5)))
    assert many - few == pytest.approx(5 * (1 + 8 * 4 - 4) * NEUTRAL.launch_s)
