"""Embedding and head of one weight on one device: Megatron only ties them across devices.

Both chunks have a copy. They are made equal when the model has been built, and their gradients are summed
where Megatron would reduce them across devices: before gradients are scaled by the number of tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

from quartet_plugin.megatron.seams import Seam, Wrapper

GET_OPTIMIZER = Seam(
    "megatron.core.optimizer",
    "get_megatron_optimizer",
    "config model_chunks config_overrides use_gloo_process_groups pg_collection "
    "dump_param_to_param_group_map",
    {"0.19.2": "c11b62974b83fb53"},
    aliases=("megatron.training.training",),
    use_sites=(
        "megatron.core.models.mimo.optimizer:get_mimo_optimizer",
        "megatron.core.optimizer.muon:get_megatron_muon_optimizer",
        "megatron.training.training:setup_model_and_optimizer",
    ),
)
WORD_EMBEDDING_GRADS = Seam(
    "megatron.core.distributed.finalize_model_grads",
    "_allreduce_word_embedding_grads",
    "model config embd_group pp_group",
    {"0.19.2": "38fe55c399e89e57"},
    use_sites=("megatron.core.distributed.finalize_model_grads:finalize_model_grads",),
)


def wrappers() -> dict[Seam, Wrapper]:
    """For a placement with both ends on one device."""
    return {GET_OPTIMIZER: _copy_before_optimizer, WORD_EMBEDDING_GRADS: _sum_after_reduction}


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
    """The embedding's and the head's copy of one weight, where this device has both; otherwise None."""
    from megatron.core.utils import get_attr_wrapped_model

    first, last = (
        get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        for chunk in (model_chunks[0], model_chunks[-1])
    )
    if first is last or not (first.pre_process and last.post_process):
        return None
    if not getattr(last, "share_embeddings_and_output_weights", False):
        return None
    return first.shared_embedding_or_output_weight(), last.shared_embedding_or_output_weight()
