"""A grid's blocks in distributed checkpoints: parts of the same global matrices as stock's shards.

Megatron's factory for gated layers keeps both halves of fc1 apart in the checkpoint; its own drops the second
sharded axis, so blocks have one here.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)

Offset = tuple[int, int, int]


def sharded_linear(layer: Any, prefix: str, sharded_offsets: Any, metadata: Any) -> dict[str, Any]:
    """The sharded state of a `GridLinear`."""
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    group = metadata["dp_cp_group"]
    state = layer.state_dict(prefix="", keep_vars=True)
    replica = (0, 0, group.rank())
    (row, rows), (column, columns) = layer.block_place
    places: dict[str, tuple[Offset, ...]] = {"weight": ((0, row, rows), (1, column, columns))}
    if layer.bias is not None and layer.bias_place is not None:
        places["bias"] = ((0, *layer.bias_place),)
    sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        {name: value for name, value in state.items() if name not in places},
        prefix,
        {},
        sharded_offsets,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_cp_group=group,
    )
    apart = bool(metadata.get("singleton_local_shards", False))
    for name, axes in places.items():
        make = _halves if layer.stride == 2 else _block
        sharded[prefix + name] = make(
            prefix + name, state[name], axes, tuple(sharded_offsets), replica, apart
        )
    return sharded


def _block(
    key: str, tensor: Any, axes: tuple[Offset, ...], prepended: tuple[Offset, ...], replica: Any, apart: bool
) -> Any:
    del apart
    return ShardedTensor.from_rank_offsets(
        key,
        tensor,
        *prepended,
        *((axis + len(prepended), piece, pieces) for axis, piece, pieces in axes),
        replica_id=replica,
        prepend_axis_num=len(prepended),
    )


def _halves(
    key: str, tensor: Any, axes: tuple[Offset, ...], prepended: tuple[Offset, ...], replica: Any, apart: bool
) -> Any:
    """Both halves of a gated layer's block, each a part of its half of the global matrix."""
    (_, piece, pieces), *others = axes

    def build(key: str, tensor: Any, replica_id: Any, flattened_range: Any) -> list[Any]:
        del flattened_range
        halves = torch.chunk(tensor.detach(), 2, dim=0)
        if apart:
            names, places = (f"{key}_w", f"{key}_v"), [(0, piece, pieces)] * 2
        else:
            names, places = (key, key), [(0, piece, 2 * pieces), (0, piece + pieces, 2 * pieces)]
        return [
            _block(name, half, (place, *others), prepended, replica_id, apart)
            for name, half, place in zip(names, halves, places, strict=True)
        ]

    return ShardedTensorFactory(key, tensor, build, torch.cat, replica)


class GridMlp(MLP):  # type: ignore[misc]
    """Megatron's MLP, whose linears say themselves how a gated layer's halves lie in a checkpoint."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """The states of both linears as they give them."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        sharded: dict[str, Any] = {}
        for name, module in self._modules.items():
            sharded |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata)
        return sharded
