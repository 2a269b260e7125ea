"""The ledger of live activations: saved, deferred and boundary tensors, each storage once."""

from typing import Any

import torch

from quartet_plugin.runtime.deferred import DeferredGradients
from quartet_plugin.runtime.ledger import ActivationTracker

SIZE = 256 * 4


def value() -> Any:
    return torch.ones(256, requires_grad=True) * 2.0


def test_what_autograd_saves_counts_until_its_backward() -> None:
    ledger = ActivationTracker()
    start = value()
    with ledger.saving():
        result = (start.exp() * 1.0).sum()
    assert ledger.live_bytes == SIZE  # exp keeps its result
    result.backward()
    assert (ledger.live_bytes, ledger.peak_bytes) == (0, SIZE)


def test_parameters_and_second_views_do_not_count() -> None:
    ledger = ActivationTracker()
    weight = torch.nn.Parameter(torch.ones(256))
    ledger.leave_out([weight])
    with ledger.saving():
        result = (value() * weight).sum()
    assert ledger.live_bytes == SIZE  # the other factor alone
    one = torch.ones(256)
    ledger.hold([one, one.view(16, 16), None])
    assert ledger.live_bytes == 2 * SIZE
    del result
    assert ledger.live_bytes == SIZE
    del one
    assert ledger.live_bytes == 0
    assert ledger.peak_bytes == 2 * SIZE


class Queue(DeferredGradients[tuple[Any, Any]]):
    """Keeps an input and a gradient; forgets both in W."""

    def accumulate(self, pending: tuple[Any, Any]) -> None:
        """Nothing to add to."""

    def tensors_of(self, pending: tuple[Any, Any]) -> tuple[Any, ...]:
        """Both."""
        return pending


def test_what_a_queue_keeps_counts_until_its_w() -> None:
    ledger, queue = ActivationTracker(), Queue()
    queue.begin()
    assert queue.open is not None
    queue.open += [(torch.ones(256), torch.ones(128)), (torch.ones(256), torch.ones(128))]
    queue.end(1, 0)
    ledger.hold(queue.held(1, 0))
    assert ledger.live_bytes == 3 * SIZE
    queue.run(1, 0)
    assert (ledger.live_bytes, ledger.peak_bytes) == (0, 3 * SIZE)
    assert queue.held(1, 0) == []
