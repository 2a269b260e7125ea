"""Latent attention of Megatron's local layers, whose positional keys tensor-parallel ranks share.

All heads use one positional key. Transformer Engine has its projection whole on every rank; local layers cut
the projection and gather its output, and each rank's gradient of that key is of its own heads alone. Megatron
takes this part for the whole: here the ranks' parts are summed.
"""

import functools
from collections.abc import Callable
from typing import Any

from quartet_plugin.rank.seams import Redirect

_MODULE, _CLASS, _NAME = (
    "megatron.core.transformer.multi_latent_attention",
    "MLASelfAttention",
    "_qkv_down_projection",
)


def _with_summed_gradients(project: Callable[..., Any]) -> Callable[..., Any]:
    """The down projections, with keys and values [s, b, r + d] as a projection that is not cut has them.

    Under sequence parallelism they are [s / TP, b, r + d], and Megatron sums as it gathers the positions.
    """

    @functools.wraps(project)
    def project_whole(self: Any, hidden_states: Any) -> tuple[Any, Any]:
        queries, keys = project(self, hidden_states)
        rank, positions = self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim
        if keys.size(-1) == rank + positions:
            return queries, keys
        import torch
        from megatron.core.tensor_parallel import mappings

        keys = mappings.gather_from_tensor_model_parallel_region(keys)
        if self.config.sequence_parallel:
            return queries, mappings.scatter_to_sequence_parallel_region(keys)
        latent, positional = keys.split((rank, positions), dim=-1)
        summed = mappings.copy_to_tensor_model_parallel_region(positional)
        return queries, torch.cat((latent, summed), dim=-1)

    return project_whole


def redirects() -> list[Redirect]:
    """The projections' replacement; none for a Megatron before 0.17, which has no function of them."""
    from megatron.core.transformer import multi_latent_attention

    if not hasattr(getattr(multi_latent_attention, _CLASS, None), _NAME):
        return []
    return [Redirect(_MODULE, f"{_CLASS}.{_NAME}", _with_summed_gradients)]
