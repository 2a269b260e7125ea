"""Starts the reduction of gradients as early as a schedule allows, by DDP's bucket groups.

DDP reduces the gradients of a bucket group together. Megatron starts that when every parameter of the group
has its gradient of the step's last microbatch, and expects the calls of the first step for ever. Under a
custom schedule a weight's sum of gradients is complete after the last W, a bias's after the last I, and the
number of microbatches may change. So the calls of DDP's hook are counted by parameter over a whole step. The
first step with a number of microbatches starts the groups of a chunk after the chunk's last microbatch, and
shows how many calls each parameter gets and in which order groups are complete. Later steps start the groups
in that order, each as soon as it is complete: one order, because the ranks that reduce together must agree.
Large groups are reduced in parts (`bucket_parts`), each of which counts as a group here.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from quartet_plugin.megatron.runtime.bucket_parts import parts_of
from quartet_plugin.megatron.seams import Seam, Wrapper
from quartet_plugin.megatron.seams.declared import GRADIENT_HOOK


@dataclass(frozen=True, slots=True)
class WholeStep:
    """The calls of each parameter's hook in a step, and its bucket groups by their last call."""

    calls: dict[Any, int]
    order: list[Any]


class GradReductions:
    """The reductions of one process: DDP's hooks report to the step that runs."""

    def __init__(self) -> None:
        # By chunk; made when first asked for, as DDP makes its groups once.
        self._parts: dict[Any, list[Any]] = {}
        # By number of microbatches.
        self._first_steps: dict[int, WholeStep] = {}
        self._running: GradReduction | None = None

    def wrappers(self) -> dict[Seam, Wrapper]:
        """The report; it must be installed before DDP is built."""
        return {GRADIENT_HOOK: self._with_report}

    def begin(self, chunks: Sequence[Any], *, num_microbatches: int, is_overlapped: bool) -> "GradReduction":
        """Begin a step; `is_overlapped`: reduce in the background while other gradients are computed."""
        groups = [self._groups_of(chunk) if is_overlapped else [] for chunk in chunks]
        step = GradReduction(
            groups, num_microbatches=num_microbatches, first_step=self._first_steps.get(num_microbatches)
        )
        self._running = step if is_overlapped else None
        return step

    def end(self) -> None:
        """End a step that is complete."""
        if self._running is not None:
            self._first_steps.setdefault(self._running.num_microbatches, self._running.whole())
        self._running = None

    def abort(self) -> None:
        """Forget a step that was interrupted."""
        self._running = None
        self._parts.clear()
        self._first_steps.clear()  # their order has the parts

    def _groups_of(self, chunk: Any) -> list[Any]:
        if chunk not in self._parts:
            groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
            self._parts[chunk] = [part for group in groups for part in parts_of(group)]
        return self._parts[chunk]

    def _with_report(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def make_backward_post_hook(ddp: Any, parameter: Any) -> Callable[..., None]:
            hook = original(ddp, parameter)

            def with_report(*unused: Any) -> None:
                hook(*unused)
                if self._running is not None:
                    self._running.ready(parameter)

            return with_report

        return make_backward_post_hook


class GradReduction:
    """Starts the reductions of one step.

    The step runs under DDP's `no_sync`, so that DDP does not count by itself.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Any]],
        *,
        num_microbatches: int,
        first_step: WholeStep | None = None,
    ) -> None:
        """`groups` are the bucket groups of every chunk; `first_step` is None in the first step itself."""
        self.num_microbatches = num_microbatches
        self._groups = groups
        self._group_of = {p: group for chunk in groups for group in chunk for p in group.params}
        self._microbatches_left = [num_microbatches] * len(groups)
        self._calls: dict[Any, int] = {}
        # Its keys are in the order of the groups' last calls.
        self._by_last_call: dict[Any, None] = {}
        self._started: set[Any] = set()
        self._complete: set[Any] = set()
        self._expected_calls: dict[Any, int] = {} if first_step is None else first_step.calls
        # The next one is at the end; None in the first step.
        self._to_start = None if first_step is None else first_step.order[::-1]
        self._parameters_left = Counter(self._group_of[parameter] for parameter in self._expected_calls)

    @property
    def is_overlapped(self) -> bool:
        """Whether gradients are reduced while others are computed."""
        return any(self._groups)

    def ready(self, parameter: Any) -> None:
        """A microbatch's gradient of a parameter has been added to the sum; others' parameters do not count.

        Raises RuntimeError if the reduction of the sum has been started.
        """
        group = self._group_of.get(parameter)
        if group is None:
            return
        calls = self._calls[parameter] = self._calls.get(parameter, 0) + 1
        if group in self._started:
            raise RuntimeError(
                f"gradient {calls} of a parameter of shape {tuple(parameter.shape)} came after the start of "
                f"its reduction, which had waited for {self._expected_calls.get(parameter, calls - 1)}: the "
                "number differs between steps; train without --overlap-grad-reduce"
            )
        self._by_last_call.pop(group, None)
        self._by_last_call[group] = None
        if calls == self._expected_calls.get(parameter):
            self._parameters_left[group] -= 1
            if not self._parameters_left[group]:
                self._completed(group)

    def microbatch_done(self, chunk: int) -> None:
        """One microbatch's gradients of a chunk are complete."""
        self._microbatches_left[chunk] -= 1
        if not self._microbatches_left[chunk]:
            for group in self._groups[chunk]:
                self._by_last_call.setdefault(group)
                self._completed(group)

    def whole(self) -> WholeStep:
        """The record of the step at its end."""
        return WholeStep(self._calls, list(self._by_last_call))

    def _completed(self, group: Any) -> None:
        self._complete.add(group)
        if self._to_start is None:
            self._start(group)
            return
        while self._to_start and self._to_start[-1] in self._complete:
            self._start(self._to_start.pop())

    def _start(self, group: Any) -> None:
        self._started.add(group)
        group.start_grad_sync()
