"""The devices of a partition as threads of one process: messages between them are queues."""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quartet_plugin.runtime.partition.messages import BlockMessages, Endpoint, RunningMessages

_TIMEOUT_S = 30


class _Arrival:
    def __init__(self, source: "queue.Queue[torch.Tensor]", target: torch.Tensor) -> None:
        self._source, self._target = source, target

    def wait(self) -> None:
        self._target.copy_(self._source.get(timeout=_TIMEOUT_S))


class ThreadMessages(BlockMessages):
    """`BlockMessages` of one thread; all threads of a partition share `queues`."""

    def __init__(self, device: int, num_devices: int, queues: Any) -> None:
        super().__init__(None, range(num_devices))
        self._device, self._queues = device, queues

    def start(self, sends: Sequence[tuple[Any, Endpoint]], receives: Sequence[Endpoint]) -> RunningMessages:
        """Put a copy into the queue of each pair; take from it when the caller waits."""
        for key, (device, tensor) in sends:
            assert tensor.is_contiguous()
            self.num_sent[key] += 1
            self.bytes_sent[key] += tensor.numel() * tensor.element_size()
            self._queues[self._device, device].put(tensor.detach().clone())
        arrivals = [_Arrival(self._queues[device, self._device], tensor) for device, tensor in receives]
        assert all(tensor.is_contiguous() for _, tensor in receives)
        return RunningMessages(receives=arrivals)


def run_devices[T](num_devices: int, work: Callable[[int, BlockMessages], T]) -> list[T]:
    """What `work` returns on each device. Raises the first error of a device."""
    queues: Any = defaultdict(queue.Queue)
    for source in range(num_devices):
        for target in range(num_devices):
            queues[source, target]
    results: list[Any] = [None] * num_devices
    errors: list[BaseException] = []

    def run(device: int) -> None:
        try:
            results[device] = work(device, ThreadMessages(device, num_devices, queues))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(device,), daemon=True) for device in range(num_devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _TIMEOUT_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a device waits for a message that nobody sent"
    return results
