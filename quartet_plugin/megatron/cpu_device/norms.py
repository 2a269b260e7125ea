"""Norms on a CPU: torch's norm layers under sequence parallelism, and the norm of all gradients in blocks.

Megatron refuses torch's layers there because their parameters are not marked: each rank sees a part of the
tokens, so that their gradients must be summed. Marked they are like any other norm's.

`torch.norm` adds the squares of a tensor one after another in fp32 there: of an embedding with three million
elements small gradients are lost, 3e-4 of the norm, and half of that where two devices share it. A GPU sums
in blocks, so there a layout changes the norm by its rounding alone.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

from quartet_plugin.rank.seams import Redirect

_BLOCK = 1024


def blockwise_l2_norm(
    chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], per_tensor: bool, *rest: Any
) -> tuple[Any, None]:
    """The L2 norm [1] of all tensors, in fp32; the signature is that of Megatron's own."""
    import torch

    del chunk_size, noop_flag, per_tensor, rest
    squares = torch.zeros((), dtype=torch.float64)
    for tensor in (tensor for tensors in tensor_lists for tensor in tensors):
        flat = tensor.detach().reshape(-1)
        whole = flat.numel() // _BLOCK * _BLOCK
        blocks = torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1)
        squares += blocks.double().square().sum() + flat[whole:].double().square().sum()
    return squares.sqrt().float().reshape(1), None


L2_NORM = Redirect("megatron.core.optimizer.clip_grads", "l2_norm_impl", lambda _: blockwise_l2_norm)


def _with_marks(make: Callable[..., Any]) -> Any:
    @functools.wraps(make)
    def make_marked(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        unsplit = copy.copy(config)
        unsplit.sequence_parallel = False
        norm = make(cls, unsplit, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return staticmethod(make_marked)


TORCH_NORM = Redirect("megatron.core.transformer.torch_norm", "WrappedTorchNorm.__new__", _with_marks)
