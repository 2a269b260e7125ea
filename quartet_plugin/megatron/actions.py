"""What the runtime recorded in a trial's last step, as a file a rank."""

from pathlib import Path
from typing import Any

from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.worker.files import RankFiles


def write_actions(files: RankFiles, runtime: Any) -> None:
    """Write rank-K.actions.json: start, end and waiting of every action, in the device's order.

    Ranks that do the same work as another (tensor and data parallel) say so by `replica`.
    """
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    recorder = runtime.recorder
    actions = runtime.executor(get_num_microbatches()).actions
    if recorder.num_steps == 0:
        return
    times = recorder.times()
    if len(times) != len(actions):
        return  # the last call was an evaluation
    tensor = parallel_state.get_tensor_model_parallel_rank()
    data = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    content = {
        "schema_version": 1,
        "attempt_id": files.order.attempt_id,
        "launch_rank": files.place.launch_rank,
        "device": parallel_state.get_pipeline_model_parallel_rank(),
        "replica": data * parallel_state.get_tensor_model_parallel_world_size() + tensor,
        "begin_at": recorder.begin_at(),
        "actions": [str(action) for action in actions],
        "start_s": [one.start_s for one in times],
        "end_s": [one.end_s for one in times],
        "waiting_s": [one.waiting_s for one in times],
    }
    write_json_atomic(Path(files.order.folder, f"rank-{files.place.launch_rank}.actions.json"), content)
