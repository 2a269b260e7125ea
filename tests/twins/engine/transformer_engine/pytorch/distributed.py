"""What Megatron takes from Transformer Engine's module of this name, and the layers' collectives."""

from typing import Any

import torch

# Recomputation in FP8.
activation_recompute_forward = None


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether activations are recomputed in FP8."""
    return False


class CudaRNGStatesTracker:
    """A name to inherit from; Megatron uses its own tracker."""


def gathered(tensor: Any, group: Any) -> Any:
    """The shards [s/t, ...] of a group's ranks, as a new tensor [s, ...]."""
    shape = (tensor.shape[0] * group.size(), *tensor.shape[1:])
    total = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    torch.distributed.all_gather_into_tensor(total, tensor.contiguous(), group=group)
    return total


def reduce_scattered(tensor: Any, group: Any) -> Any:
    """This rank's shard [s/t, ...] of the sum of a group's tensors [s, ...]."""
    shape = (tensor.shape[0] // group.size(), *tensor.shape[1:])
    shard = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    torch.distributed.reduce_scatter_tensor(shard, tensor.contiguous(), group=group)
    return shard


def reduced(tensor: Any, group: Any) -> Any:
    """The sum of a group's tensors, in place."""
    torch.distributed.all_reduce(tensor, group=group)
    return tensor
