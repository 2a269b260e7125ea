"""State-space layers (Mamba-2) on a CPU by plain operations, where mamba_ssm has kernels of a GPU.

Megatron's own mixer stays, with its projections, its parameters and its collectives under TP and CP; the scan
and the norm behind it are what it takes from mamba_ssm. Sums are in fp32. Sequences are scanned in chunks:
inside of one every position is a sum over those before it, from one to the next a state is handed on.
"""

from typing import Any

import torch
from torch.nn import functional

from quartet_plugin.rank.seams import Redirect


def split_conv_scan(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor,
    step_bias: torch.Tensor,
    decay: torch.Tensor,
    D: torch.Tensor,  # noqa: N803 - mamba_ssm's names, as Megatron gives them
    chunk_size: int,
    *,
    activation: str,
    headdim: int | None,
    ngroups: int,
    seq_idx: Any = None,
    **_: Any,
) -> torch.Tensor:
    """The gated outputs [b, l, h * p] of a mixer's projections [z, x, B, C, dt] in [b, l, ...].

    `decay` and `step_bias` are [h], `D` [h] or [h, p], `conv_weight` [channels, width]. It stands for
    mamba_ssm's `mamba_split_conv1d_scan_combined`. Raises NotImplementedError for packed sequences and for an
    activation that Megatron does not have there.
    """
    if seq_idx is not None or activation != "silu":
        raise NotImplementedError("the CPU device scans whole sequences, with silu")
    heads, head = decay.numel(), headdim if headdim is not None else D.size(1)
    channels = conv_weight.size(0)
    gate, mixed, steps = projected.split((heads * head, channels, heads), dim=-1)
    mixed = functional.silu(causal_convolution(mixed, conv_weight, conv_bias))
    width = (channels - heads * head) // 2
    values, keys, queries = mixed.split((heads * head, width, width), dim=-1)
    values = values.unflatten(-1, (heads, head))
    scanned = scan(
        values.float(),
        functional.softplus(steps.float() + step_bias),
        decay,
        *(part.unflatten(-1, (ngroups, -1)).float() for part in (keys, queries)),
        chunk=chunk_size,
    )
    scanned = scanned + values.float() * (D if D.dim() > 1 else D[:, None]).float()
    return (scanned.flatten(-2) * functional.silu(gate.float())).to(projected.dtype)


def causal_convolution(mixed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Each channel of [b, l, channels] convolved with its weights [channels, width] over what lies before."""
    channels, width = weight.shape
    outputs = functional.conv1d(
        mixed.transpose(1, 2), weight[:, None], bias, padding=width - 1, groups=channels
    )
    return outputs[..., : mixed.size(1)].transpose(1, 2)


def scan(
    values: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    *,
    chunk: int,
) -> torch.Tensor:
    """The outputs [b, l, h, p] of the states S(t) = exp(step * decay) S(t - 1) + step * key x value.

    `values` are [b, l, h, p], `steps` [b, l, h], `keys` and `queries` [b, l, g, n] of groups of heads. An
    output is its query times the state.
    """
    heads = values.size(2)
    keys, queries = (part.repeat_interleave(heads // part.size(2), dim=2) for part in (keys, queries))
    state = values.new_zeros(values.size(0), heads, values.size(3), keys.size(3))
    outputs = []
    for parts in zip(*(part.split(chunk, dim=1) for part in (values, steps, keys, queries)), strict=True):
        output, state = _scan_chunk(state, *parts, decay=decay)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


def _scan_chunk(
    state: torch.Tensor,
    values: torch.Tensor,
    steps: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    *,
    decay: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [b, c, h, p] of a chunk that starts from a state [b, h, p, n], and the state behind it."""
    length = values.size(1)
    faded = (steps * decay).cumsum(1)
    later = torch.ones(length, length).triu(1).bool()[None, :, :, None]
    weights = (faded[:, :, None] - faded[:, None]).masked_fill(later, -torch.inf).exp() * steps[:, None]
    products = torch.einsum("bthn,bshn->btsh", queries, keys) * weights
    inside = torch.einsum("btsh,bshp->bthp", products, values)
    before = torch.einsum("bthn,bhpn->bthp", queries, state) * faded.exp()[..., None]
    last = faded[:, -1]
    left = ((last[:, None] - faded).exp() * steps)[..., None] * values
    state = state * last.exp()[..., None, None] + torch.einsum("bshp,bshn->bhpn", left, keys)
    return inside + before, state


class GroupedNorm(torch.nn.Module):  # type: ignore[misc]
    """RMSNorm over groups of channels, as mamba_ssm's without a gate, saved as Megatron saves that."""

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float,
        group_size: int,
        norm_before_gate: bool,
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__()
        del norm_before_gate, device
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The normalized channels [..., d], each times its weight."""
        groups = hidden.float().unflatten(-1, (-1, self.group_size))
        scale = (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return ((groups * scale).flatten(-2) * self.weight.float()).to(hidden.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """The weight, cut over tensor-parallel ranks."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


_MODULE = "megatron.core.ssm.mamba_mixer"
REDIRECTS = (
    Redirect(_MODULE, "HAVE_MAMBA_SSM", lambda _: True),
    Redirect(_MODULE, "ExtendedRMSNorm", lambda _: GroupedNorm),
    Redirect(_MODULE, "mamba_split_conv1d_scan_combined", lambda _: split_conv_scan),
)
