"""Megatron's linears with their gathers and scatters as rings that the products hide.

Shards, parameters and checkpoints are stock's under sequence parallelism; only the products are cut into
pieces of the tokens.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from quartet_plugin.megatron.partition.context import PartitionContext
from quartet_plugin.runtime.partition.linear import partitioned_linear


class RingColumnLinear(ColumnParallelLinear):  # type: ignore[misc]
    """qkv or fc1: tokens arrive around the ring while the tokens before are multiplied."""

    def __init__(self, *args: Any, context: PartitionContext, linear: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._context = context
        self._executor = context.executor(linear)
        self.block_label = context.block(linear).label

    def _forward_impl(self, input: torch.Tensor, weight: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        del args
        output = _products(self, input, weight)
        bias = kwargs.get("bias")
        return output if bias is None else output + bias


class RingRowLinear(RowParallelLinear):  # type: ignore[misc]
    """proj or fc2: sums leave for the devices of their tokens while the next ones are made."""

    def __init__(self, *args: Any, context: PartitionContext, linear: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._context = context
        self._executor = context.executor(linear)
        self.block_label = context.block(linear).label

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output in sequence-parallel shards, and the bias that Megatron is to add."""
        output = _products(self, input_, self.weight)
        if self.skip_bias_add or self.bias is None:
            return output, self.bias
        return output + self.bias, None


def _products(layer: Any, hidden: torch.Tensor, weight: Any) -> torch.Tensor:
    flat = hidden.reshape(-1, hidden.shape[-1])
    output = partitioned_linear(flat, weight, layer._executor, defer=layer._context.defer)
    return output.view(-1, hidden.shape[1], output.shape[-1])
