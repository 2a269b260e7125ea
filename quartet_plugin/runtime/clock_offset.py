"""How far this host's clock is from rank 0's: by pings over the store of the process group.

Action times of ranks are laid beside each other by the wall clock, and the clocks of two hosts differ by
milliseconds. One rank of every other host pings rank 0, host after host, and takes the fastest answer: the
offset is wrong by at most half of its round trip.
"""

import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from quartet_plugin.errors import InfrastructureError, first_line
from quartet_plugin.rank.rendezvous import gather_through

_NUM_PINGS = 8
_TIMEOUT = timedelta(seconds=60)


def clock_offset_of_group() -> float:
    """Seconds to add to this host's wall clock to have rank 0's. Every rank of the default group calls it.

    Raises InfrastructureError where a rank does not answer.
    """
    store = dist.PrefixStore("quartet/clock", distributed_c10d._get_default_store())
    return clock_offset_s(
        store, rank=dist.get_rank(), world_size=dist.get_world_size(), host=socket.gethostname()
    )


def clock_offset_s(store: Any, *, rank: int, world_size: int, host: str) -> float:
    """The same over any store, for a rank on `host`."""
    try:
        hosts = gather_through(
            store, "host", host, rank=rank, world_size=world_size, limit_s=_TIMEOUT.total_seconds()
        )
        # Of every other host the lowest rank, in this order.
        pinging = {name: hosts.index(name) for name in hosts if name != hosts[0]}
        if rank == 0:
            for other in pinging.values():
                _answer(store, other)
        if host == hosts[0]:
            return 0.0
        if pinging[host] == rank:
            store.set(f"offset/{host}", repr(_ping(store, rank)))
        return float(_read(store, f"offset/{host}"))
    except (RuntimeError, InfrastructureError) as error:
        raise InfrastructureError(
            f"rank {rank}: the clocks of hosts cannot be compared: {first_line(error)}"
        ) from error


def _answer(store: Any, other: int) -> None:
    for number in range(_NUM_PINGS):
        _read(store, f"ping/{other}/{number}")
        store.set(f"pong/{other}/{number}", repr(time.time()))


def _ping(store: Any, rank: int) -> float:
    """The offset by the ping with the shortest round trip."""
    pings = []
    for number in range(_NUM_PINGS):
        begin = time.time()
        store.set(f"ping/{rank}/{number}", "")
        answered = float(_read(store, f"pong/{rank}/{number}"))
        end = time.time()
        pings.append((end - begin, answered - (begin + end) / 2))
    return min(pings)[1]


def _read(store: Any, name: str) -> str:
    store.wait([name], _TIMEOUT)
    return str(store.get(name).decode())
