"""The record of the actions that ran, from an executor and the gradients that it deferred."""

from typing import Any

from quartet_plugin.protocol.execution import digest_of_actions
from quartet_plugin.runtime.deferred import DeferredGradients
from quartet_plugin.runtime.executed import executed_actions
from quartet_plugin.runtime.executor import Executor
from quartet_plugin.runtime.programs import lower_schedule
from quartet_plugin.runtime.records import NullRecorder
from quartet_plugin.schedule.named import named
from tests.schedule.orders import unit_costs


class Layers(DeferredGradients[str]):
    """Gradients that are words."""

    def accumulate(self, pending: str) -> None:
        """Nothing to compute."""


class Compute:
    """Stages of one device that defer a gradient where `is_split`."""

    def __init__(self, gradients: Layers, *, is_split: bool) -> None:
        self.gradients, self.is_split = gradients, is_split

    def forward(self, stage: int, microbatch: int, received: Any) -> Any:
        """Nothing to hand over on one device."""

    backward = forward

    def input_grad(self, stage: int, microbatch: int, received: Any) -> Any:
        """Leave the weight's gradient out."""
        self.gradients.begin()
        if self.is_split:
            assert self.gradients.open is not None
            self.gradients.open.append("weight")
        self.gradients.end(stage, microbatch)

    def weight_grad(self, stage: int, microbatch: int) -> None:
        """What was left out."""
        self.gradients.run(stage, microbatch)


class NoTransport:
    """Neighbours that answer at once."""

    def post(self, transfers: Any) -> None:
        """Nothing leaves."""

    def wait(self, transfer: Any) -> Any:
        """Nothing comes."""

    def end(self) -> None:
        """Nothing is pending."""

    abort = end


def test_what_ran_is_counted_and_digested() -> None:
    schedule = named("zb-h1", num_devices=2, num_microbatches=4)
    executor = Executor(lower_schedule(schedule, unit_costs(schedule)), device=0)
    for is_split in (True, False):
        gradients = Layers()
        executor.num_runs = 0
        assert executed_actions(executor, gradients) is None
        for _ in range(3):
            executor.run(Compute(gradients, is_split=is_split), NoTransport(), NullRecorder())
        done = executed_actions(executor, gradients)
        assert done is not None
        assert done.digest == digest_of_actions(executor.actions)
        assert (done.num_steps, done.num_full_backwards) == (3, 0)
        assert done.num_split_backwards == (12 if is_split else 0)
