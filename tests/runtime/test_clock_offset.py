"""The offset of a host's clock, over torch's store, with clocks that differ."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from quartet_plugin.errors import InfrastructureError
from quartet_plugin.runtime import clock_offset
from quartet_plugin.runtime.clock_offset import clock_offset_s

HOSTS = ("near", "late", "near", "early", "late")
OFFSETS_S = {"near": 0.0, "late": 40.0, "early": -7.0}


class HostClock:
    """The wall clock of the host whose rank runs in this thread: hosts are wrong by OFFSETS_S."""

    def __init__(self) -> None:
        self.of_thread = threading.local()

    def time(self) -> float:
        """What the host's clock says."""
        return time.time() + float(self.of_thread.offset_s)


def offsets(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The offset that every rank measures."""
    clock = HostClock()
    monkeypatch.setattr(clock_offset, "time", clock)
    store = dist.HashStore()

    def of_rank(rank: int) -> float:
        clock.of_thread.offset_s = OFFSETS_S[HOSTS[rank]]
        return clock_offset_s(store, rank=rank, world_size=len(HOSTS), host=HOSTS[rank])

    with ThreadPoolExecutor(len(HOSTS)) as pool:
        return list(pool.map(of_rank, range(len(HOSTS))))


def test_every_host_has_the_offset_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    by_rank = offsets(monkeypatch)
    assert by_rank == pytest.approx([-OFFSETS_S[host] for host in HOSTS], abs=1.0)
    # Ranks of one host have one clock, and rank 0's host is right by definition.
    assert by_rank[0] == by_rank[2] == 0.0
    assert by_rank[1] == by_rank[4]


def test_a_rank_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_offset, "_TIMEOUT", timedelta(milliseconds=20))
    store: Any = dist.HashStore()
    with pytest.raises(InfrastructureError, match="rank 1: the clocks of hosts cannot be compared"):
        clock_offset_s(store, rank=1, world_size=2, host="late")
