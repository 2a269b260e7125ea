"""What a rank's profile is made of, without Megatron's processes; tests/cli/test_profile.py has them."""

import pytest
import torch

from quartet_plugin.errors import UsageError
from quartet_plugin.megatron.profiling import cut_mean
from quartet_plugin.megatron.profiling_memory import ActivationLedger
from quartet_plugin.megatron.profiling_rank import SimulatedRank


def test_the_played_rank_is_read_strictly() -> None:
    assert SimulatedRank.of("1") is None
    assert SimulatedRank.of("48/1024") == SimulatedRank(rank=48, world_size=1024)
    for text in ("4/4", "-1/4", "1/99999", "a/b", "1/2/3", "0/0"):
        with pytest.raises(UsageError, match="QUARTET_PROFILE"):
            SimulatedRank.of(text)


def test_the_ledger_counts_each_storage_once_and_no_weights() -> None:
    ledger = ActivationLedger()
    ledger.is_open = True
    linear = torch.nn.Linear(8, 8, bias=False)
    given = torch.randn(4, 8, requires_grad=True)
    hidden = given * 1.0
    ledger.leave_out(linear.parameters())
    ledger.enter("first")
    out = linear(hidden)
    again = linear(hidden)
    ledger.enter("second")
    total = (out * again).sum()
    ledger.leave()
    total.backward()
    assert ledger.bytes_of("first") == 4 * 8 * 4
    assert ledger.bytes_of("second") == 2 * 4 * 8 * 4
    assert ledger.bytes_of("third") == 0


def test_the_ledger_counts_one_forward() -> None:
    ledger = ActivationLedger()
    ledger.is_open = True
    for _ in range(3):
        ledger.enter("part")
        (torch.randn(16, requires_grad=True) * 1.0).square().sum()
        ledger.leave()
    assert ledger.bytes_of("part") == 16 * 4
    closed = ActivationLedger()
    closed.enter("part")
    (torch.randn(16, requires_grad=True) * 1.0).square().sum()
    closed.leave()
    assert closed.bytes_of("part") == 0


def test_parts_are_means_so_that_they_add_up_without_accidents() -> None:
    assert cut_mean([1.0, 1.0, 1.0, 2.0]) == 1.25
    assert cut_mean([1.0, 1.0, 1.0, 100.0]) == 1.5
    assert cut_mean([0.0, 0.0]) == 0.0
