"""Who is first and last, for any placement: at every name by which Megatron and its users ask.

`is_pp_last_stage` and `get_pp_last_rank` are asked while a model is built, when gradients are finished and
when losses are reduced: they answer for the device of the last stage. `parallel_state.is_pipeline_*_stage`
is what a user's `get_batch` asks: while an action runs they answer for its stage, because a device may hold
both ends.
"""

from collections.abc import Callable
from typing import Any

from quartet_plugin.megatron.placement.state import Placed
from quartet_plugin.megatron.seams import Seam, Wrapper

_UTILS = "megatron.core.pipeline_parallel.utils"
_STATE = "megatron.core.parallel_state"

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"

IS_PP_LAST_STAGE = Seam(
    _UTILS,
    "is_pp_last_stage",
    "pp_group",
    {"0.19.2": "0e54b14f8b140458"},
    aliases=(
        _FINALIZE,
        "megatron.core.models.common.language_module.language_module",
        "megatron.core.pipeline_parallel.p2p_communication",
        _SCHEDULES,
        "megatron.training.models.gpt",
        "megatron.training.models.hybrid",
        "megatron.training.training",
    ),
    use_sites=(
        f"{_FINALIZE}:_allreduce_embedding_grad",
        "megatron.core.models.common.language_module.language_module:LanguageModule._is_in_embd_group",
        "megatron.core.transformer.module:Float16Module.forward",
        "megatron.training.models.dist_utils:build_virtual_pipeline_stages",
        "megatron.training.models.gpt:GPTModelBuilder.build_model",
    ),
)
GET_PP_LAST_RANK = Seam(
    _UTILS,
    "get_pp_last_rank",
    "pp_group",
    {"0.19.2": "2371c5354a8b952f"},
    aliases=(_FINALIZE,),
    use_sites=(f"{_FINALIZE}:finalize_model_grads",),
)
IS_FIRST = Seam(
    _STATE,
    "is_pipeline_first_stage",
    "ignore_virtual vp_stage",
    {"0.19.2": "be1cd28213ddca50"},
    use_sites=(
        "megatron.core.parallel_state:is_rank_in_embedding_group",
        "megatron.core.utils:get_batch_on_this_tp_rank",
        "megatron.training.checkpointing:maybe_save_dataloader_state",
        "megatron.training.utils.common_utils:is_first_or_last_pipeline_stage",
    ),
)
IS_LAST = Seam(
    _STATE,
    "is_pipeline_last_stage",
    "ignore_virtual vp_stage",
    {"0.19.2": "788166e876056f89"},
    use_sites=(
        "megatron.core.parallel_state:is_rank_in_embedding_group",
        f"{_SCHEDULES}:forward_step_calc_loss",
        "megatron.core.utils:get_batch_on_this_tp_rank",
    ),
)
INITIALIZE = Seam(
    _STATE,
    "initialize_model_parallel",
    "tensor_model_parallel_size pipeline_model_parallel_size "
    "virtual_pipeline_model_parallel_size pipeline_model_parallel_comm_backend "
    "use_sharp context_parallel_size hierarchical_context_parallel_sizes "
    "hybrid_context_parallel expert_model_parallel_size gtp_remat_size "
    "expert_gtp_remat_size num_distributed_optimizer_instances "
    "expert_tensor_parallel_size nccl_communicator_config_path "
    "distributed_timeout_minutes order get_embedding_ranks "
    "get_position_embedding_ranks create_gloo_process_groups "
    "high_priority_stream_groups sharp_enabled_group rank_offset local_world_size",
    {"0.19.2": "3f3ab8a44ca9f942"},
    use_sites=("megatron.training.initialize:_initialize_distributed",),
)


def wrappers(placed: Placed) -> dict[Seam, Wrapper]:
    """One wrapper a seam."""
    return {
        IS_PP_LAST_STAGE: _is_pp_last_stage(placed),
        GET_PP_LAST_RANK: _get_pp_last_rank(placed),
        IS_FIRST: _is_end(placed, 0, 0, 0),
        IS_LAST: _is_end(placed, placed.num_stages - 1, placed.last_device, placed.num_chunks - 1),
        INITIALIZE: _initialize(placed),
    }


def _is_pp_last_stage(placed: Placed) -> Wrapper:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def is_pp_last_stage(pp_group: Any) -> bool:
            if pp_group is None or pp_group.size() != placed.num_devices:
                return bool(original(pp_group))
            return bool(pp_group.rank() == placed.last_device)

        return is_pp_last_stage

    return wrap


def _get_pp_last_rank(placed: Placed) -> Wrapper:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_pp_last_rank(pp_group: Any) -> int:
            import torch.distributed as dist

            ranks = dist.get_process_group_ranks(pp_group)
            return int(ranks[placed.last_device]) if len(ranks) == placed.num_devices else original(pp_group)

        return get_pp_last_rank

    return wrap


def _is_end(placed: Placed, end_stage: int, end_device: int, end_chunk: int) -> Wrapper:
    def wrap(_original: Callable[..., Any]) -> Callable[..., Any]:
        def is_pipeline_end_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
            from megatron.core import parallel_state

            if placed.running is not None:
                return placed.running == end_stage
            if not ignore_virtual and parallel_state.get_virtual_pipeline_model_parallel_world_size():
                assert vp_stage is not None, "vp_stage must be passed if virtual pipeline is enabled"
                if vp_stage != end_chunk:
                    return False
            return bool(parallel_state.get_pipeline_model_parallel_rank() == end_device)

        return is_pipeline_end_stage

    return wrap


def _initialize(placed: Placed) -> Wrapper:
    """Embedding groups hold the devices of the first and the last stage, whatever the script thinks."""

    def embedding_ranks(pp_ranks: list[int], *_: Any) -> list[int]:
        if len(pp_ranks) != placed.num_devices:
            return [pp_ranks[0], pp_ranks[-1]] if len(pp_ranks) > 1 else [pp_ranks[0]]
        return sorted({pp_ranks[0], pp_ranks[placed.last_device]})

    def position_embedding_ranks(pp_ranks: list[int], *_: Any) -> list[int]:
        return [pp_ranks[0]]

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
            kwargs["get_embedding_ranks"] = embedding_ranks
            kwargs["get_position_embedding_ranks"] = position_embedding_ranks
            return original(*args, **kwargs)

        return initialize_model_parallel

    return wrap
