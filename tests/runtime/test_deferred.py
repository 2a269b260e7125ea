"""Deferred gradients: what an I leaves out is worked off by its own W, in order, once."""

import pytest

from quartet_plugin.runtime.deferred import DeferredGradients


class Noted(DeferredGradients[str]):
    """Notes what is accumulated."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def accumulate(self, pending: str) -> None:
        self.done.append(pending)


def defer(queue: Noted, microbatch: int, names: list[str]) -> None:
    """As an I action of stage 3 whose layers leave out `names`."""
    queue.begin()
    assert queue.open is not None
    queue.open += names
    queue.end(3, microbatch)


def is_idle(queue: Noted) -> bool:
    """Whether no gradient is deferred."""
    return queue.open is None and not queue._pending


def test_every_w_works_off_its_own_queue() -> None:
    queue = Noted()
    for microbatch in (0, 1):
        defer(queue, microbatch, [f"up {microbatch}", f"down {microbatch}"])
    was_idle = is_idle(queue)
    queue.run(3, 1)
    assert queue.done == ["up 1", "down 1"]
    queue.run(3, 0)
    assert queue.done == ["up 1", "down 1", "up 0", "down 0"]
    assert (was_idle, is_idle(queue)) == (False, True)
    with pytest.raises(KeyError):
        queue.run(3, 0)


def test_a_broken_step_leaves_nothing() -> None:
    queue = Noted()
    queue.begin()
    queue.end(0, 0)
    queue.begin()
    queue.clear()
    assert is_idle(queue)
    queue.begin()
    assert queue.open == []


def test_the_last_weight_gradients_go_layer_by_layer() -> None:
    """Each layer's sum keeps its order, each W computes as many as before, another stage's stay alone."""
    queue = Noted()
    for microbatch in range(2):
        defer(queue, microbatch, [f"{layer} {microbatch}" for layer in "abc"])
    queue.begin()
    queue.end(4, 0)
    queue.order_by_layer(3)
    queue.run(3, 0)
    assert queue.done == ["a 0", "a 1", "b 0"]
    queue.run(3, 1)
    assert queue.done == ["a 0", "a 1", "b 0", "b 1", "c 0", "c 1"]
    queue.run(4, 0)
    assert is_idle(queue)
    queue.order_by_layer(3)


def test_microbatches_with_different_layers_stay_as_they_are() -> None:
    queue = Noted()
    defer(queue, 0, ["a 0", "b 0"])
    defer(queue, 1, ["a 1"])
    queue.order_by_layer(3)
    queue.run(3, 0)
    assert queue.done == ["a 0", "b 0"]
