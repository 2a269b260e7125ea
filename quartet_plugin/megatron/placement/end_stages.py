"""The first and the last stage on any devices: Megatron's queries for them, their tied weights, the losses.

`is_pp_last_stage` and `get_pp_last_rank` are called while a model is built, when gradients are finished and
when losses are reduced: they answer for the device of the last stage. `parallel_state.is_pipeline_*_stage`
is called by a user's `get_batch`: while an action runs it answers for the action's stage, because a device
may hold both ends.

Megatron ties embedding and head of one weight only across devices. Where both lie on one device, both chunks
have a copy: the copies are made equal when the model has been built, and their gradients are summed where
Megatron would reduce them across devices, before gradients are scaled by the number of tokens.

Megatron prints and plots the reduced loss on the last global rank, wherever the last stage is.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

from quartet_plugin.megatron.placement.loss_broadcast import LossBroadcast
from quartet_plugin.megatron.placement.mtp_metrics import with_mtp_metrics
from quartet_plugin.megatron.placement.state import StagePlacement
from quartet_plugin.megatron.seams import Seam, Wrapper, chain
from quartet_plugin.megatron.seams.declared import (
    EVALUATE,
    GET_OPTIMIZER,
    GET_PP_LAST_RANK,
    INITIALIZE,
    IS_FIRST,
    IS_LAST,
    IS_PP_LAST_STAGE,
    TRAIN_STEP,
    WORD_EMBEDDING_GRADS,
)


def wrappers(placement: StagePlacement) -> dict[Seam, Wrapper]:
    """The replacements that this placement needs."""
    last_stage, last_chunk = placement.num_stages - 1, placement.num_chunks - 1
    needed: dict[Seam, Wrapper] = {
        IS_PP_LAST_STAGE: partial(_is_pp_last_stage, placement),
        GET_PP_LAST_RANK: partial(_get_pp_last_rank, placement),
        IS_FIRST: lambda _: _is_end(placement, 0, 0, 0),
        IS_LAST: lambda _: _is_end(placement, last_stage, placement.last_device, last_chunk),
        INITIALIZE: partial(_initialize, placement),
    }
    if placement.last_device == 0:
        needed |= {GET_OPTIMIZER: _copy_before_optimizer, WORD_EMBEDDING_GRADS: _sum_after_reduction}
    if placement.last_device != placement.num_devices - 1:
        for seam in (TRAIN_STEP, EVALUATE):
            needed[seam] = partial(_with_losses, LossBroadcast(placement))
        needed[TRAIN_STEP] = chain(needed[TRAIN_STEP], partial(with_mtp_metrics, LossBroadcast(placement)))
    return needed


def _is_pp_last_stage(placement: StagePlacement, original: Callable[..., Any]) -> Callable[..., bool]:
    def is_pp_last_stage(pp_group: Any) -> bool:
        if pp_group is None or pp_group.size() != placement.num_devices:
            return bool(original(pp_group))
        return bool(pp_group.rank() == placement.last_device)

    return is_pp_last_stage


def _get_pp_last_rank(placement: StagePlacement, original: Callable[..., Any]) -> Callable[..., int]:
    def get_pp_last_rank(pp_group: Any) -> int:
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks(pp_group)
        return int(
            ranks[placement.last_device] if len(ranks) == placement.num_devices else original(pp_group)
        )

    return get_pp_last_rank


def _is_end(
    placement: StagePlacement, end_stage: int, end_device: int, end_chunk: int
) -> Callable[..., bool]:
    def is_pipeline_end_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        from megatron.core import parallel_state

        if placement.running is not None:
            return placement.running == end_stage
        if not ignore_virtual and parallel_state.get_virtual_pipeline_model_parallel_world_size():
            assert vp_stage is not None, "vp_stage must be passed if virtual pipeline is enabled"
            if vp_stage != end_chunk:
                return False
        return bool(parallel_state.get_pipeline_model_parallel_rank() == end_device)

    return is_pipeline_end_stage


def _initialize(placement: StagePlacement, original: Callable[..., Any]) -> Callable[..., Any]:
    """Let embedding groups hold the devices of the first and the last stage, whatever the script passes."""

    def embedding_ranks(pp_ranks: list[int], *_: Any) -> list[int]:
        if len(pp_ranks) != placement.num_devices:
            return [pp_ranks[0], pp_ranks[-1]] if len(pp_ranks) > 1 else [pp_ranks[0]]
        return sorted({pp_ranks[0], pp_ranks[placement.last_device]})

    def position_embedding_ranks(pp_ranks: list[int], *_: Any) -> list[int]:
        return [pp_ranks[0]]

    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        kwargs["get_embedding_ranks"] = embedding_ranks
        kwargs["get_position_embedding_ranks"] = position_embedding_ranks
        return original(*args, **kwargs)

    return initialize_model_parallel


def _copy_before_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_megatron_optimizer(config: Any, model_chunks: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        pair = tied_weights(model_chunks)
        if pair is not None:
            embedding, head = pair
            head.data.copy_(embedding.data)
        return original(config, model_chunks, *args, **kwargs)

    return get_megatron_optimizer


def _sum_after_reduction(original: Callable[..., Any]) -> Callable[..., Any]:
    def allreduce_word_embedding_grads(model: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        result = original(model, *args, **kwargs)
        pair = tied_weights(model)
        if pair is not None:
            embedding, head = (weight.main_grad for weight in pair)
            embedding.add_(head)
            head.copy_(embedding)
        return result

    return allreduce_word_embedding_grads


def tied_weights(model_chunks: Sequence[Any]) -> tuple[Any, Any] | None:
    """The copies of one weight in the first and the last stage, where this device has both; otherwise None.

    The last stage has the embedding's weight for a tied head, or to embed further tokens (multi-token
    prediction).
    """
    from megatron.core.utils import get_attr_wrapped_model

    first, last = (
        get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        for chunk in (model_chunks[0], model_chunks[-1])
    )
    if first is last or not (first.pre_process and last.post_process):
        return None
    is_tied = getattr(last, "share_embeddings_and_output_weights", False)
    if not (is_tied or getattr(last, "mtp_process", False)):
        return None
    return first.shared_embedding_or_output_weight(), last.shared_embedding_or_output_weight()


def _with_losses(broadcast: LossBroadcast, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def with_losses(*args: Any, **kwargs: Any) -> Any:
        losses, *rest = original(*args, **kwargs)
        # None: an evaluation that the clock ended, on all ranks alike.
        return (losses if losses is None else broadcast.over_pipeline(losses), *rest)

    return with_losses
