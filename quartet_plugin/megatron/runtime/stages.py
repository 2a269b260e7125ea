"""One device's Megatron chunks as the executor's compute: Megatron's own forward_step and backward_step."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from quartet_plugin.megatron.placement.state import StagePlacement
from quartet_plugin.megatron.runtime.param_gather import ParamGather
from quartet_plugin.megatron.runtime.reduction import GradReduction
from quartet_plugin.megatron.split_backward import WeightGradients
from quartet_plugin.megatron.te_layers import DelayedLayer
from quartet_plugin.runtime.activation_tracker import ActivationTracker


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of Megatron's forward_backward_func, for this device; lists are by chunk."""

    forward_step_func: Any
    chunks: Sequence[Any]
    iterators: Sequence[Any]
    config: Any
    num_microbatches: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    cp_size: int


class MegatronStages:
    """Runs the actions of one step. Made anew for every call: nothing outlives it."""

    def __init__(
        self,
        call: Call,
        *,
        placement: StagePlacement,
        device: int,
        gradients: WeightGradients,
        reduction: GradReduction,
        delayed: Sequence[Sequence[DelayedLayer]],
        gather: ParamGather | None = None,
        tracker: ActivationTracker | None = None,
    ) -> None:
        """`device` is this process's pipeline rank; `tracker` counts what this step keeps alive.

        `delayed` are each chunk's layers that keep gradients in stores; `gather` is None in an evaluation.
        """
        self._call = call
        self._placement = placement
        self._chunk_of = {stage: chunk for chunk, stage in enumerate(placement.stages(device))}
        self._last_stage = placement.num_stages - 1
        self._gradients = gradients
        self._reduction = reduction
        self._gather = gather
        self._tracker = tracker
        self._delayed = delayed
        self._held: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._begun: set[int] = set()
        self._backwards_left = [call.num_microbatches] * len(call.chunks)
        self.losses: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device="cuda")

    def forward(self, stage: int, microbatch: int, received: Any) -> Any:
        """F, with Megatron's forward_step."""
        call, chunk = self._call, self._chunk_of[stage]
        value = None if received is None else received.detach()
        if value is not None and not call.forward_only:
            value.requires_grad_()
        iterator = call.iterators[chunk]
        if isinstance(iterator, MicrobatchIterator):
            iterator.choose(microbatch)
        is_first = chunk not in self._begun
        self._begun.add(chunk)
        if is_first and self._gather is not None:
            self._gather.before_forward(chunk)
        saving = nullcontext() if self._tracker is None else self._tracker.saving()
        with self._placement.running_stage(stage), saving:
            output, num_tokens = schedules.forward_step(
                call.forward_step_func,
                iterator,
                call.chunks[chunk],
                call.num_microbatches,
                value,
                self.losses,
                call.config,
                cp_group_size=call.cp_size,
                collect_non_loss_data=call.collect_non_loss_data,
                is_first_microbatch=schedules.check_first_val_step(
                    call.first_val_step, call.forward_only, is_first
                ),
                current_microbatch=microbatch,
                vp_stage=chunk if len(call.chunks) > 1 else None,
                is_last_stage=stage == self._last_stage,
            )
        self.num_tokens += num_tokens
        if not call.forward_only:
            self._held[stage, microbatch] = (value, output)
        if stage == self._last_stage:
            return self._ended(None)
        handed = output.detach()
        self._note(value, handed)
        if not call.forward_only:
            # The view keeps the storage until it has left; autograd only needs the node behind the output.
            schedules.deallocate_output_tensor(output, call.config.deallocate_pipeline_outputs)
        return self._ended(handed)

    def backward(self, stage: int, microbatch: int, received: Any) -> Any:
        """B, with Megatron's backward_step."""
        result = self._backward_step(stage, microbatch, received)
        for layer in self._delayed[self._chunk_of[stage]]:
            layer.accumulate()
        self._order_weight_grads(stage)
        self._reduction.microbatch_done(self._chunk_of[stage])
        return self._ended(result)

    def input_grad(self, stage: int, microbatch: int, received: Any) -> Any:
        """I: the same while the layers leave out their weights' gradients."""
        self._gradients.begin()
        result = self._backward_step(stage, microbatch, received)
        self._gradients.end(stage, microbatch, self._delayed[self._chunk_of[stage]])
        if self._tracker is not None:
            self._tracker.hold(self._gradients.held(stage, microbatch))
        self._order_weight_grads(stage)
        return self._ended(result)

    def weight_grad(self, stage: int, microbatch: int) -> None:
        """W: what the layers left out."""
        self._gradients.run(stage, microbatch)
        self._reduction.microbatch_done(self._chunk_of[stage])
        self._ended(None)

    def _order_weight_grads(self, stage: int) -> None:
        """After a chunk's last backward let what is left of its weight gradients go layer by layer.

        The first layers' gradients are then reduced while the others are computed.
        """
        chunk = self._chunk_of[stage]
        self._backwards_left[chunk] -= 1
        if not self._backwards_left[chunk] and self._reduction.is_overlapped:
            self._gradients.order_by_layer(stage)

    def _backward_step(self, stage: int, microbatch: int, received: Any) -> Any:
        value, output = self._held.pop((stage, microbatch))
        self._note(received)
        with self._placement.running_stage(stage):
            result = schedules.backward_step(value, output, received, self._call.config)
        self._note(result)
        return result

    def _ended(self, result: Any) -> Any:
        if self._tracker is not None:
            self._tracker.end_action()
        return result

    def _note(self, *boundaries: Any) -> None:
        if self._tracker is not None:
            self._tracker.hold(boundaries)


class MicrobatchIterator:
    """Yields the sample of a chosen microbatch, out of an iterator that yields them in ascending order.

    Needed only where a stage's forwards do not run in ascending order. Samples drawn before their turn are
    kept until their microbatch is chosen.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        """`source` yields the microbatches in ascending order, one sample each."""
        self._source = source
        self._drawn: dict[int, Any] = {}
        self._num_drawn = 0
        self._chosen = 0

    def choose(self, microbatch: int) -> None:
        """Let the next sample be this microbatch's."""
        self._chosen = microbatch

    def __iter__(self) -> "MicrobatchIterator":
        return self

    def __next__(self) -> Any:
        while self._num_drawn <= self._chosen:
            self._drawn[self._num_drawn] = next(self._source)
            self._num_drawn += 1
        return self._drawn.pop(self._chosen)
