"""Attention on a CPU where Megatron leaves it to Transformer Engine's kernels: a reference, slow and right.

Under latent attention a head's values have another size than its keys: Megatron's local attention computes
with them, and only its constructor lacks the size. It refuses ranks that share a sequence (context
parallelism): here such a rank gathers the keys and values of the whole sequence, and its queries attend to
those before them. Every `--cp-comm-type` names a way to exchange keys and values; the numbers are the same,
so all are accepted. Of packed sequences it computes with one document after the other, on a rank that has
whole sequences.

A sequence is cut as `get_batch_on_this_cp_rank` cuts it: into 2 * CP chunks, of which rank r has the r-th and
the r-th from the end. Rotary embeddings are cut alike by Megatron.
"""

import copy
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch

from quartet_plugin.rank.seams import Redirect


class _WholeSequence(torch.autograd.Function):  # type: ignore[misc]
    """Gathers a tensor [s / CP, ...] over the context-parallel group, [s, ...] in the sequence's order."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        # gloo joins the parts on their first axis alone.
        joined = part.new_empty((group.size() * part.size(0), *part.shape[1:]))
        torch.distributed.all_gather_into_tensor(joined, part.contiguous(), group=group)
        first, last = joined.unflatten(0, (group.size(), -1)).chunk(2, dim=1)
        return torch.cat((first, last.flip(0))).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sums the gradients [s, ...] of all ranks; each gets those of its part [s / CP, ...]."""
        group = ctx.group
        first, last = gradients[0].unflatten(0, (2 * group.size(), -1)).chunk(2)
        parts = torch.cat((first, last.flip(0)), dim=1)
        part = torch.empty_like(parts[0])
        torch.distributed.reduce_scatter_tensor(part, parts.flatten(0, 1), group=group)
        return part, None


def whole_sequence(part: torch.Tensor, group: Any) -> torch.Tensor:
    """A tensor [s / CP, ...] of this rank, gathered to [s, ...]; backward sums the ranks' gradients."""
    whole: torch.Tensor = _WholeSequence.apply(part, group)
    return whole


def positions(length: int, *, rank: int, size: int) -> torch.Tensor:
    """The positions [s / CP] in a sequence of `length` that the tokens of a context-parallel rank have."""
    chunks = torch.arange(length).view(2 * size, -1)
    return chunks[[rank, 2 * size - 1 - rank]].flatten()


def causal_mask(length: int, *, rank: int, size: int, window: tuple[int, int] | None = None) -> torch.Tensor:
    """True [1, 1, s / CP, s] where a key of the sequence is hidden from a rank's query.

    `window` is the number of keys that a query sees before itself, and behind itself.
    """
    distance = positions(length, rank=rank, size=size)[:, None] - torch.arange(length)[None, :]
    hidden = distance < 0 if window is None else (distance > window[0]) | (distance < -window[1])
    return hidden[None, None]


def _for_more_models(init: Callable[..., None]) -> Callable[..., None]:
    """The attention as Megatron builds it for one device a sequence, with what more it needs of the others.

    Latent attention gives the sizes of a head's keys and values, `k_channels` and `v_channels`.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_for_more(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        del k_channels  # the products are of any size
        arguments = signature.bind(self, *args, **kwargs).arguments
        config = arguments["config"]
        arguments["config"] = copy.copy(config)
        arguments["config"].context_parallel_size = 1
        init(**arguments)
        self.config = config
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        if config.context_parallel_size > 1:
            _share(self, arguments.get("pg_collection"))

    return init_for_more


def _share(attention: Any, groups: Any) -> None:
    """Let the attention of one device be that of the ranks that share a sequence."""
    attention.context_group = _context_group(groups)
    softmax = attention.scale_mask_softmax
    # It would place the window by a rank's tokens alone.
    attention.context_window, softmax.window_size = softmax.window_size, None


def _context_group(groups: Any) -> Any:
    from megatron.core import parallel_state

    group = getattr(groups, "cp", None)
    return parallel_state.get_context_parallel_group() if group is None else group


def _over_shared_sequences(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's attention, of a rank's queries [s / CP, b, n, h] to keys and values [s, b, n, h]."""

    @functools.wraps(forward)
    def forward_shared(
        self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        group = getattr(self, "context_group", None)
        # Megatron's layers give it by name.
        if (packed := kwargs.get("packed_seq_params")) is not None:
            if group is not None:
                raise NotImplementedError("packed sequences with context parallelism: not on the CPU device")
            return _of_documents(functools.partial(forward, self), query, key, value, packed)
        if group is not None:
            key, value = whole_sequence(key, group), whole_sequence(value, group)
            attention_mask = _mask_of(self, attention_mask, length=key.size(0))
        return forward(self, query, key, value, attention_mask, *args, **kwargs)

    return forward_shared


def _of_documents(attend: Callable[..., Any], query: Any, key: Any, value: Any, packed: Any) -> torch.Tensor:
    """The attention [t, 1, n * h] of packed queries [t, n, h], each to the keys of its document before it."""
    padded, real = packed.cu_seqlens_q_padded, packed.cu_seqlens_q
    offsets = {0, *(real if padded is None else padded).flatten().tolist(), query.size(0)}
    parts = [
        attend(*(tensor[first:last, None] for tensor in (query, key, value)), None)
        for first, last in itertools.pairwise(sorted(offsets))
    ]
    return torch.cat(parts)


def _mask_of(attention: Any, given: Any, *, length: int) -> Any:
    """The mask of a rank's queries: the script's, which is cut as they are, or the causal one."""
    is_causal = attention.attn_mask_type.name == "causal"
    if attention.context_window is None and (given is not None or not is_causal):
        return given
    group = attention.context_group
    return causal_mask(length, rank=group.rank(), size=group.size(), window=attention.context_window)


_MODULE = "megatron.core.transformer.dot_product_attention"
REDIRECTS = (
    Redirect(_MODULE, "DotProductAttention.__init__", _for_more_models),
    Redirect(_MODULE, "DotProductAttention.forward", _over_shared_sequences),
)
