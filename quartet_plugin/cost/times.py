"""Holds the seconds of a computation by direction: forward, input gradient, weight gradient."""

from collections.abc import Iterable
from typing import NamedTuple


class Times(NamedTuple):
    """Seconds of a forward, an input gradient and a weight gradient."""

    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0

    def scaled(self, count: float) -> "Times":
        """The seconds of `count` such computations."""
        return Times(self.forward_s * count, self.input_grad_s * count, self.weight_grad_s * count)

    def plus(self, other: "Times") -> "Times":
        """The sums of forwards, of input gradients and of weight gradients."""
        return Times(
            self.forward_s + other.forward_s,
            self.input_grad_s + other.input_grad_s,
            self.weight_grad_s + other.weight_grad_s,
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
    def total_s(self) -> float:
        """The sum of forward, input gradient and weight gradient."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s
