"""The norm of all gradients on a CPU, summed in blocks.

`torch.norm` adds the squares of a tensor one after another in fp32 there: of an embedding with three million
elements small gradients are lost, 3e-4 of the norm, and half of that where two devices share it. A GPU sums
in blocks, so there a layout changes the norm by its rounding alone.
"""

from collections.abc import Sequence
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
