"""`ncclsim`: a process group of CPU tensors that is as strict as NCCL, over gloo.

Two ranks of a group get a communicator, with a queue and a thread of its own, at their first transfer; that
blocks the host until the peer is there. Tags do not count. A send is over when its receive has been reached.
A barrier without a device takes the device that the group has used, else `rank % devices`, and fails where
that is not LOCAL_RANK. A group that is made while the default group has a bound device has a single queue for
all peers. With a seed for trouble, transfers take place at random legal times: what a receive's
buffer holds before the wait is NaN, and a sent tensor that changes before it has left ends the process.
"""

import functools
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

NAME = "ncclsim"
TROUBLE = "QUARTET_TEST_TROUBLE_SEED"
CHANGED = "a tensor was written to while it was being sent"
_DATA, _READY = 0, 1
_LONGEST_DELAY_S = 0.002


class SimulatedWork(dist.Work):  # type: ignore[misc]
    """A transfer; `at_wait` is done by the first wait."""

    def __init__(self) -> None:
        super().__init__()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.at_wait: Callable[[], None] | None = None

    def run(self, transfer: Callable[[], None]) -> None:
        """The worker's part."""
        try:
            transfer()
        except BaseException as error:
            self._error = error
        self._over.set()

    def wait(self, timeout: Any = None) -> bool:
        """Blocks until the transfer is over."""
        self._over.wait()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        if self.at_wait is not None:
            finish, self.at_wait = self.at_wait, None
            finish()
        return True

    def is_completed(self) -> bool:
        """Whether the transfer is over."""
        return self._over.is_set()


class _Stream:
    """Transfers one after the other, in a thread of its own."""

    def __init__(self) -> None:
        self.queue: queue.Queue[tuple[SimulatedWork, Callable[[], None]]] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            work, transfer = self.queue.get()
            work.run(transfer)


class _Communicator:
    """Two ranks of a group: one queue, sends and receives together."""

    def __init__(self, store: Any, *, mine: int, peer: int, timeout: timedelta, stream: "_Stream") -> None:
        low, high = sorted((mine, peer))
        # Blocks until the peer has come.
        self._pair = dist.ProcessGroupGloo(
            dist.PrefixStore(f"{low}:{high}", store), int(mine == high), 2, timeout
        )
        self._peer = int(mine == low)
        self._random = random.Random(f"{os.environ.get(TROUBLE)} {mine} {peer}")
        self._troubled = TROUBLE in os.environ
        self._queue = stream.queue

    def send(self, tensor: torch.Tensor) -> SimulatedWork:
        work, expected = SimulatedWork(), _checksum(tensor)

        def transfer() -> None:
            self._pair.recv([torch.empty(1)], self._peer, _READY).wait()
            self._delay()
            self._pair.send([tensor.detach().contiguous()], self._peer, _DATA).wait()
            if _checksum(tensor) != expected:
                print(CHANGED, file=sys.stderr, flush=True)
                os._exit(86)

        self._queue.put((work, transfer))
        return work

    def receive(self, tensor: torch.Tensor) -> SimulatedWork:
        work, arriving = SimulatedWork(), torch.empty_like(tensor)
        is_late = self._troubled and self._random.random() < 0.5
        if self._troubled:
            spoil(tensor)

        def hand_over() -> None:
            tensor.detach().copy_(arriving)

        def transfer() -> None:
            self._pair.send([torch.ones(1)], self._peer, _READY).wait()
            self._pair.recv([arriving], self._peer, _DATA).wait()
            self._delay()
            if not is_late:
                hand_over()

        work.at_wait = hand_over if is_late else None
        self._queue.put((work, transfer))
        return work

    def _delay(self) -> None:
        if self._troubled:
            time.sleep(self._random.uniform(0, _LONGEST_DELAY_S))


def _checksum(tensor: torch.Tensor) -> int:
    return hash(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def spoil(tensor: torch.Tensor) -> None:
    """Fill a buffer with what nobody may read."""
    with torch.no_grad():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 99)


class SimulatedNccl(dist.ProcessGroup):  # type: ignore[misc]
    """One rank of a group; collectives are gloo's."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._mine, self._timeout = store, rank, timeout
        self._gloo = dist.ProcessGroup(store, rank, size)
        self._gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._gloo._register_backend(
            torch.device("cpu"),
            dist.ProcessGroup.BackendType.GLOO,
            dist.ProcessGroupGloo(store, rank, size, timeout),
        )
        self._communicators: dict[int, _Communicator] = {}
        self._is_used = False
        is_bound = dist.is_initialized() and dist.group.WORLD.bound_device_id is not None
        self._stream = _Stream() if is_bound else None

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> SimulatedWork:
        """Queues a send."""
        return self._communicator(peer).send(tensors[0])

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> SimulatedWork:
        """Queues a receive."""
        return self._communicator(peer).receive(tensors[0])

    def barrier(self, opts: Any = None) -> Any:
        """On the device that NCCL would take. Raises RuntimeError where it is another process's."""
        named = list(getattr(opts, "device_ids", None) or [])
        guessed = dist.get_rank() % int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = named[0] if named else local_rank if self._is_used else guessed
        if device != local_rank:
            raise RuntimeError(
                f"Duplicate GPU detected: a barrier on device {device} of the process of {local_rank}"
            )
        self._is_used = True
        return self._gloo.barrier()

    def _communicator(self, peer: int) -> _Communicator:
        self._is_used = True
        if peer not in self._communicators:
            self._communicators[peer] = _Communicator(
                self._store,
                mine=self._mine,
                peer=peer,
                timeout=self._timeout,
                stream=self._stream or _Stream(),
            )
        return self._communicators[peer]

    def _get_backend(self, device: torch.device) -> SimpleNamespace:
        """A backend that other groups cannot be split from."""
        return SimpleNamespace(supports_splitting=False)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name."""
        return NAME


def _collective(name: str) -> Callable[..., Any]:
    def call(self: SimulatedNccl, *args: Any, **kwargs: Any) -> Any:
        self._is_used = True
        return getattr(self._gloo, name)(*args, **kwargs)

    return call


for _name in (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "_allgather_base", "gather"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "scatter", "alltoall", "alltoall_base"),
):
    setattr(SimulatedNccl, _name, _collective(_name))


def install() -> None:
    """Let process groups of this process be `ncclsim` where gloo is asked for as the default."""
    dist.Backend.register_backend(NAME, SimulatedNccl, devices=["cpu"])
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        original(NAME, *args, **kwargs)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_process_group
