"""Barriers of processes whose RANK a plan has changed: each runs on its own device."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.rank.nccl import keep_devices, uses_nccl

_C10D = dist.distributed_c10d


class Calls:
    """What torch's functions were called with, in order."""

    def __init__(self, *, backend: str, local_rank: int) -> None:
        self.backend, self.local_rank = backend, local_rank
        self.barriers: list[Any] = []
        self.first_use: list[str] = []

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None) -> None:
        """As torch's."""
        self.barriers.append(device_ids)

    def get_backend(self, group: Any = None) -> str:
        """Fails for a group that this process is not in, as torch's."""
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("Invalid process group specified")
        return self.backend

    def get_backend_config(self, group: Any = None) -> str:
        """What torch uses where no backend was named."""
        return "cuda:nccl"

    def init_process_group(self, *_: Any, **__: Any) -> None:
        """As torch's."""


@contextmanager
def process(*, backend: str, local_rank: int) -> Iterator[Calls]:
    """A process on device `local_rank`, whose ranks were moved."""
    calls = Calls(backend=backend, local_rank=local_rank)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("barrier", "init_process_group", "get_backend", "get_backend_config"):
            patch.setattr(dist, name, getattr(calls, name))
            patch.setattr(_C10D, name, getattr(calls, name))
        patch.setattr(dist, "all_reduce", lambda tensor: calls.first_use.append(tensor.device))
        patch.setattr(torch, "zeros", lambda _, *, device: SimpleNamespace(device=device))
        patch.setattr(torch.cuda, "current_device", lambda: local_rank)
        installation = keep_devices(local_rank)
        try:
            yield calls
        finally:
            installation.uninstall()


@settings(deadline=None, max_examples=40)
@given(rank_of=st.integers(1, 12).flatmap(lambda size: st.permutations(range(size))), data=st.data())
def test_a_barrier_is_given_the_device_where_nccl_would_take_another(
    rank_of: list[int], data: st.DataObject
) -> None:
    local_size = data.draw(st.sampled_from([n for n in range(1, 13) if len(rank_of) % n == 0]))
    for launch_rank, rank in enumerate(rank_of):
        local_rank = launch_rank % local_size
        with process(backend="nccl", local_rank=local_rank) as calls:
            dist.init_process_group("nccl")
            dist.barrier()
            # ProcessGroupNCCL takes the first of these that there is; the last is a guess.
            devices = [*(ids[0] for ids in calls.barriers if ids), *calls.first_use, rank % local_size]
            assert devices[:2] == [local_rank, f"cuda:{local_rank}"]


def test_a_group_whose_backend_nobody_named_runs_on_its_device() -> None:
    """A script's bare `init_process_group()`: torch calls the backend undefined, and takes the device's."""
    with process(backend="undefined", local_rank=3) as calls:
        dist.init_process_group()
        dist.barrier()
        assert (calls.barriers, calls.first_use) == ([[3]], ["cuda:3"])


def test_a_device_that_was_named_stays() -> None:
    with process(backend="cpu:gloo,cuda:nccl", local_rank=3) as calls:
        dist.barrier(device_ids=[5])
        dist.barrier(group=None)
        assert calls.barriers == [[5], [3]]


def test_other_backends_and_groups_of_others_are_left_alone() -> None:
    with process(backend="gloo", local_rank=3) as calls:
        dist.init_process_group("gloo")
        dist.barrier()
        assert (calls.barriers, calls.first_use) == ([None], [])
    with process(backend="nccl", local_rank=3) as calls:
        dist.barrier(dist.GroupMember.NON_GROUP_MEMBER)
        assert calls.barriers == [None]
    assert not uses_nccl("gloo")
