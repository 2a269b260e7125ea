"""Attention in torch's own kernel."""

from typing import Any

import torch


class DotProductAttention(torch.nn.Module):  # type: ignore[misc]
    """Causal attention over [s, b, heads, channels]; groups of heads may share keys and values."""

    def __init__(
        self, num_attention_heads: int, kv_channels: Any, *, attention_dropout: float = 0.0, **_kwargs: Any
    ) -> None:
        super().__init__()
        assert attention_dropout == 0.0

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, **_kwargs: Any) -> Any:
        """The context [s, b, heads * channels]."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        context = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )
        return context.permute(2, 0, 1, 3).flatten(2).contiguous()
