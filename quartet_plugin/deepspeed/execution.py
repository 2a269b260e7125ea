"""What this rank did, read from DeepSpeed's engine and module as they were built."""

from typing import Any

from quartet_plugin.deepspeed.engine import ProgramRunner
from quartet_plugin.deepspeed.layers import layer_list
from quartet_plugin.deepspeed.module import PlannedModule
from quartet_plugin.model.frameworks import DEEPSPEED
from quartet_plugin.protocol.execution import PROGRAM, BuiltStage, Execution, RanSchedule
from quartet_plugin.space.knobs.knob import LiveJob
from quartet_plugin.space.knobs.registry import knobs_read_back


def execution_of(engine: Any, *, runner: ProgramRunner | None) -> Execution:
    """The record of this rank after a training step; `runner` executes a schedule that is not DeepSpeed's."""
    grid, stages = engine.grid, _stages(engine.module)
    schedule: RanSchedule = "no-pipelining" if engine.num_stages == 1 else "1f1b"
    actions = None if runner is None else runner.executed()
    live = LiveJob(
        degrees={
            "tensor_parallel": grid.model_parallel_size,
            "pipeline_parallel": grid.pipe_parallel_size,
            "data_parallel": grid.data_parallel_size,
            "context_parallel": 1,
            "expert_parallel": 1,
            "virtual_stages": len(stages),
            "micro_batch_size": engine.micro_batch_size,
        },
        optimizer=engine,
    )
    return Execution(
        schedule=schedule if actions is None else PROGRAM,
        position=int(engine.stage_id * grid.data_parallel_size + grid.get_data_parallel_id()),
        pipeline_rank=int(engine.stage_id),
        num_microbatches=int(engine.micro_batches),
        stages=stages,
        knobs=knobs_read_back(live, framework=DEEPSPEED.framework),
        actions=actions,
        ends=None,
        modules=None,
    )


def _stages(module: Any) -> tuple[BuiltStage, ...]:
    """The stages of this device; a stage's own first and last entries stand for the model's ends."""
    blocks = layer_list(module._layer_specs).blocks
    # DeepSpeed's own partition counts in numpy's numbers.
    bounds = [(int(module._local_start), int(module._local_stop))]
    if isinstance(module, PlannedModule):
        bounds = module.built_bounds()
    return tuple(
        BuiltStage(
            first_layer=sum(block < start for block in blocks),
            num_layers=sum(start <= block < stop for block in blocks),
            has_embedding=start == 0,
            has_head=stop == len(module._layer_specs),
        )
        for start, stop in bounds
    )
