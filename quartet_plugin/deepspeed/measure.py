"""Measures `train_batch` from outside, and ends a trial when it has seen enough."""

from collections.abc import Callable
from typing import Any

from quartet_plugin.deepspeed import seams
from quartet_plugin.deepspeed.describe import describe_job
from quartet_plugin.deepspeed.engine import ProgramRunner
from quartet_plugin.deepspeed.execution import execution_of
from quartet_plugin.deepspeed.parity import ParityMeter
from quartet_plugin.deepspeed.seams import Seam, Wrapper
from quartet_plugin.protocol.execution import Execution
from quartet_plugin.rank.files import RankFileWriter
from quartet_plugin.rank.step_meter import StepMeter, StepResult

# The methods that a trial leaves out, and the result that their caller gets.
_LEFT_OUT: dict[Seam, Any] = {seams.SAVE: True, seams.LOAD: (None, {}), seams.SAVE_16BIT: True}


class BatchMeter(StepMeter):
    """The meter of one rank: it times an engine's `train_batch` as a training step."""

    def __init__(self, files: RankFileWriter, *, started_at: float) -> None:
        super().__init__(files, neutralised=[], started_at=started_at)
        self._engine: Any = None
        self._config: dict[str, Any] = {}
        self._has_own_iterator = False
        self._compared = ParityMeter(files) if files.spec.is_compared else None
        self._seq_length: int | None = None

    @property
    def wrappers(self) -> dict[Seam, Wrapper]:
        """The methods of engines to replace: steps are measured, checkpoints neither written nor read."""
        left_out = {
            seam: lambda _, result=result: lambda *_, **__: result for seam, result in _LEFT_OUT.items()
        }
        return {seams.TRAIN_BATCH: self._measured, seams.NEXT_BATCH: self._with_length, **left_out}

    def watch(self, engine: Any, *, config: dict[str, Any], left_out: list[str]) -> None:
        """Measure an engine from its first step on; `left_out` names what its trial lacks of `config`."""
        self._engine, self._config = engine, config
        self._neutralised = [*left_out, *(seam.name.rpartition(".")[2] for seam in _LEFT_OUT)]
        if self._compared is not None:
            self._compared.watch(engine)
        if self._runner is not None:
            self._runner.record()

    @property
    def _runner(self) -> ProgramRunner | None:
        return getattr(self._engine, "quartet_runner", None)

    def _measured(self, train_batch: Callable[..., Any]) -> Callable[..., Any]:
        def step(engine: Any, *args: Any, **kwargs: Any) -> tuple[StepResult, Any]:
            if args or kwargs.get("data_iter") is not None:
                self._has_own_iterator = True
            skipped = engine.skipped_steps
            loss = train_batch(engine, *args, **kwargs)
            norm = engine.get_global_grad_norm()
            if self._compared is not None:
                norm = self._compared.step_done(norm)
            result = StepResult(
                loss=loss if engine.is_last_stage() else None,
                skipped=engine.skipped_steps > skipped,
                grad_norm=norm,
            )
            return result, loss

        measured = self.wrap(step)
        return lambda engine, *args, **kwargs: measured(engine, *args, **kwargs)[1]

    def _with_length(self, next_batch: Callable[..., Any]) -> Callable[..., Any]:
        def take(engine: Any) -> Any:
            batch = next_batch(engine)
            self._seq_length = self._seq_length or _length_of(batch)
            return batch

        return take

    def write(self) -> None:
        """Write the measurements so far, and the last step's actions where the plan has a custom schedule."""
        super().write()
        if self._runner is not None:
            self._files.write_actions(
                actions=self._runner.actions(),
                recorder=self._runner.recorder,
                device=self._engine.stage_id,
                replica=self._engine.grid.get_data_parallel_id(),
            )

    def _result_of(self, results: tuple[StepResult, Any]) -> StepResult:
        return results[0]

    def _execution(self) -> Execution:
        return execution_of(self._engine, runner=self._runner)

    def _job(self) -> dict[str, Any]:
        return describe_job(
            self._engine,
            config=self._config,
            seq_length=self._seq_length or 1,
            has_own_iterator=self._has_own_iterator,
            neutralised=self._neutralised,
        )


def _length_of(batch: Any) -> int:
    """The sequence's length in a microbatch of (inputs, labels): the second dimension of the inputs."""
    first = batch[0]
    while isinstance(first, (tuple, list)) and first:
        first = first[0]
    shape = tuple(getattr(first, "shape", ()))
    return int(shape[1]) if len(shape) > 1 else 1
