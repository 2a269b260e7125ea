"""Measures Megatron's `train_step`, and writes the action times of a custom schedule."""

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quartet_plugin.megatron.packed_batches import PackedBatches
from quartet_plugin.protocol.execution import Execution
from quartet_plugin.rank.files import RankFileWriter
from quartet_plugin.rank.first_step import FirstStepProgress
from quartet_plugin.rank.module_census import ModuleCensus
from quartet_plugin.rank.step_meter import StepMeter, StepResult

# Places in the tuple that `train_step` returns.
_SKIPPED, _GRAD_NORM = 1, 5


def step_result(results: Any) -> StepResult:
    """The result in the tuple of Megatron's `train_step`; of several losses the language model's.

    A `train_step` of another release may return less: what is not there is not reported.
    """
    values = results if isinstance(results, tuple) else (results,)
    is_known = len(values) > _GRAD_NORM
    return StepResult(
        loss=lm_loss(values[0] if isinstance(values[0], dict) else None),
        skipped=bool(values[_SKIPPED]) if is_known else False,
        grad_norm=values[_GRAD_NORM] if is_known else None,
    )


def lm_loss(losses: Mapping[str, Any] | None) -> Any:
    """The language model's loss, else the first of those that a step returned; None without any."""
    if not losses:
        return None
    return losses.get("lm loss", next(iter(losses.values())))


class MegatronMeter(StepMeter):
    """The meter of one rank; `runtime`, set later, executes the plan's custom schedule.

    `as_written` are the arguments of the user's own words, which a trial does not leave as they are. The
    trial has `stage_divisor` times fewer stages than the training.
    """

    def __init__(
        self,
        files: RankFileWriter,
        *,
        neutralised: list[str],
        as_written: Namespace,
        started_at: float,
        stage_divisor: int = 1,
    ) -> None:
        super().__init__(files, neutralised=neutralised, started_at=started_at)
        self._stage_divisor = stage_divisor
        self.runtime: Any = None
        self._as_written = as_written
        self._call: dict[str, Any] = {}
        self._modules = ModuleCensus()
        self._packed = PackedBatches()
        files.first_step = FirstStepProgress(lambda: self._modules.num_begun)

    def wrap(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """See `StepMeter`; the arguments of the last step and the modules of the first are kept."""
        names = tuple(inspect.signature(train_step).parameters)

        def observed(*args: Any, **kwargs: Any) -> Any:
            call = {**dict(zip(names, args, strict=False)), **kwargs}
            if not self._call:
                self._packed.begin(call.get("model"))
                with self._modules:
                    results = train_step(*args, **kwargs)
            else:
                results = train_step(*args, **kwargs)
            self._call = call
            return results

        return super().wrap(observed)

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
        return replace(step_result(results), packed=self._packed.take())

    def _job(self) -> dict[str, Any]:
        from megatron.training.global_vars import get_args

        from quartet_plugin.megatron.describe import describe_job

        return describe_job(
            get_args(),
            as_written=self._as_written,
            neutralised=self._neutralised,
            stage_divisor=self._stage_divisor,
            forward_step=self._call.get("forward_step_func"),
        )

    def _execution(self) -> Execution | None:
        if not self._call.keys() >= {"model", "forward_backward_func"}:
            return None
        from megatron.training.global_vars import get_args

        from quartet_plugin.megatron.execution import execution_of

        return execution_of(
            self._call["model"],
            function=self._call["forward_backward_func"],
            runtime=self.runtime,
            modules=self._modules.names,
            args=get_args(),
            optimizer=self._call.get("optimizer"),
        )
