"""DeepSpeed's pipeline engine with the stages and the schedule of a plan.

The engine that `deepspeed.initialize` made gets this class. A step is DeepSpeed's own list of instructions,
the passes and transfers of all microbatches replaced by one: `RunProgram`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.pipe import schedule as stock
from deepspeed.runtime.pipe.engine import PipelineEngine

from quartet_plugin.deepspeed import split_backward
from quartet_plugin.deepspeed.choice import Choice
from quartet_plugin.deepspeed.stages import EngineStages
from quartet_plugin.deepspeed.transport import ValueTransport
from quartet_plugin.runtime.executor import Executor
from quartet_plugin.runtime.programs import ProgramCache
from quartet_plugin.runtime.records import CudaClock, HostClock, NullRecorder, Recorder
from quartet_plugin.runtime.transport import Channels
from quartet_plugin.schedule.action import Action, ActionKind
from quartet_plugin.schedule.instruction import Compute, Program
from quartet_plugin.schedule.lowering import GROUP_NAMES


class RunProgram(stock.PipeInstruction):  # type: ignore[misc]
    """Execute the device's part of a lowered schedule."""


class PlannedSchedule(stock.PipeSchedule):  # type: ignore[misc]
    """One step: the program, and behind it what DeepSpeed does at a step's end."""

    def __init__(self, program: Program, *, stages: int, stage_id: int, forward_only: bool) -> None:
        super().__init__(micro_batches=program.num_microbatches, stages=stages, stage_id=stage_id)
        self._program = program
        self._forward_only = forward_only

    def steps(self) -> Iterator[list[Any]]:
        """The instructions, in one step."""
        run = RunProgram(program=self._program, forward_only=self._forward_only)
        if self._forward_only:
            yield [run]
        else:
            yield [run, stock.ReduceTiedGrads(), stock.ReduceGrads(), stock.OptimizerStep()]

    def num_pipe_buffers(self) -> int:
        """A buffer a microbatch, for what is loaded; none is allocated before it is used."""
        return int(self.micro_batches)


class PlannedEngine(PipelineEngine):  # type: ignore[misc]
    """See the module; made by `adopt`."""

    quartet_choice: Choice
    quartet_recorder: Recorder
    quartet_num_microbatches: int
    _quartet_library: ProgramCache | None
    _quartet_stage: int | None
    _quartet_executors: dict[int, Executor]
    _quartet_gradients: split_backward.WeightGradients
    _quartet_transport: ValueTransport | None

    def _train_schedule(self) -> Any:
        if self._quartet_library is None:
            return super()._train_schedule()
        return self._planned(self.micro_batches, forward_only=False)

    def _inference_schedule(self, micro_batches: int) -> Any:
        if self._quartet_library is None:
            return super()._inference_schedule(micro_batches)
        return self._planned(micro_batches, forward_only=True)

    def _planned(self, num_microbatches: int, *, forward_only: bool) -> PlannedSchedule:
        assert self._quartet_library is not None
        program = self._quartet_library.program(num_microbatches, forward_only=forward_only)
        self.quartet_num_microbatches = num_microbatches
        return PlannedSchedule(
            program, stages=self.num_stages, stage_id=self.stage_id, forward_only=forward_only
        )

    def _exec_program(self, program: Program, forward_only: bool) -> None:
        executor, transport = self._executor(program), self._quartet_transport
        assert transport is not None
        stages = EngineStages(self, gradients=self._quartet_gradients, forward_only=forward_only)
        try:
            executor.run(stages, transport, NullRecorder() if forward_only else self.quartet_recorder)
        except BaseException:
            self._quartet_gradients.clear()
            raise
        transport.end()
        stages.end()

    def _executor(self, program: Program) -> Executor:
        key = id(program)
        if key not in self._quartet_executors:
            # The program is kept with it, so that its id stays its own.
            self._quartet_executors[key] = Executor(program, device=self.stage_id)
        return self._quartet_executors[key]

    @property
    def quartet_actions(self) -> list[Action] | None:
        """The device's actions of a training step, in order; None where DeepSpeed's own schedule runs."""
        if self._quartet_library is None:
            return None
        return self._executor(self._quartet_library.program(self.micro_batches)).actions

    def quartet_record(self) -> None:
        """From the next training step on, keep when every action started and ended."""
        self.quartet_recorder = Recorder(CudaClock() if self.device.type == "cuda" else HostClock())

    @contextlib.contextmanager
    def running_stage(self, stage: int) -> Iterator[None]:
        """While a stage's action runs, the engine's questions about first and last are about it."""
        self._quartet_stage = stage
        try:
            with self.module.running(stage):
                yield
        finally:
            self._quartet_stage = None

    def is_first_stage(self) -> bool:
        """Of the running action's stage; else whether this device holds the first stage."""
        running = self._quartet_stage
        return bool(self.stage_id == 0 if running is None else running == 0)

    def is_last_stage(self) -> bool:
        """Of the running action's stage; else whether this device holds the last stage."""
        choice, running = self.quartet_choice, self._quartet_stage
        if running is None:
            return bool(self.stage_id == choice.last_device)
        return running == choice.num_stages - 1

    def _loss_stage_global_rank(self) -> int:
        return int(self.grid.stage_to_global(self.quartet_choice.last_device))

    def reset_activation_shape(self) -> None:
        """Shapes change, as for a curriculum: the transport learns them anew."""
        super().reset_activation_shape()
        if self._quartet_transport is not None:
            self._quartet_transport.forget()


def adopt(engine: Any, choice: Choice) -> None:
    """Make the engine a planned one. Every process calls `adopt` at the same time.

    Raises PlanError for a schedule that is not valid for its number of microbatches.
    """
    library = None if choice.recipe is None else ProgramCache(choice.recipe)
    engine.quartet_choice = choice
    engine.quartet_recorder = NullRecorder()
    engine.quartet_num_microbatches = engine.micro_batches
    engine._quartet_library = library
    engine._quartet_stage = None
    engine._quartet_executors = {}
    engine._quartet_gradients = split_backward.WeightGradients()
    engine._quartet_transport = None
    if library is not None:
        program = library.program(engine.micro_batches)
        if _splits(program):
            split_backward.install(engine.module, engine._quartet_gradients)
        ranks = [engine.grid.stage_to_global(device) for device in range(choice.num_devices)]
        channels = Channels.open(GROUP_NAMES, ranks=ranks)
        engine._quartet_transport = ValueTransport(
            channels, device=engine.device, is_dynamic=bool(engine.module.dynamic_shape)
        )
    engine._INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, RunProgram: PlannedEngine._exec_program}
    engine.__class__ = PlannedEngine


def _splits(program: Program) -> bool:
    return any(
        isinstance(instruction, Compute) and instruction.action.kind is ActionKind.I
        for row in program.instructions
        for instruction in row
    )
