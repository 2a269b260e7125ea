"""The forward_backward_func that Megatron calls: a step or an evaluation, run by the executor.

Everything a stock schedule does for its callers around the actions is done here in the same order: timers,
gradient synchronisation, finishing the gradients, graphs and offloading resets. Re-entrant: a call leaves no
state behind but its instructions, its process groups and its records.
"""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.placement.state import StagePlacement
from quartet_plugin.megatron.runtime.groups import default_groups
from quartet_plugin.megatron.runtime.layer_order import check_layer_order
from quartet_plugin.megatron.runtime.param_gather import ParamGather
from quartet_plugin.megatron.runtime.reduction import GradReductions
from quartet_plugin.megatron.runtime.stages import Call, MegatronStages, MicrobatchIterator
from quartet_plugin.megatron.split_backward import WeightGradients
from quartet_plugin.megatron.te_layers import DelayedLayer, delayed_layers
from quartet_plugin.protocol.execution import ExecutedActions
from quartet_plugin.runtime.activation_tracker import ActivationTracker, activation_tracker
from quartet_plugin.runtime.clock_offset import clock_offset_of_group
from quartet_plugin.runtime.executed import executed_actions
from quartet_plugin.runtime.executor import Executor
from quartet_plugin.runtime.executor_cache import executor_cache
from quartet_plugin.runtime.process_groups import Channels, agree_on_program
from quartet_plugin.runtime.programs import ProgramCache
from quartet_plugin.runtime.records import CudaClock, HostClock, NullRecorder, Recorder
from quartet_plugin.runtime.transport import Boundary, HostTransport, PairTransport
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.space.runtime_refusals import refusal_of_model


class Runtime:
    """One process's schedule runtime."""

    def __init__(
        self,
        programs: ProgramCache,
        *,
        placement: StagePlacement,
        gradients: WeightGradients,
        reductions: GradReductions,
        host_transport: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        """`host_transport`: boundary tensors go through host memory and gloo; `timeout` is of a transfer."""
        self._placement = placement
        self._gradients = gradients
        self._reductions = reductions
        self.recorder: Recorder = NullRecorder()
        # It counts the next training step alone.
        self.tracker: ActivationTracker | None = None
        self._is_counted = False
        self._delayed: list[list[DelayedLayer]] | None = None
        self._host_transport = host_transport
        self._timeout = timeout
        self._executor = executor_cache(programs, device=parallel_state.get_pipeline_model_parallel_rank)
        self._agreed: WeakSet[Executor] = WeakSet()
        self._channels: Channels | None = None
        self._transports: dict[Boundary, PairTransport] = {}

    def measure(self, *, on_cpu: bool) -> None:
        """Record the actions of training steps from now on, and count the activations of the next one."""
        self.recorder = Recorder(HostClock() if on_cpu else CudaClock())
        self.tracker = activation_tracker(on_cpu=on_cpu)

    def executed(self, num_microbatches: int) -> ExecutedActions | None:
        """The actions of this device in training steps of `num_microbatches`; None if there were none."""
        return executed_actions(self.executor(num_microbatches), self._gradients)

    def executor(self, num_microbatches: int, *, forward_only: bool = False) -> Executor:
        """The executor of this device's program for `num_microbatches`."""
        return self._executor(num_microbatches, forward_only)

    def forward_backward(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Any = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Megatron's contract: the losses on the device of the last stage, nothing elsewhere.

        Raises PlanError for what the runtime does not take: other process groups, adjusted shapes, and a
        feature that no flag has turned on but the script's own configuration.
        """
        for name, value in (
            ("adjust_tensor_shapes_fn", adjust_tensor_shapes_fn),
            ("p2p_communicator", p2p_communicator),
            ("pg_collection", pg_collection),
        ):
            if value is not None:
                raise PlanError(f"{name}: the plan's schedule runs only with Megatron's own; omit it")
        chunks = list(model) if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        reason = refusal_of_model(config)
        if reason is not None:
            raise PlanError(
                f"{reason}; the script's configuration turns it on: train with one of Megatron's schedules"
            )
        groups = default_groups()
        executor = self.executor(num_microbatches, forward_only=forward_only)
        call = Call(
            forward_step_func=forward_step_func,
            chunks=chunks,
            iterators=self._iterators(data_iterator, executor, len(chunks)),
            config=config,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            cp_size=groups.cp.size(),
        )
        shape = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )[0]
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        device = next(chunks[0].parameters()).device
        boundary = Boundary(shape=tuple(shape), dtype=config.pipeline_dtype, device=device)
        stages = self._run(executor, call, boundary, force_all_reduce=force_all_reduce)
        if config.finalize_model_grads_func is not None and not forward_only:
            config.finalize_model_grads_func(
                chunks,
                stages.num_tokens if config.calculate_per_token_loss else None,
                pg_collection=groups,
                force_all_reduce=force_all_reduce,
            )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return stages.losses

    def _run(
        self, executor: Executor, call: Call, boundary: Boundary, *, force_all_reduce: bool | None
    ) -> MegatronStages:
        config, training = call.config, not call.forward_only
        if self._delayed is None:
            self._delayed = [delayed_layers(chunk) for chunk in call.chunks]
        reduction = self._reductions.begin(
            call.chunks,
            num_microbatches=call.num_microbatches,
            # The door for an all-reduce instead of a reduce-scatter is at the end of the step alone.
            is_overlapped=training and config.no_sync_func is not None and not force_all_reduce,
        )
        stages = MegatronStages(
            call,
            placement=self._placement,
            device=executor.device,
            gradients=self._gradients,
            reduction=reduction,
            delayed=self._delayed,
            gather=ParamGather(call.chunks, _listed(config.param_sync_func)) if training else None,
            tracker=self._next_tracker(call.chunks) if training else None,
        )
        recorder = self.recorder if training else NullRecorder()
        with contextlib.ExitStack() as stack:
            for no_sync in _listed(config.no_sync_func):
                stack.enter_context(no_sync())
            try:
                executor.run(stages, self._transport(boundary, executor, call.chunks), recorder)
            except BaseException:
                self._gradients.clear()
                self._reductions.abort()
                raise
        self._reductions.end()
        return stages

    def _next_tracker(self, chunks: Sequence[Any]) -> ActivationTracker | None:
        if self.tracker is None or self._is_counted:
            return None
        self._is_counted = True
        self.tracker.begin(parameter for chunk in chunks for parameter in chunk.parameters())
        return self.tracker

    def _iterators(self, data_iterator: Any, executor: Executor, num_chunks: int) -> Sequence[Any]:
        """An iterator for every chunk, by microbatch where the forwards are not in ascending order."""
        iterators = list(data_iterator) if isinstance(data_iterator, list) else [data_iterator]
        if len(iterators) != num_chunks:
            raise PlanError(f"data_iterator: {len(iterators)} iterators for {num_chunks} chunks; one each")
        for chunk, stage in enumerate(self._placement.stages(executor.device)):
            order = [a.microbatch for a in executor.actions if a.stage == stage and a.kind is ActionKind.F]
            if order != sorted(order) and iterators[chunk] is not None:
                iterators[chunk] = MicrobatchIterator(iterators[chunk])
        return iterators

    def _transport(self, boundary: Boundary, executor: Executor, chunks: Sequence[Any]) -> PairTransport:
        group = parallel_state.get_pipeline_model_parallel_group()
        wire = torch.device("cpu") if self._host_transport else boundary.device
        if executor not in self._agreed:
            agree_on_program(executor.program, group=group, device=wire)
            self._agreed.add(executor)
        if self._channels is None:
            check_layer_order(chunks, self._placement, group=group, device=wire)
            self._channels = Channels.open(
                executor.program.placement,
                ranks=torch.distributed.get_process_group_ranks(group),
                device=wire,
                backend="gloo" if self._host_transport else None,
                timeout=self._timeout,
            )
            if self.tracker is not None:
                self.recorder.clock_offset_s = clock_offset_of_group()
        if boundary not in self._transports:
            kind = HostTransport if self._host_transport else PairTransport
            self._transports[boundary] = kind(self._channels, boundary)
        return self._transports[boundary]


def _listed(functions: Any) -> list[Callable[..., Any]]:
    """Megatron's functions of all chunks: a list, a single one, or None for no function."""
    if functions is None:
        return []
    return list(functions) if isinstance(functions, list) else [functions]
