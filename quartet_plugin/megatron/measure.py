"""Measures Megatron's `train_step`, and writes the action times of a custom schedule."""

from typing import Any

from quartet_plugin.rank.files import RankFileWriter
from quartet_plugin.rank.step_meter import StepMeter, StepResult


def step_result(results: Any) -> StepResult:
    """The result in the tuple of Megatron's `train_step`; of several losses the language model's."""
    losses, skipped, grad_norm = results[0], results[1], results[5]
    first = next(iter(losses.values()), None) if losses else None
    loss = losses.get("lm loss", first) if losses else None
    return StepResult(loss=loss, skipped=bool(skipped), grad_norm=grad_norm)


class MegatronMeter(StepMeter):
    """The meter of one rank; `runtime`, set later, executes the plan's custom schedule."""

    def __init__(self, files: RankFileWriter, *, neutralised: list[str], started_at: float) -> None:
        super().__init__(files, neutralised=neutralised, started_at=started_at)
        self.runtime: Any = None

    def write(self) -> None:
        """Write the measurements so far, and the action times of the last step."""
        super().write()
        runtime = self.runtime
        if runtime is None:
            return
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        tensor = parallel_state.get_tensor_model_parallel_rank()
        data = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        self._files.write_actions(
            actions=runtime.executor(get_num_microbatches()).actions,
            recorder=runtime.recorder,
            device=parallel_state.get_pipeline_model_parallel_rank(),
            replica=data * parallel_state.get_tensor_model_parallel_world_size() + tensor,
            peak_activation_bytes=None if runtime.tracker is None else runtime.tracker.peak_bytes,
        )

    def _result_of(self, results: Any) -> StepResult:
        return step_result(results)

    def _job(self) -> dict[str, Any]:
        from megatron.training.global_vars import get_args

        from quartet_plugin.megatron.describe import describe_job

        return describe_job(get_args(), neutralised=self._neutralised)
