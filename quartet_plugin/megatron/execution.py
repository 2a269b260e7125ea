"""The record of this rank's execution, from the parts that Megatron built and the actions that ran."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_micro_batch_size, get_num_microbatches
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from quartet_plugin.megatron.placement.end_stages import tied_weights
from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.megatron_arguments import shards_whole_layers
from quartet_plugin.partition.layer import BLOCK_OF
from quartet_plugin.protocol.execution import (
    PROGRAM,
    BuiltStage,
    ExecutedActions,
    Execution,
    PipelineEnds,
    RanSchedule,
)
from quartet_plugin.space.knobs.knob import LiveJob
from quartet_plugin.space.knobs.registry import knobs_read_back
from quartet_plugin.space.knobs.use_megatron_fsdp import STRATEGY, switch_value

# The optimizer of megatron/core/optimizer/cpu_offloading, which not every release has.
_HOST_OPTIMIZER = "HybridDeviceOptimizer"
# The wrapper of megatron/core/distributed/fsdp, which not every release has.
_FSDP_WRAPPER = "FullyShardedDataParallel"
_STOCK: dict[str, RanSchedule] = {
    "forward_backward_no_pipelining": "no-pipelining",
    "forward_backward_pipelining_without_interleaving": "1f1b",
    "forward_backward_pipelining_with_interleaving": "interleaved",
}


def execution_of(
    model: Any, *, function: Any, runtime: Any, modules: tuple[str, ...], args: Any, optimizer: Any = None
) -> Execution:
    """The record of this rank after a training step.

    `function` ran the microbatches of the last step, `runtime` is the plugin's where the plan has one,
    `modules` are the classes that ran, and `args` Megatron's arguments; `optimizer` is None where it was not
    seen.
    """
    chunks = list(model) if isinstance(model, list) else [model]
    num_microbatches = int(get_num_microbatches())
    actions: ExecutedActions | None = None
    schedule: RanSchedule = _STOCK.get(getattr(_unwrapped(function), "__name__", ""), "other")
    if runtime is not None and function == runtime.forward_backward:
        schedule, actions = PROGRAM, runtime.executed(num_microbatches)
    return Execution(
        schedule=schedule,
        position=dist.get_rank(),
        pipeline_rank=int(parallel_state.get_pipeline_model_parallel_rank()),
        num_microbatches=num_microbatches,
        stages=built_stages(chunks),
        knobs=knobs_read_back(
            live_job(chunks, optimizer=optimizer, shards_layers=shards_whole_layers(args)),
            framework=MEGATRON.framework,
        ),
        actions=actions,
        ends=_ends(chunks),
        modules=modules,
        ramps_batch=_ramps_batch(args) or None,
    )


def _unwrapped(function: Any) -> Any:
    """The schedule that Megatron's runners of whole iterations hold: CUDA graphs, a paged stash of tokens."""
    while (held := getattr(function, "forward_backward_func", None)) is not None:
        function = held
    return function


def _ramps_batch(args: Any) -> bool:
    """Whether the number of microbatches grows in this job."""
    return any(getattr(args, name, None) for name in ("rampup_batch_size", "step_batch_size_schedule"))


def live_job(chunks: Sequence[Any], *, optimizer: Any = None, shards_layers: bool = False) -> LiveJob:
    """The sizes of the process groups as they are, and the configurations of the parts that were built."""
    return LiveJob(
        degrees={
            "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline_parallel": parallel_state.get_pipeline_model_parallel_world_size(),
            "data_parallel": parallel_state.get_data_parallel_world_size(),
            "context_parallel": parallel_state.get_context_parallel_world_size(),
            "expert_parallel": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel": parallel_state.get_expert_tensor_parallel_world_size(),
            "virtual_stages": len(chunks),
            "micro_batch_size": int(get_micro_batch_size()),
        },
        model=get_model_config(chunks[0]),
        optimizer=getattr(chunks[0], "ddp_config", None),
        tensor_partition=_tensor_partition(chunks),
        offloads_optimizer=offloads_optimizer(optimizer),
        optimizer_offload_fraction=optimizer_offload_fraction(optimizer),
        shards_layers=shards_layers,
        shards_parameters=shards_parameters(chunks),
    )


def shards_parameters(chunks: Sequence[Any]) -> bool | None:
    """Whether Megatron-FSDP holds the chunks and shards their parameters; None where it shards less."""
    is_on = all(type(chunk).__name__ == _FSDP_WRAPPER for chunk in chunks)
    strategy = getattr(getattr(chunks[0], "ddp_config", None), STRATEGY, None)
    return switch_value(is_on=is_on, strategy=strategy)


def offloads_optimizer(optimizer: Any) -> bool | None:
    """Whether an optimizer, or one that it is a chain of, steps on the host; None without one."""
    return None if optimizer is None else bool(_host_optimizers(optimizer))


def optimizer_offload_fraction(optimizer: Any) -> float | None:
    """The part of an optimizer, or of those that it is a chain of, that is on the host; None without one."""
    return next((float(part.offload_fraction) for part in _host_optimizers(optimizer)), None)


def _host_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers in a chain, or the optimizer alone, that step on the host."""
    parts = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    held = (getattr(part, "optimizer", part) for part in parts)
    return [part for part in held if type(part).__name__ == _HOST_OPTIMIZER]


def _tensor_partition(chunks: Sequence[Any]) -> str | None:
    """How the linears of the layers are cut, by the linears that are there; None where there are none."""
    labels: dict[str, set[str]] = {block: set() for block in BLOCK_OF.values()}
    for chunk in chunks:
        for name, module in chunk.named_modules():
            linear = name.rpartition(".linear_")[2]
            if linear in BLOCK_OF:
                labels[BLOCK_OF[linear]].add(getattr(module, "block_label", "stock"))
    if any(len(kinds) != 1 for kinds in labels.values()):
        return None
    attention, mlp = (next(iter(labels[block])) for block in ("attention", "mlp"))
    return attention if attention == mlp else f"attention {attention}, mlp {mlp}"


def built_stages(chunks: Sequence[Any]) -> tuple[BuiltStage, ...]:
    """The layers and ends of each chunk; empty for a model without a list of layers."""
    built = []
    for chunk in chunks:
        module = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        layers = getattr(getattr(module, "decoder", None), "layers", None)
        if layers is None:
            return ()
        numbers = [int(layer.layer_number) for layer in layers]
        built.append(
            BuiltStage(
                first_layer=numbers[0] - 1 if numbers else 0,
                num_layers=len(numbers),
                has_embedding=bool(module.pre_process),
                has_head=bool(module.post_process),
                mtp_layers=_mtp_layers(module) or None,
            )
        )
    return tuple(built)


def _mtp_layers(module: Any) -> int:
    """The tokens that a chunk predicts beyond the next one: each has a layer, or all share one."""
    layers = getattr(getattr(module, "mtp", None), "layers", ())
    is_shared = getattr(module.config, "mtp_use_repeated_layer", False)
    return int(module.config.mtp_num_layers) if layers and is_shared else len(layers)


def _ends(chunks: Sequence[Any]) -> PipelineEnds:
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    embedding = parallel_state._EMBEDDING_GLOBAL_RANKS or ()
    # Each is asked where Megatron asks it: a name that a module has imported may be another function. The
    # package has a function of the module's name.
    finalize_model_grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    answers = {
        bool(finalize_model_grads.is_pp_last_stage(group)),
        bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True)),
    }
    last_device = ranks.index(finalize_model_grads.get_pp_last_rank(group))
    is_last = answers.pop() if len(answers) == 1 else last_device != group.rank()
    tied = tied_weights(chunks)
    return PipelineEnds(
        last_device=last_device,
        is_last=is_last,
        embedding_devices=tuple(sorted(ranks.index(rank) for rank in embedding if rank in ranks)),
        tied_copies_agree=None if tied is None else bool((tied[0] == tied[1]).all()),
    )
