"""Model, layout and split of a PipelineModule and its engine, as the types of a plan.

DeepSpeed knows no model sizes, so they are read off the layers themselves, built without memory: as far as
the cost model needs them, and the same on every rank.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import nn

from quartet_plugin.deepspeed.config import (
    clips_by_first_stage,
    clips_in_fp32,
    precision,
    sums_gradients,
)
from quartet_plugin.deepspeed.layers import layer_list
from quartet_plugin.deepspeed.seams import DEEPSPEED
from quartet_plugin.model import frameworks
from quartet_plugin.model.layout import Layout, Recompute
from quartet_plugin.model.plan import ScheduleChoice, Split
from quartet_plugin.model.schema import dump
from quartet_plugin.model.shape import ModelShape

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead")
# DeepSpeed adds it to the optimizers that ZeRO supports when the first ZeRO engine is made.
_MUON = "MuonWithAuxAdam"


def shape_of(specs: Sequence[Any], *, seq_length: int) -> ModelShape:
    """The model's sizes from its layer specifications.

    The width is a block's, the vocabulary the largest embedding's; the feed-forward width is what the block's
    matrices leave. Where the middle block holds none (convolutions, pooling, functions), every block stands
    for an equal part of the model's parameters: a transformer's layer of that size.
    """
    layers = layer_list(specs)
    block = build_without_memory(specs[layers.blocks[len(layers.blocks) // 2]])
    ends = [build_without_memory(spec) for index, spec in enumerate(specs) if index not in layers.blocks]
    embeddings = [
        module.weight
        for end in ends
        if end is not None
        for module in end.modules()
        if isinstance(module, nn.Embedding)
    ]
    table = max(embeddings, key=lambda weight: weight.shape[0], default=None)
    matrices = [matrix for matrix in block.parameters() if matrix.dim() == 2] if block is not None else []
    per_block = sum(matrix.numel() for matrix in matrices) or _num_parameters(specs) // len(layers.blocks)
    if table is not None:
        width = int(table.shape[1])
    elif matrices:
        width = int(min(min(matrix.shape) for matrix in matrices))
    else:
        width = max(1, math.isqrt(per_block // 12))  # a layer of width h and a feed-forward width of 4h
    ffn = max(1, (per_block - 4 * width * width) // (2 * width))
    heads = _heads(block, width)
    return ModelShape(
        num_layers=len(layers.blocks),
        hidden_size=width,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=width // heads,
        seq_length=seq_length,
        vocab_size=int(table.shape[0]) if table is not None else 1,
        max_position_embeddings=seq_length,
        gated_ffn=False,
        tied_embeddings=_is_tied(specs),
        position_embedding="learned_absolute" if len(embeddings) > 1 else "none",
    )


def build_without_memory(spec: Any) -> nn.Module | None:
    """The module that an entry builds, on the meta device where that works; None for functions.

    The random generator is left as it was.
    """
    if isinstance(spec, nn.Module):
        return spec
    if not hasattr(spec, "build"):
        return None
    state = torch.random.get_rng_state()
    try:
        with torch.device("meta"):
            module = spec.build()
    except (RuntimeError, NotImplementedError):
        module = spec.build()
    finally:
        torch.random.set_rng_state(state)
    return module if isinstance(module, nn.Module) else None


def _num_parameters(specs: Sequence[Any]) -> int:
    """The model's parameters, of whatever form they are; functions have none."""
    modules = [module for spec in specs if (module := build_without_memory(spec)) is not None]
    return sum(value.numel() for module in modules for value in module.parameters())


def _heads(block: nn.Module | None, width: int) -> int:
    for module in () if block is None else block.modules():
        for name in _HEADS:
            value = getattr(module, name, None)
            if isinstance(value, int) and value > 0 and width % value == 0:
                return value
    return 1


def _is_tied(specs: Sequence[Any]) -> bool:
    keys = [spec.key for spec in specs if hasattr(spec, "key") and hasattr(spec, "tied_weight_attr")]
    return len(keys) > len(set(keys))


def features_of(engine: Any, config: Mapping[str, Any], *, has_own_iterator: bool) -> list[str]:
    """The names of the properties that limit plans; `has_own_iterator`: the script passes its own data."""
    layers = layer_list(engine.module._layer_specs)
    has = {
        "bare_first_stage": not layers.has_first,
        "bare_last_stage": not layers.has_last,
        "clips_by_first_stage": clips_by_first_stage(config, pipeline_parallel=engine.num_stages),
        "clips_in_fp32": clips_in_fp32(config),
        "summed_gradients": sums_gradients(config),
        "zero_bound": _is_bound_to_zero_stage(engine),
        "tensor_parallel_topology": engine.grid.model_parallel_size > 1,
        "own_data_iterator": has_own_iterator,
        "dynamic_shape": engine.module.dynamic_shape,
    }
    return sorted(name for name, value in has.items() if value)


def _is_bound_to_zero_stage(engine: Any) -> bool:
    """Whether DeepSpeed refuses the ds_config of an engine with the other ZeRO stage of 0 and 1.

    Stage 0 accumulates gradients in the model's data type alone, and has neither weights or states of half
    precision, nor offloading, nor steps without a norm; stage 1 shards the optimizers alone that it supports.
    """
    model_type, accumulated_type = engine.get_data_types()
    needs_stage_1 = (
        model_type != accumulated_type,
        engine.fp16_master_weights_and_gradients(),
        engine.bf16_master_weights_and_gradients(),
        engine.bf16_optimizer_states(),
        engine.zero_use_cpu_optimizer(),
        not engine.zero_compute_grad_norm(),
    )
    optimizer = type(engine.basic_optimizer)
    can_be_sharded = (
        engine.zero_allow_untested_optimizer()
        or optimizer in ZERO_SUPPORTED_OPTIMIZERS
        or optimizer.__name__ == _MUON
    )
    return any(needs_stage_1) or not can_be_sharded


def describe_job(
    engine: Any,
    *,
    config: Mapping[str, Any],
    seq_length: int,
    has_own_iterator: bool,
    neutralised: list[str],
) -> dict[str, Any]:
    """The `job` of rank-K.json, from the engine as DeepSpeed resolved it."""
    module, grid = engine.module, engine.grid
    layers = layer_list(module._layer_specs)
    chunks = len(module.parts) - 1
    devices = grid.pipe_parallel_size
    recompute: Recompute = "full" if module.activation_checkpoint_interval > 0 else "none"
    layout = Layout(
        tensor_parallel=grid.model_parallel_size,
        pipeline_parallel=devices,
        data_parallel=grid.data_parallel_size,
        virtual_stages=chunks // devices,
        context_parallel=1,
        expert_parallel=1,
        micro_batch_size=engine.micro_batch_size,
        sequence_parallel=False,
        distributed_optimizer=bool(engine.zero_optimization()),
        recompute=recompute,
    )
    schedule = ScheduleChoice(name="no-pipelining" if devices == 1 else "1f1b")
    if devices > 1 and layout.virtual_stages > 1:
        schedule = ScheduleChoice(name="interleaved", group=devices)
    return {
        "framework": frameworks.DEEPSPEED.framework,
        "framework_version": DEEPSPEED.installed_version(),
        "torch_version": str(torch.__version__).partition("+")[0],
        "shape": dump(shape_of(module._layer_specs, seq_length=seq_length)),
        "layout": dump(layout),
        "split": dump(Split(transformer_layers_per_stage=layers.counts(module.parts))),
        "schedule": dump(schedule),
        "global_batch_size": engine.train_batch_size(),
        "train_iters": 0,  # DeepSpeed is not told how long a run is.
        "precision": precision(config),
        "features": features_of(engine, config, has_own_iterator=has_own_iterator),
        "neutralised": neutralised,
    }
