"""DeepSpeed's pipeline engine with the stages and the schedule of a plan.

The engine that `deepspeed.initialize` made gets the class `PlannedEngine`. A step is DeepSpeed's list of
instructions, in which a single `RunProgram` replaces the passes and transfers of all microbatches.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from deepspeed.runtime.pipe import schedule as stock
from deepspeed.runtime.pipe.engine import PipelineEngine

from quartet_plugin.deepspeed.pipeline import PipelineSpec
from quartet_plugin.deepspeed.stages import EngineStages, WeightGradients, defer_weight_gradients
from quartet_plugin.deepspeed.transport import ValueTransport
from quartet_plugin.protocol.execution import ExecutedActions
from quartet_plugin.runtime.clock_offset import clock_offset_of_group
from quartet_plugin.runtime.executed import executed_actions
from quartet_plugin.runtime.executor import Executor
from quartet_plugin.runtime.executor_cache import executor_cache
from quartet_plugin.runtime.process_groups import Channels, agree_on_program
from quartet_plugin.runtime.programs import ProgramCache, ScheduleSpec, splits_backward
from quartet_plugin.runtime.records import CudaClock, HostClock, NullRecorder, Recorder
from quartet_plugin.schedule.action import Action
from quartet_plugin.schedule.channels import check_for_every_backend
from quartet_plugin.schedule.conditions import Condition
from quartet_plugin.schedule.instruction import Program


class RunProgram(stock.PipeInstruction):  # type: ignore[misc]
    """Execute the device's part of a lowered schedule."""


class PlannedSchedule(stock.PipeSchedule):  # type: ignore[misc]
    """One step: the program, and behind it the instructions with which DeepSpeed ends a training step."""

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
        """A buffer a microbatch, for loaded batches; none is allocated before it is used."""
        return int(self.micro_batches)


class ProgramRunner:
    """Executes a plan's schedule for one engine; `recorder` keeps the times of a training step's actions."""

    def __init__(self, engine: Any, schedule: ScheduleSpec, *, num_devices: int) -> None:
        """Every process makes its runner at the same time.

        Raises PlanError for a schedule that is not valid, or could deadlock while values are described, with
        the engine's number of microbatches.
        """
        self.recorder: Recorder = NullRecorder()
        self._engine = engine
        programs = ProgramCache(schedule)
        check_for_every_backend(programs.program(engine.micro_batches), conditions=(Condition.DESCRIBED,))
        self._executor = executor_cache(programs, device=lambda: engine.stage_id)
        self._agreed: WeakSet[Executor] = WeakSet()
        self._gradients = WeightGradients()
        if splits_backward(schedule, engine.micro_batches):
            defer_weight_gradients(engine.module, self._gradients)
        ranks = [engine.grid.stage_to_global(device) for device in range(num_devices)]
        self.transport = ValueTransport(
            Channels.open(schedule.placement, ranks=ranks, device=engine.device, has_host_group=True),
            device=engine.device,
            is_dynamic=bool(engine.module.dynamic_shape),
        )

    def schedule(self, num_microbatches: int, *, forward_only: bool) -> PlannedSchedule:
        """The engine's schedule of a training step, or with `forward_only` of an evaluation."""
        program = self._executor(num_microbatches, forward_only).program
        engine = self._engine
        return PlannedSchedule(
            program, stages=engine.num_stages, stage_id=engine.stage_id, forward_only=forward_only
        )

    def run(self, program: Program, *, forward_only: bool) -> None:
        """Run the device's part of a program."""
        stages = EngineStages(
            self._engine,
            gradients=self._gradients,
            num_microbatches=program.num_microbatches,
            forward_only=forward_only,
        )
        executor = self._executor(program.num_microbatches, forward_only)
        if executor not in self._agreed:
            group, device = self._engine.grid.get_pipe_parallel_group(), self._engine.device
            agree_on_program(executor.program, group=group, device=device)
            self._agreed.add(executor)
        try:
            recorder = NullRecorder() if forward_only else self.recorder
            executor.run(stages, self.transport, recorder)
        except BaseException:
            self._gradients.clear()
            raise
        stages.end()

    def record(self) -> None:
        """Keep when every action starts and ends, from the next training step on."""
        self.recorder = Recorder(CudaClock() if self._engine.device.type == "cuda" else HostClock())
        self.recorder.clock_offset_s = clock_offset_of_group()

    def executed(self) -> ExecutedActions | None:
        """What this device has executed in training steps; None where nothing ran."""
        return executed_actions(self._executor(self._engine.micro_batches, False), self._gradients)

    def actions(self) -> list[Action]:
        """The device's actions of a training step, in order."""
        return self._executor(self._engine.micro_batches, False).actions


class PlannedEngine(PipelineEngine):  # type: ignore[misc]
    """An engine with the stages and the schedule of a plan."""

    quartet_pipeline: PipelineSpec
    quartet_runner: ProgramRunner
    # The stage of the running action.
    _quartet_stage: int | None

    def _train_schedule(self) -> Any:
        return self.quartet_runner.schedule(self.micro_batches, forward_only=False)

    def _inference_schedule(self, micro_batches: int) -> Any:
        return self.quartet_runner.schedule(micro_batches, forward_only=True)

    def _exec_program(self, program: Program, forward_only: bool) -> None:
        self.quartet_runner.run(program, forward_only=forward_only)

    @contextlib.contextmanager
    def running_stage(self, stage: int) -> Iterator[None]:
        """Let `is_first_stage` and `is_last_stage` answer for `stage` while an action of it runs."""
        self._quartet_stage = stage
        try:
            with self.module.running(stage):
                yield
        finally:
            self._quartet_stage = None

    def is_first_stage(self) -> bool:
        """Whether the running action's stage is the first; between actions, whether this device holds it."""
        running = self._quartet_stage
        return bool(self.stage_id == 0 if running is None else running == 0)

    def is_last_stage(self) -> bool:
        """Whether the running action's stage is the last; between actions, whether this device holds it."""
        pipeline, running = self.quartet_pipeline, self._quartet_stage
        if running is None:
            return bool(self.stage_id == pipeline.last_device)
        return running == pipeline.num_stages - 1

    def _loss_stage_global_rank(self) -> int:
        return int(self.grid.stage_to_global(self.quartet_pipeline.last_device))

    def reset_activation_shape(self) -> None:
        """Shapes change, as for a curriculum: the transport learns them anew."""
        super().reset_activation_shape()
        self.quartet_runner.transport.forget()


def make_planned_engine(engine: Any, pipeline: PipelineSpec) -> None:
    """Give an engine the plan's schedule where it is not DeepSpeed's.

    Every process calls this at the same time. Raises PlanError for a schedule that is not valid for
    the engine's number of microbatches.
    """
    if pipeline.schedule is None:
        return
    engine.quartet_runner = ProgramRunner(engine, pipeline.schedule, num_devices=pipeline.num_devices)
    engine.quartet_pipeline = pipeline
    engine._quartet_stage = None
    engine._INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, RunProgram: PlannedEngine._exec_program}
    engine.__class__ = PlannedEngine
