"""Which actions Megatron's processes recorded, and whose they are."""

from typing import Any

from quartet_plugin.rank.files import RankFileWriter


def write_actions(files: RankFileWriter, runtime: Any) -> None:
    """Write what the runtime recorded in the last step, for this process's place in the pipeline."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    tensor = parallel_state.get_tensor_model_parallel_rank()
    data = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    files.write_actions(
        actions=runtime.executor(get_num_microbatches()).actions,
        recorder=runtime.recorder,
        device=parallel_state.get_pipeline_model_parallel_rank(),
        replica=data * parallel_state.get_tensor_model_parallel_world_size() + tensor,
        peak_activation_bytes=None if runtime.ledger is None else runtime.ledger.peak_bytes,
    )
