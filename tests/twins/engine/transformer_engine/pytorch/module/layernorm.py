"""Norms whose parameters are marked where sequences are split."""

from typing import Any

import torch


class LayerNorm(torch.nn.LayerNorm):  # type: ignore[misc]
    """Torch's, with the marks that Megatron reduces its gradients by."""

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        *,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype = torch.float32,
        zero_centered_gamma: bool = False,
        **_kwargs: Any,
    ) -> None:
        super().__init__(normalized_shape, eps=eps, dtype=params_dtype)
        assert not zero_centered_gamma
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel


class RMSNorm(torch.nn.Module):  # type: ignore[misc]
    """A name to inherit from; the stand-in's model has layer norms."""
