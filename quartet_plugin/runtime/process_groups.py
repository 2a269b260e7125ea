"""The process groups that boundary tensors go through: one a stream of a program, and its communicators.

NCCL makes a communicator for each pair of devices in a group at their first transfer, if the group has no
bound device: programs are lowered for that. With a bound device a group has one communicator, on which all
transfers of a device run one after the other, so these groups are made without.
A first transfer blocks the host until the peer is there: all pairs meet here, in one order, so that nothing
is made inside of a step.
"""

import atexit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from quartet_plugin.errors import PlanError
from quartet_plugin.rank.nccl import backend_name, uses_nccl
from quartet_plugin.rank.rendezvous import listed_ranks
from quartet_plugin.schedule.instruction import Program, Transfer
from quartet_plugin.schedule.lowering import group_names, groups_of_streams

# A posted receive is a kernel that spins on its streaming multiprocessors until the message is there: few of
# them, since one link is filled by few. NCCL's own variable NCCL_MAX_CTAS goes before it.
_MAX_CTAS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """The process groups of a placement's streams; `ranks[d]` is the global rank of device d.

    `is_nccl`: transfers run on streams of the device and not on the host. `host_group` is a gloo group of the
    pipeline for tensors in host memory, where it was asked for.
    """

    groups: tuple[Any, ...]
    ranks: tuple[int, ...]
    is_nccl: bool = False
    host_group: Any = None

    @classmethod
    def open(
        cls,
        placement: Sequence[int],
        *,
        ranks: Sequence[int],
        device: torch.device | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        has_host_group: bool = False,
    ) -> "Channels":
        """Make one group for each of `Program.groups` and its communicators; every process calls this, once.

        `placement` [num_stages] are the devices, `ranks` this process's pipeline, `device` holds the tensors
        that `backend` and the default group move, by default the CPU. All pipelines of the job are
        gathered first, because a group is made by everybody together.
        """
        device = device or torch.device("cpu")
        names = group_names(placement)
        kinds: list[tuple[str, str | None]] = [(name, backend) for name in names]
        kinds += [("host", "gloo")] * has_host_group
        pipeline_groups: list[Any] = []
        for pipeline in rank_groups(ranks, device):
            groups = [new_group(pipeline, name=name, backend=kind, timeout=timeout) for name, kind in kinds]
            pipeline_groups = groups if pipeline == tuple(ranks) else pipeline_groups
        channels = cls(
            groups=tuple(pipeline_groups[: len(names)]),
            ranks=tuple(ranks),
            is_nccl=uses_nccl(backend or backend_name()),
            host_group=pipeline_groups[-1] if has_host_group else None,
        )
        channels._warm_up(placement, device)
        return channels

    def address(self, transfer: Transfer) -> tuple[int, Any]:
        """The global rank of the device at the other end, and the process group of the message."""
        return self.ranks[transfer.peer], self.groups[transfer.message.group]

    def _warm_up(self, placement: Sequence[int], device: torch.device) -> None:
        """Send one element through every stream, in the same order on all devices, which cannot deadlock."""
        names = group_names(placement)
        streams = groups_of_streams(placement).items()
        this_device = self.ranks.index(dist.get_rank())
        element = torch.zeros(1, device=device)
        for (source, target, _), name in sorted(streams, key=lambda stream: names.index(stream[1])):
            group = self.groups[names.index(name)]
            if this_device == source:
                dist.isend(element, self.ranks[target], group=group).wait()
            elif this_device == target:
                dist.irecv(element, self.ranks[source], group=group).wait()


def new_group(
    ranks: Sequence[int], *, name: str, backend: str | None = None, timeout: timedelta | None = None
) -> Any:
    """A process group that NCCL's logs call `quartet_NAME`, without a bound device.

    Every process of the job calls this alike, as `torch.distributed.new_group`.
    """
    with _unbound():
        group = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backend,
            pg_options=_options(backend or backend_name(), timeout),
            group_desc=f"quartet_{name}",
        )
    atexit.register(_release, group)
    return group


@contextmanager
def _unbound() -> Iterator[None]:
    """The default group without its bound device, which new groups would inherit."""
    world = dist.group.WORLD
    device = getattr(world, "bound_device_id", None)
    if device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def _options(backend: str, timeout: timedelta | None) -> Any:
    """NCCL's options for transfers between stages; None for another library."""
    if not (uses_nccl(backend) and dist.is_nccl_available()):
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = _MAX_CTAS
    if timeout is not None:
        options._timeout = timeout
    return options


def rank_groups(ranks: Sequence[int], device: torch.device) -> list[tuple[int, ...]]:
    """The ranks of every group of one kind, such as pipelines, in ascending order; all processes call this.

    `ranks` are those of this process's group; all groups have equally many.
    """
    group_ranks = torch.tensor(list(ranks), dtype=torch.int64, device=device)
    gathered = [torch.empty_like(group_ranks) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, group_ranks)
    return sorted({tuple(group.tolist()) for group in gathered})


def _release(group: Any) -> None:
    """End gloo's threads before the interpreter takes their objects apart, which can abort the process."""
    with suppress(RuntimeError, ValueError, AssertionError):
        if dist.is_initialized() and backend_name(group) in ("gloo", "cpu:gloo"):
            dist.destroy_process_group(group)


def agree_on_program(program: Program, *, group: Any, device: torch.device) -> None:
    """Compare a program's digest over its pipeline's `group`; another order on one rank would hang.

    Every process of the group calls this with its own program. Raises PlanError on all of them, with the
    ranks that differ.
    """
    digest = bytes.fromhex(program.digest)
    digest_words = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(digest_words) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, digest_words, group=group)
    ranks_of: dict[str, list[int]] = {}
    for rank, words in zip(dist.get_process_group_ranks(group), gathered, strict=True):
        ranks_of.setdefault(bytes(words.tolist()).hex()[:12], []).append(rank)
    if len(ranks_of) > 1:
        raise PlanError(
            f"the schedule of {program.num_microbatches} microbatches: {_differences(ranks_of)}; install the "
            "same releases of this plugin, numpy and numba on every node"
        )


def _differences(ranks_of: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{listed_ranks(ranks)} made {digest}" for digest, ranks in ranks_of.items())
