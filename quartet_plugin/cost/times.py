"""Holds the seconds of a computation by direction: forward, input gradient, weight gradient."""

from collections.abc import Iterable
from typing import NamedTuple


class Times(NamedTuple):
    """Seconds of a forward, an input gradient and a weight gradient."""

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0

    def scaled(self, count: float) -> "Times":
        """The seconds of `count` such computations."""
        return Times(self.forward * count, self.input_grad * count, self.weight_grad * count)

    def plus(self, other: "Times") -> "Times":
        """The sums of forwards, of input gradients and of weight gradients."""
        return Times(
            self.forward + other.forward,
            self.input_grad + other.input_grad,
            self.weight_grad + other.weight_grad,
        )

    @classmethod
    def sum_of(cls, times: Iterable["Times"]) -> "Times":
        """The sums of forwards, of input gradients and of weight gradients."""
        forward = input_grad = weight_grad = 0.0
        for part_forward, part_input_grad, part_weight_grad in times:
            forward += part_forward
            input_grad += part_input_grad
            weight_grad += part_weight_grad
        return cls(forward, input_grad, weight_grad)

    @property
    def total(self) -> float:
        """The sum of forward, input gradient and weight gradient."""
        return self.forward + self.input_grad + self.weight_grad
