"""A partitioned linear layer for autograd: F forward; B and G backward, or G later.

What the table leaves at home is saved as the home's matrix, so a layer keeps no more than its blocks of the
input and the weight; blocks that a table carries from phase to phase are saved as they are held.
"""

from collections.abc import Callable
from typing import Any

import torch

from quartet_plugin.partition.table import Phase, Tensor
from quartet_plugin.runtime.partition.phases import HeldBlocks, PartitionExecutor, held_pieces

_SAVED = (Tensor.INPUT, Tensor.WEIGHT)
# Takes over a weight's gradient that is to be computed later; returns whether it does.
Defer = Callable[["WeightGradientPhase"], bool]


class WeightGradientPhase:
    """Phase G of one linear and microbatch, still to be run."""

    def __init__(self, executor: PartitionExecutor, held: HeldBlocks, weight: Any) -> None:
        self.weight = weight
        self._executor = executor
        self._held = held

    def run(self) -> torch.Tensor:
        """The weight's gradient at home."""
        with torch.no_grad():
            return self._executor.run(Phase.G, self._held)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are kept until then but for the weight, one of each storage."""
        kept = held_pieces(self._held, (Tensor.INPUT, Tensor.OUTPUT_GRAD)).values()
        return list({tensor.untyped_storage().data_ptr(): tensor for tensor in kept}.values())


class PartitionedLinear(torch.autograd.Function):  # type: ignore[misc]
    """O = I W by a partition's table, for matrices of this device's blocks at home."""

    @staticmethod
    def forward(
        ctx: Any, input_: torch.Tensor, weight: torch.Tensor, executor: PartitionExecutor, defer: Defer | None
    ) -> torch.Tensor:
        """Phase F."""
        held = HeldBlocks()
        executor.hold(held, Tensor.INPUT, input_)
        executor.hold(held, Tensor.WEIGHT, weight)
        output = executor.run(Phase.F, held)
        moved = tuple(tensor for tensor in _SAVED if executor.steps.is_moved(tensor))
        kept = held_pieces(held, moved)
        at_home = [tensor for tensor in _SAVED if tensor not in moved]
        matrices = {Tensor.INPUT: input_, Tensor.WEIGHT: weight}
        ctx.save_for_backward(*(matrices[tensor] for tensor in at_home), *kept.values())
        ctx.at_home, ctx.kept_keys, ctx.sizes = at_home, list(kept), held.sizes
        # Under hooks on saved tensors autograd hands the weight out as another one, without attributes.
        ctx.weight, ctx.executor, ctx.defer = weight, executor, defer
        return output

    @staticmethod
    def backward(ctx: Any, output_grad: torch.Tensor) -> tuple[Any, ...]:
        """Phases B and G; G is left out where `defer` takes it over."""
        executor: PartitionExecutor = ctx.executor
        held = HeldBlocks(sizes=dict(ctx.sizes))
        saved = ctx.saved_tensors
        for tensor, matrix in zip(ctx.at_home, saved[: len(ctx.at_home)], strict=True):
            executor.hold(held, tensor, matrix)
        for (tensor, piece), values in zip(ctx.kept_keys, saved[len(ctx.at_home) :], strict=True):
            held.pieces.setdefault(tensor, {})[piece] = values
        executor.hold(held, Tensor.OUTPUT_GRAD, output_grad.contiguous())
        # A table may carry what G needs through B, so B runs in any case.
        input_grad = executor.run(Phase.B, held)
        weight_grad = None
        if ctx.needs_input_grad[1]:
            phase = WeightGradientPhase(executor, held, ctx.weight)
            if ctx.defer is None or not ctx.defer(phase):
                weight_grad = phase.run()
        return input_grad, weight_grad, None, None


def partitioned_linear(
    input_: torch.Tensor, weight: torch.Tensor, executor: PartitionExecutor, *, defer: Defer | None = None
) -> torch.Tensor:
    """O at home from I and W at home; `defer` may take over the weight's gradient."""
    output: torch.Tensor = PartitionedLinear.apply(input_, weight, executor, defer)
    return output
