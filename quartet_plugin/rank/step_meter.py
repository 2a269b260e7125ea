"""Measures training steps from outside and ends a trial after its last iteration.

Nothing is added to an iteration that waits for the device: losses stay tensors until the file is written.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

from quartet_plugin.model.packed_lengths import PackedTokens
from quartet_plugin.model.schema import as_number, record
from quartet_plugin.protocol.execution import Execution
from quartet_plugin.protocol.measured_window import EarlyEndReason
from quartet_plugin.protocol.rank_files import Iteration
from quartet_plugin.rank.core_limit import core_limit
from quartet_plugin.rank.device import device_memory, device_name, peak_memory_bytes, warm_device
from quartet_plugin.rank.files import RankFileWriter
from quartet_plugin.rank.first_step import FirstStepProgress
from quartet_plugin.rank.network_namespace import network_namespace
from quartet_plugin.rank.product_time import product_times
from quartet_plugin.rank.session import exit_now

_STOP_KEY = "quartet/stop-after"
# Iterations between the one after which RANK 0 decides and the last.
_NOTICE = 2


@record
class StepResult:
    """The results of one training step; `loss` is None on ranks that have none.

    `packed` is the number of microbatches of packed sequences with a tensor of their tokens and squared
    lengths; None where there were none.
    """

    loss: Any
    skipped: bool
    grad_norm: Any
    packed: tuple[int, Any] | None = None


class StepMeter(ABC):
    """Wraps a training step: times each call and keeps its result, for one rank of a trial."""

    def __init__(self, files: RankFileWriter, *, neutralised: list[str], started_at: float) -> None:
        """`started_at` is the wall clock when the script itself began to run."""
        self._files = files
        self._neutralised = neutralised
        self._started_at = started_at
        self._first_step_at = 0.0
        self._last_end = 0.0
        self._steps: list[tuple[float, StepResult]] = []
        self._stop_after = files.spec.num_iterations
        self._ended_early: EarlyEndReason | None = None
        self._has_all_ended = False
        files.first_step = FirstStepProgress(lambda: 0)

    @property
    def num_steps(self) -> int:
        """Training steps done so far."""
        return len(self._steps)

    def wrap(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """`train_step`, measured; the call that completes the trial does not return."""

        def measured_train_step(*args: Any, **kwargs: Any) -> Any:
            if not self._steps:
                self.begin()
            results = train_step(*args, **kwargs)
            self.count(self._result_of(results))
            return results

        return measured_train_step

    def begin(self) -> None:
        """Start the clock, before the first training step."""
        warm_device(self._files.spec.device_warmup_s or 0.0)
        self._first_step_at = time.time()
        self._files.move("warmup" if self._files.spec.warmup else "measure", 0)
        self._last_end = time.perf_counter()

    def count(self, result: StepResult) -> None:
        """Take over a step that has just ended; does not return from the one that completes the trial."""
        self._after_step(result)
        if len(self._steps) >= self._stop_after:
            self._finish()

    def write(self) -> None:
        """Write the iterations measured so far."""
        iterations = (
            Iteration(
                iteration=index,
                iteration_s=seconds,
                loss=None if step.loss is None else as_number(float(step.loss)),
                grad_norm=None if step.grad_norm is None else as_number(float(step.grad_norm)),
                skipped=step.skipped,
                packed=_packed_tokens(step.packed),
            )
            for index, (seconds, step) in enumerate(self._steps, start=1)
        )
        device = device_name()
        # Both before the products, whose memory is not the training's.
        peak_bytes, memory = peak_memory_bytes(), device_memory()
        product_s = product_times() if self._has_all_ended else None
        self._files.write_report(
            device=device,
            cores=tuple(sorted(os.sched_getaffinity(0))) if device == "cpu" else None,
            core_limit=core_limit() if device == "cpu" else None,
            # A script may have entered it itself, before the framework began.
            network_namespace=network_namespace() if device == "cpu" else None,
            phases_s={
                "import": max(0.0, self._started_at - self._files.process_start),
                "init": max(0.0, self._first_step_at - self._started_at),
                "first_step": self._steps[0][0] if self._steps else 0.0,
            },
            iterations=iterations,
            peak_memory_bytes=peak_bytes,
            memory=memory,
            job=self._job() if self._files.rank == 0 else None,
            execution=self._execution(),
            ended_early=self._ended_early,
            product_s=product_s,
        )

    def _after_step(self, result: StepResult) -> None:
        end = time.perf_counter()
        self._steps.append((end - self._last_end, result))
        self._last_end = end
        done = len(self._steps)
        self._files.move("warmup" if done < self._files.spec.warmup else "measure", done)
        self._agree_on_stop(done)

    def _agree_on_stop(self, done: int) -> None:
        """Let all ranks stop after the same step: enough is measured, or there is a STOP file of the tuner.

        RANK 0 decides after step i and announces step i + 2 through the store. The reductions inside a
        step keep every rank from ending step i + 2 before RANK 0 has ended step i + 1, so all have read it.
        For the same reason RANK 0's times of steps are the job's.
        """
        store = _default_store()
        if store is None:
            if self._is_enough(num_later=0):
                self._stop_after = done
        elif self._files.rank == 0:
            if self._stop_after > done + _NOTICE and self._is_enough(num_later=_NOTICE):
                self._stop_after = done + _NOTICE
                store.set(_STOP_KEY, str(self._stop_after))
        elif store.check([_STOP_KEY]):
            self._stop_after = min(self._stop_after, int(store.get(_STOP_KEY)))

    def _is_enough(self, *, num_later: int) -> bool:
        """Whether `num_later` more steps are enough; why is kept."""
        if self._files.is_stop_asked:
            return True
        reason = self._files.spec.why_enough([seconds for seconds, _ in self._steps], num_later=num_later)
        if reason == "complete":
            return True
        self._ended_early = reason
        return reason is not None

    def _finish(self) -> NoReturn:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()
        self._has_all_ended = True
        self.write()
        self._files.move("done", len(self._steps))
        self._files.close()
        exit_now(0)

    @abstractmethod
    def _result_of(self, results: Any) -> StepResult:
        """The result in what the wrapped training step returned."""

    @abstractmethod
    def _job(self) -> dict[str, Any]:
        """The job that the framework built from the command; only RANK 0 calls this."""

    @abstractmethod
    def _execution(self) -> Execution | None:
        """The record of this rank's steps so far; None if the framework does not provide it."""


def _packed_tokens(packed: tuple[int, Any] | None) -> PackedTokens | None:
    if packed is None:
        return None
    num_tokens, squared_lengths = map(float, packed[1].tolist())
    return PackedTokens(num_microbatches=packed[0], num_tokens=num_tokens, squared_lengths=squared_lengths)


def _default_store() -> Any:
    """The store of the default process group; None where there is only this process."""
    from torch.distributed import distributed_c10d

    if not distributed_c10d.is_initialized() or distributed_c10d.get_world_size() == 1:
        return None
    return distributed_c10d._get_default_store()
