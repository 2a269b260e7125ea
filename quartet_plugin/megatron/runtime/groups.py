"""The process groups of a schedule, as Megatron's own schedules build them where they are given none."""

from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection

from quartet_plugin.megatron.seams.declared import BUILD_GROUPS


def default_groups() -> Any:
    """The groups of Megatron's global state. Before 0.19.0 each schedule collects them itself."""
    build = getattr(schedules, BUILD_GROUPS.name, None)
    if build is not None:
        return build()
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups
