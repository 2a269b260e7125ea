"""The command of a trial on fewer nodes than its training: with fewer replicas, or a part of one.

A replica stays as it is where it fits. Where the trial's processes are fewer than a replica's, the trial has
a part of its stages, with the same number of layers each: the pipeline and the model are cut by one factor,
so that what a stage computes, holds and sends is the training's.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quartet_plugin.errors import ConfigError
from quartet_plugin.megatron.arguments import Flags

_GROWING_BATCH = ("rampup_batch_size", "step_batch_size_schedule")
# Flags by which layers or stages are not all alike, so that a part of them is no small copy of the whole.
_UNLIKE_STAGES = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_experts",
    "mtp_num_layers",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
)
# Flags whose lists have a value for each layer.
_BY_LAYER = ("cp_comm_type", "no_rope_freq", "window_attn_skip_freq", "linear_attention_freq")
_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallerCommand:
    """The words of a trial, and the factor by which it has fewer stages than the training; 1 for none."""

    words: list[str]
    stage_divisor: int


def on_fewer_nodes(flags: Flags, words: Sequence[str], *, divisor: int, num_processes: int) -> SmallerCommand:
    """The command on `num_processes`, with `divisor` times fewer nodes than its training.

    Every replica has as many microbatches as in the training, so the global batch shrinks with the replicas.
    Raises ConfigError for a batch or a pipeline that cannot be divided so.
    """
    stage_divisor = _stage_divisor(flags, words, divisor=divisor, num_processes=num_processes)
    if stage_divisor > 1:
        values = flags.values(words)
        smaller = {
            "num_layers": values.num_layers // stage_divisor,
            "pipeline_model_parallel_size": values.pipeline_model_parallel_size // stage_divisor,
        }
        words, _ = flags.edit(words, remove=set(smaller), append=flags.words_for(smaller))
    return SmallerCommand(
        words=_with_smaller_batch(flags, words, divisor=divisor // stage_divisor, num_nodes_divisor=divisor),
        stage_divisor=stage_divisor,
    )


def _with_smaller_batch(
    flags: Flags, words: Sequence[str], *, divisor: int, num_nodes_divisor: int
) -> list[str]:
    """The words with the global batch over `divisor`.

    Without `--global-batch-size` Megatron takes a microbatch a replica, which shrinks by itself.
    """
    values = flags.values(words)
    growing = next((name for name in _GROWING_BATCH if getattr(values, name, None)), None)
    if growing is not None:
        raise ConfigError(
            f"{flags.flag_of(growing)}: the batch grows during training, so the batch of a trial with fewer "
            "replicas is undefined; omit the flag while tuning"
        )
    batch = values.global_batch_size
    if batch is None or divisor == 1:
        return list(words)
    if batch % divisor:
        fewer = "" if divisor == num_nodes_divisor else f" ({num_nodes_divisor} times fewer nodes)"
        raise ConfigError(
            f"--global-batch-size {batch}: must be a multiple of {divisor}, the ratio of the training's "
            f"replicas to the trial's{fewer}; raise trial.nodes"
        )
    smaller = {"global_batch_size": batch // divisor}
    edited, _ = flags.edit(words, remove=set(smaller), append=flags.words_for(smaller))
    return edited


def _stage_divisor(flags: Flags, words: Sequence[str], *, divisor: int, num_processes: int) -> int:
    """How many times fewer stages fit `num_processes`; 1 where a replica fits."""
    values = flags.values(words)
    stages, layers = int(values.pipeline_model_parallel_size), values.num_layers
    of_stage = int(values.tensor_model_parallel_size) * int(values.context_parallel_size)
    size = of_stage * stages
    if size <= num_processes:
        return 1
    cut = f"a replica has {size} processes and a trial {num_processes}, so that a trial has fewer stages"
    if num_processes % of_stage or size % num_processes:
        raise ConfigError(
            f"trial.nodes: {cut}: its processes must be a multiple of those of a stage ({of_stage}) and "
            f"divide the replica's; choose another trial.nodes"
        )
    factor = size // num_processes
    for name, count in (("the nodes", divisor), ("--num-layers", layers)):
        if count is None or count % factor:
            raise ConfigError(f"trial.nodes: {cut}: {name} ({count}) must be a multiple of {factor}")
    named = (name for name in _UNLIKE_STAGES if getattr(values, name, None))
    listed = (name for name in _BY_LAYER if _is_list(getattr(values, name, None)))
    unlike = next(itertools.chain(named, listed), None)
    if unlike is not None:
        raise ConfigError(
            f"{flags.flag_of(unlike)}: {cut}, and this command's are not all equal; raise trial.nodes "
            "until a replica fits"
        )
    virtual = next((name for name in _VIRTUAL if getattr(values, name, None)), None)
    if virtual is not None and stages == factor:
        raise ConfigError(
            f"{flags.flag_of(virtual)}: {cut}: one pipeline rank, which has no virtual stages; "
            "raise trial.nodes"
        )
    return factor


def _is_list(value: Any) -> bool:
    """Whether a value is a list of several, not the single one that all layers have."""
    return isinstance(value, list) and len(value) > 1
