"""Measures `train_batch` from outside, and ends a trial when it has seen enough."""

from collections.abc import Callable
from typing import Any

from quartet_plugin.deepspeed.describe import describe_job
from quartet_plugin.deepspeed.engine import PlannedEngine
from quartet_plugin.deepspeed.parity import ParityMeter
from quartet_plugin.rank.actions import write_actions
from quartet_plugin.rank.files import RankFileWriter
from quartet_plugin.rank.step_meter import StepMeter, rank_now

# DeepSpeed is not told how long a run is.
_TRAIN_ITERS = 0


class BatchMeter(StepMeter):
    """The meter of one rank: an engine's `train_batch` in place of Megatron's `train_step`."""

    def __init__(self, files: RankFileWriter, *, started_at: float) -> None:
        super().__init__(files, neutralised=[], started_at=started_at)
        self._engine: Any = None
        self._seq_length = 1

    def watch(self, engine: Any, *, neutralised: list[str]) -> None:
        """Measure this engine from its first step on."""
        self._engine = engine
        self._neutralised = neutralised
        compared = ParityMeter(self._files) if self._files.order.is_compared else None
        if compared is not None:
            compared.watch(engine)
        if isinstance(engine, PlannedEngine):
            engine.quartet_record()
        train_batch: Callable[..., Any] = engine.train_batch
        next_batch = engine._next_batch

        def looked_at() -> Any:
            batch = next_batch()
            self._seq_length = _length_of(batch)
            engine._next_batch = next_batch
            return batch

        def step(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            if args or kwargs.get("data_iter") is not None:
                engine.quartet_own_data = True
            skipped = engine.skipped_steps
            loss = train_batch(*args, **kwargs)
            losses = {"loss": loss} if engine.is_last_stage() else {}
            norm = engine.get_global_grad_norm()
            if compared is not None:
                norm = compared.step_done(norm)
            return losses, engine.skipped_steps > skipped, loss, None, None, norm

        engine._next_batch = looked_at
        measured = self.wrap(step)
        engine.train_batch = lambda *args, **kwargs: measured(*args, **kwargs)[2]

    def write(self) -> None:
        """Write what was measured so far, and the actions of the last step where the schedule is ours."""
        super().write()
        engine = self._engine
        if not isinstance(engine, PlannedEngine) or engine.quartet_actions is None:
            return
        write_actions(
            self._files,
            actions=engine.quartet_actions,
            recorder=engine.quartet_recorder,
            device=engine.stage_id,
            replica=engine.grid.get_data_parallel_id(),
        )

    def _job(self) -> dict[str, Any] | None:
        if rank_now() != 0:
            return None
        return describe_job(
            self._engine,
            config=self._engine.quartet_config,
            train_iters=_TRAIN_ITERS,
            seq_length=self._seq_length,
            neutralised=self._neutralised,
        )


def _length_of(batch: Any) -> int:
    """The sequence's length in a microbatch of (inputs, labels): the second dimension of the inputs."""
    first = batch[0]
    while isinstance(first, (tuple, list)) and first:
        first = first[0]
    shape = tuple(getattr(first, "shape", ()))
    return int(shape[1]) if len(shape) > 1 else 1
