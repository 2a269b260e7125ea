"""What a rank's profile is made of, without Megatron's processes; tests/cli/test_profile.py has them."""

import gc
import weakref

import pytest
import torch

from quartet_plugin.errors import UsageError
from quartet_plugin.megatron.part_activations import AllocatedPartActivations, SavedPartActivations
from quartet_plugin.megatron.profiling import SimulatedRank, cut_mean


def test_the_simulated_rank_is_read_strictly() -> None:
    assert SimulatedRank.of("1") is None
    assert SimulatedRank.of("48/1024") == SimulatedRank(rank=48, world_size=1024)
    for text in ("4/4", "-1/4", "1/99999", "a/b", "1/2/3", "0/0"):
        with pytest.raises(UsageError, match="QUARTET_PROFILE"):
            SimulatedRank.of(text)


def test_activations_count_each_storage_once_and_no_weights() -> None:
    activations = SavedPartActivations()
    activations.is_open = True
    linear = torch.nn.Linear(8, 8, bias=False)
    layer_input = torch.randn(4, 8, requires_grad=True)
    hidden = layer_input * 1.0
    activations.leave_out(linear.parameters())
    activations.enter("first")
    out = linear(hidden)
    again = linear(hidden)
    activations.enter("second")
    total = (out * again).sum()
    activations.leave()
    total.backward()
    assert activations.bytes_of("first") == 4 * 8 * 4
    assert activations.bytes_of("second") == 2 * 4 * 8 * 4
    assert activations.bytes_of("third") == 0


def test_a_forward_without_a_backward_keeps_nothing() -> None:
    activations = SavedPartActivations()
    activations.is_open = True
    gc.disable()
    try:
        activations.enter("part")
        out = (torch.randn(16, requires_grad=True) * 1.0).exp()
        activations.leave()
        alive = weakref.ref(out)
        del out
        assert alive() is None
    finally:
        gc.enable()


def test_activations_count_one_forward() -> None:
    activations = SavedPartActivations()
    activations.is_open = True
    for _ in range(3):
        activations.enter("part")
        (torch.randn(16, requires_grad=True) * 1.0).square().sum()
        activations.leave()
    assert activations.bytes_of("part") == 16 * 4
    closed = SavedPartActivations()
    closed.enter("part")
    (torch.randn(16, requires_grad=True) * 1.0).square().sum()
    closed.leave()
    assert closed.bytes_of("part") == 0


def test_the_allocator_counts_without_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = [0]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated[0])
    activations = AllocatedPartActivations()
    activations.is_open = True
    for once in (1000, 0):  # the first forward makes a buffer that stays
        for part, size in (("first", 30 + once), ("second", 50)):
            activations.enter(part)
            allocated[0] += size
        activations.leave()
        allocated[0] -= 80
    activations.is_open = False
    activations.enter("first")
    allocated[0] += 7
    activations.leave()
    assert (activations.bytes_of("first"), activations.bytes_of("second")) == (30, 50)
    assert activations.bytes_of("third") == 0


def test_parts_are_means_so_that_they_add_up_without_accidents() -> None:
    assert cut_mean([1.0, 1.0, 1.0, 2.0]) == 1.25
    assert cut_mean([1.0, 1.0, 1.0, 100.0]) == 1.5
    assert cut_mean([0.0, 0.0]) == 0.0
