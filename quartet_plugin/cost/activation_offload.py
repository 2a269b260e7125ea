"""Activations on the host between forward and backward: bytes by module, and seconds that stay exposed.

What a module saves is copied to the host behind its forward and back before its backward, on streams beside
the computation (megatron/core/pipeline_parallel/fine_grained_activation_offload.py).
"""

from collections.abc import Iterator
from typing import NamedTuple

from quartet_plugin.cost.compute import LayerTimes
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.cost.times import Times
from quartet_plugin.model.job_description import Experts

# Elements of the smallest tensor that Megatron offloads (--min-offloaded-tensor-size).
LEAST_ELEMENTS = 2**20


class OffloadedBytes(NamedTuple):
    """Bytes of one microbatch in one layer: those that the device does not hold, and those copied each way.

    `copied_bytes` is larger than `freed_bytes` where another module holds the same tensor on the device.
    """

    freed_bytes: float = 0.0
    copied_bytes: float = 0.0


_NOTHING = OffloadedBytes()


class _Tensor(NamedTuple):
    """Elements of a saved tensor; `is_freed`: nothing else holds it on the device."""

    elements: float
    is_freed: bool = True


def layer_bytes(run: TrainingRun, *, experts: Experts | None) -> OffloadedBytes:
    """The bytes of one layer, with a dense FFN or with `experts`, that its offloaded modules save."""
    if not run.software.offloaded_modules:
        return _NOTHING
    size = float(run.element_bytes)
    saved = [tensor for module in run.software.offloaded_modules for tensor in _saved(run, module, experts)]
    large = [tensor for tensor in saved if tensor.elements >= LEAST_ELEMENTS]
    return OffloadedBytes(
        freed_bytes=size * sum(tensor.elements for tensor in large if tensor.is_freed),
        copied_bytes=size * sum(tensor.elements for tensor in large),
    )


def copies_s(run: TrainingRun, *, experts: Experts | None) -> float:
    """Seconds of a layer's copies of one microbatch in one direction, at the rate of the host's link."""
    return layer_bytes(run, experts=experts).copied_bytes / run.cluster.device.resolved_host_link_bytes_per_s


def exposed(run: TrainingRun, layer: LayerTimes, *, experts: Experts | None) -> Times:
    """Seconds of a layer's copies that its own forward, and its own backward, do not hide.

    Copies to the host run beside the forward, those back beside the backward.
    """
    copied_s = copies_s(run, experts=experts)
    forward_s, input_grad_s, weight_grad_s = layer.total
    backward_s = input_grad_s + weight_grad_s + layer.recompute_s
    return Times(max(0.0, copied_s - forward_s), max(0.0, copied_s - backward_s), 0.0)


def unoffloaded_bytes(run: TrainingRun) -> float:
    """Bytes of one microbatch that stay on a device: Megatron does not offload a module's last group."""
    return max(layer_bytes(kind_run, experts=experts).freed_bytes for kind_run, experts in run.runs_by_kind)


def _saved(run: TrainingRun, module: str, experts: Experts | None) -> Iterator[_Tensor]:
    """What a module of a layer saves; nothing of one that the layer does not have."""
    if module in ("attn_norm", "qkv_linear", "core_attn", "attn_proj"):
        return _saved_by_attention(run, module) if run.has_attention else iter(())
    return iter(()) if experts is None or not run.has_ffn else _saved_by_experts(run, module, experts)


def _saved_by_attention(run: TrainingRun, module: str) -> Iterator[_Tensor]:
    tokens, latent = run.tokens_per_microbatch, run.latent
    hidden = tokens * run.shape.hidden_size / run.sequence_shards
    if module == "attn_norm" and latent is not None:
        yield _Tensor(hidden)
    elif module == "qkv_linear" and latent is None:
        # Transformer Engine's product has the norm in it, and saves the norm's input and output.
        yield from (_Tensor(hidden), _Tensor(hidden))
    elif module == "qkv_linear" and latent is not None:
        # The norm's output, which is free already where the norm is recomputed.
        yield _Tensor(hidden, is_freed=not run.recomputes("layernorm"))
        # Before their norms and behind them.
        for rank in (latent.q_lora_rank, latent.kv_lora_rank):
            yield from (_Tensor(tokens * rank), _Tensor(tokens * rank))
    elif module == "core_attn" and not run.recomputes("core_attn"):
        # The output is the input of the next product, too, which holds it.
        yield from (*_heads(run), _Tensor(_output(run), is_freed=False))
    elif module == "attn_proj":
        yield _Tensor(_output(run))


def _heads(run: TrainingRun) -> Iterator[_Tensor]:
    """Queries, keys and values; those of latent attention are free already where they are recomputed."""
    tokens, shape, tp = run.tokens_per_microbatch, run.shape, run.layout.tensor_parallel
    heads, groups = shape.num_attention_heads / tp, max(1.0, shape.num_query_groups / tp)
    if run.latent is None:
        sizes = (heads * shape.kv_channels, groups * shape.kv_channels, groups * shape.kv_channels)
    else:
        wide = run.latent.qk_head_dim + run.latent.qk_pos_emb_head_dim
        sizes = (heads * wide, heads * wide, heads * run.latent.v_head_dim)
    for size in sizes:
        yield _Tensor(tokens * size, is_freed=not run.recomputes("mla_up_proj"))


def _output(run: TrainingRun) -> float:
    """Elements of attention's output before its last product."""
    heads = run.shape.num_attention_heads / run.layout.tensor_parallel
    return (
        run.tokens_per_microbatch
        * heads
        * (run.shape.kv_channels if run.latent is None else run.latent.v_head_dim)
    )


def _saved_by_experts(run: TrainingRun, module: str, experts: Experts) -> Iterator[_Tensor]:
    tp = run.layout.tensor_parallel
    routed = run.tokens_per_microbatch * experts.experts_per_token * run.expert_load
    is_whole = module == "fused_group_mlp"
    if module == "mlp_norm":
        yield _Tensor(run.tokens_per_microbatch * run.shape.hidden_size / run.sequence_shards)
    if module == "expert_fc1" or is_whole:
        yield _Tensor(routed * run.shape.hidden_size * run.expert_shards / tp)
    if module == "moe_act" or is_whole:
        yield _Tensor(routed * experts.ffn_hidden_size / tp * (2.0 if run.shape.gated_ffn else 1.0))
