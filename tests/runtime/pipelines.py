"""Small pipelines for tests: stage costs, schedules, and stages of plain torch with a split backward."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quartet_plugin.model.costs import StageCosts
from quartet_plugin.runtime.programs import ScheduleSpec
from quartet_plugin.schedule.placement import build

WIDTH, ROWS = 6, 3

# name, placement, chunks a device
SCHEDULES: dict[str, tuple[str | None, str, int | None]] = {
    "gpipe": ("gpipe", "linear", None),
    "1f1b": ("1f1b", "linear", None),
    "zb-h1": ("zb-h1", "linear", None),
    "interleaved": ("interleaved", "loop", 2),
    "breadth-first": ("breadth-first", "loop", 2),
    "zb-v": ("zb-v", "v", None),
    "v-half": ("v-half", "v", None),
    "snake-3": (None, "snake", 3),
    "loop-2": (None, "loop", 2),
}


def stage_costs(placement: tuple[int, ...], *, transfer_s: float = 0.1) -> StageCosts:
    """Unit times, and a transfer wherever neighbouring stages lie on two devices."""
    device = np.array(placement, dtype=np.int64)
    ones = np.ones(len(device))
    apart = np.append(device[:-1] != device[1:], False)
    return StageCosts(
        device_of_stage=device,
        forward_s=ones,
        input_grad_s=ones,
        weight_grad_s=ones,
        backward_s=2 * ones,
        activation_bytes=ones,
        forward_transfer_s=np.where(apart, transfer_s, 0.0),
        backward_transfer_s=np.where(np.roll(apart, 1), transfer_s, 0.0),
        held_fraction=0.5,
    )


def spec_of(
    name: str, num_devices: int, *, full_backward_stages: frozenset[int] = frozenset()
) -> ScheduleSpec:
    """One of `SCHEDULES` on so many devices."""
    schedule, kind, chunks = SCHEDULES[name]
    placement = build(kind, num_devices=num_devices, num_chunks=chunks)
    return ScheduleSpec(
        costs=stage_costs(placement), name=schedule, full_backward_stages=full_backward_stages
    )


def weight(stage: int) -> torch.Tensor:
    """The stage's only parameter."""
    generator = torch.Generator().manual_seed(stage)
    return torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()


def sample(microbatch: int) -> torch.Tensor:
    """The first stage's input."""
    generator = torch.Generator().manual_seed(1000 + microbatch)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def reference_grads(num_stages: int, num_microbatches: int) -> list[torch.Tensor]:
    """The gradient of every stage's weight, in one piece."""
    weights = [weight(stage) for stage in range(num_stages)]
    for microbatch in range(num_microbatches):
        value = sample(microbatch)
        for parameter in weights:
            value = torch.tanh(value @ parameter)
        value.square().sum().backward()
    return [parameter.grad for parameter in weights if parameter.grad is not None]


@dataclass
class TorchStages:
    """The stages of one device; remembers what it was asked for."""

    num_stages: int
    stages: list[int]
    weights: dict[int, torch.Tensor] = field(init=False)
    calls: list[tuple[str, int, int]] = field(default_factory=list)
    _held: dict[tuple[int, int], tuple[Any, Any]] = field(default_factory=dict)
    _pending: dict[tuple[int, int], tuple[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = {stage: weight(stage) for stage in self.stages}

    def forward(self, stage: int, microbatch: int, received: Any) -> Any:
        """F."""
        self.calls.append(("F", stage, microbatch))
        assert (received is None) == (stage == 0)
        value = sample(microbatch) if received is None else received.detach()
        value.requires_grad_()
        output = torch.tanh(value @ self.weights[stage])
        self._held[stage, microbatch] = (value, output)
        return output if stage < self.num_stages - 1 else None

    def input_grad(self, stage: int, microbatch: int, received: Any) -> Any:
        """I."""
        self.calls.append(("I", stage, microbatch))
        return self._input_grad(stage, microbatch, received)

    def weight_grad(self, stage: int, microbatch: int) -> None:
        """W."""
        self.calls.append(("W", stage, microbatch))
        self._weight_grad(stage, microbatch)

    def backward(self, stage: int, microbatch: int, received: Any) -> Any:
        """B."""
        self.calls.append(("B", stage, microbatch))
        result = self._input_grad(stage, microbatch, received)
        self._weight_grad(stage, microbatch)
        return result

    def _input_grad(self, stage: int, microbatch: int, received: Any) -> Any:
        value, output = self._held.pop((stage, microbatch))
        if stage == self.num_stages - 1:
            assert received is None
            output = output.square().sum()
        self._pending[stage, microbatch] = (output, received)
        (grad,) = torch.autograd.grad(output, [value], received, retain_graph=True)
        return grad if stage > 0 else None

    def _weight_grad(self, stage: int, microbatch: int) -> None:
        output, received = self._pending.pop((stage, microbatch))
        parameter = self.weights[stage]
        (grad,) = torch.autograd.grad(output, [parameter], received)
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    @property
    def is_idle(self) -> bool:
        """Nothing is kept between runs."""
        return not self._held and not self._pending
