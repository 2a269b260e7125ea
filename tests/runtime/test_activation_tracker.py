"""The tracker of live activations: saved, deferred and boundary tensors, each storage once."""

import gc
from typing import Any

import pytest
import torch

from quartet_plugin.runtime.activation_tracker import AllocatorTracker, SavedTensorTracker, activation_tracker
from quartet_plugin.runtime.deferred import DeferredGradients

SIZE = 256 * 4


def value() -> Any:
    return torch.ones(256, requires_grad=True) * 2.0


def test_what_autograd_saves_counts_until_its_backward() -> None:
    tracker = SavedTensorTracker()
    start = value()
    with tracker.saving():
        result = (start.exp() * 1.0).sum()
    assert tracker.live_bytes == SIZE  # exp keeps its result
    result.backward()
    assert (tracker.live_bytes, tracker.peak_bytes) == (0, SIZE)


def test_parameters_and_second_views_do_not_count() -> None:
    tracker = SavedTensorTracker()
    weight = torch.nn.Parameter(torch.ones(256))
    tracker.begin([weight])
    with tracker.saving():
        result = (value() * weight).sum()
    assert tracker.live_bytes == SIZE  # the other factor alone
    tensor = torch.ones(256)
    tracker.hold([tensor, tensor.view(16, 16), None])
    assert tracker.live_bytes == 2 * SIZE
    del result
    assert tracker.live_bytes == SIZE
    del tensor
    assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 2 * SIZE


def test_what_no_backward_follows_goes_with_its_result() -> None:
    """Nothing waits for the garbage collector, whose runs nobody counts on."""
    tracker, start = SavedTensorTracker(), value()
    gc.disable()
    try:
        with tracker.saving():
            result = start.exp()
        assert tracker.live_bytes == SIZE
        del result
        assert tracker.live_bytes == 0
    finally:
        gc.enable()


def test_what_autograd_has_let_go_does_not_count_though_others_keep_it() -> None:
    tracker = SavedTensorTracker()
    with tracker.saving():
        result = value().exp()
    result.sum().backward()
    assert tracker.live_bytes == 0
    assert result.grad_fn is not None


class Queue(DeferredGradients[tuple[Any, Any]]):
    """Keeps an input and a gradient; forgets both in W."""

    def accumulate(self, pending: tuple[Any, Any]) -> None:
        """Nothing to add to."""

    def tensors_of(self, pending: tuple[Any, Any]) -> tuple[Any, ...]:
        """Both."""
        return pending


def test_what_a_queue_keeps_counts_until_its_w() -> None:
    tracker, queue = SavedTensorTracker(), Queue()
    queue.begin()
    assert queue.open is not None
    queue.open += [(torch.ones(256), torch.ones(128)), (torch.ones(256), torch.ones(128))]
    queue.end(1, 0)
    tracker.hold(queue.held(1, 0))
    assert tracker.live_bytes == 3 * SIZE
    queue.run(1, 0)
    assert (tracker.live_bytes, tracker.peak_bytes) == (0, 3 * SIZE)
    assert queue.held(1, 0) == []


def test_the_allocator_is_asked_at_the_end_of_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = iter([1000, 1300, 1700, 1100])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    tracker = activation_tracker(on_cpu=False)
    assert isinstance(tracker, AllocatorTracker)
    tracker.begin([])
    for _ in range(3):
        tracker.hold([torch.ones(4)])
        tracker.end_action()
    assert tracker.peak_bytes == 700


def test_the_allocator_needs_no_hooks_on_what_autograd_saves() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    with activation_tracker(on_cpu=False).saving():
        node = (torch.ones(4, requires_grad=True) * weight).grad_fn
    assert node is not None
    assert node._saved_other is weight
