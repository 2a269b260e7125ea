"""The tokens of packed sequences, counted at what a model's forward is given."""

from typing import Any


class PackedBatches:
    """Counts tokens without padding, and squared lengths of documents, by the offsets of the documents.

    The sums stay on the device until the rank's file is written: a step waits for none of them.
    """

    def __init__(self) -> None:
        self._num_microbatches = 0
        self._sums: Any = None

    def begin(self, model: Any) -> None:
        """Count the microbatches of the rank's first chunk from now on.

        CUDA graphs would replay the counting without this object; models with them are not counted.
        """
        from torch.nn import Module

        chunk = model[0] if isinstance(model, list | tuple) and model else model
        if not isinstance(chunk, Module):
            return
        from megatron.core.utils import unwrap_model

        module = unwrap_model(chunk)
        graphs = getattr(getattr(module, "config", None), "cuda_graph_impl", None)
        if graphs in (None, "none"):
            module.register_forward_pre_hook(self._count, with_kwargs=True)

    def take(self) -> tuple[int, Any] | None:
        """The microbatches since the last call and a tensor [tokens, squared lengths]; None without any."""
        taken = (self._num_microbatches, self._sums) if self._num_microbatches else None
        self._num_microbatches, self._sums = 0, None
        return taken

    def _count(self, module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        import torch

        packed = kwargs.get("packed_seq_params")
        offsets = getattr(packed, "cu_seqlens_q", None)
        if not (module.training and torch.is_grad_enabled() and isinstance(offsets, torch.Tensor)):
            return
        # Groups that share each sequence anew have other sequences on every rank.
        if getattr(packed, "local_cp_size", None) is not None:
            return
        lengths = offsets.detach().flatten().diff().to(torch.float64)
        sums = torch.stack((lengths.sum(), (lengths * lengths).sum()))
        self._sums = sums if self._sums is None else self._sums + sums
        self._num_microbatches += 1
