"""Measures the Bridge's training by its callbacks, and describes the job from its configuration."""

from argparse import Namespace
from typing import Any

from quartet_plugin.bridge.fields import (
    NO_TENSOR_PARTITION,
    arguments_of,
    has_argument,
    known_arguments,
    vocabulary_of,
)
from quartet_plugin.megatron.measure import lm_loss
from quartet_plugin.megatron.packed_batches import PackedBatches
from quartet_plugin.protocol.execution import Execution
from quartet_plugin.rank.files import RankFileWriter
from quartet_plugin.rank.module_census import ModuleCensus
from quartet_plugin.rank.step_meter import StepMeter, StepResult
from quartet_plugin.space.knobs.registry import SETTINGS

NO_CUSTOM_SCHEDULES = "Megatron-Bridge has a training loop of its own"


class BridgeMeter(StepMeter):
    """The meter of one rank; `callback` is what the Bridge calls."""

    def __init__(self, files: RankFileWriter, *, started_at: float) -> None:
        super().__init__(files, neutralised=[], started_at=started_at)
        self._modules = ModuleCensus()
        self._packed = PackedBatches()
        self._context: Any = None
        self._as_written = Namespace()

    def left_out(self, names: list[str], *, as_written: Namespace) -> None:
        """Name the fields that the trial changed in the configuration, `as_written` before that."""
        self._neutralised, self._as_written = names, as_written

    def callback(self) -> Any:
        """A callback of the Bridge that measures every training step."""
        from megatron.bridge.training.callbacks import Callback

        meter = self

        class Measure(Callback):  # type: ignore[misc]
            """Hands the Bridge's events to the meter."""

            def on_train_step_start(self, context: Any) -> None:
                """Begin the first step's clock."""
                meter.step_begins(context)

            def on_train_step_end(self, context: Any) -> None:
                """Take over a step's result."""
                meter.step_ends(context)

        return Measure()

    def step_begins(self, context: Any) -> None:
        """Begin the measurement before the first training step; `context` has the model."""
        if not self.num_steps:
            self._packed.begin(getattr(context, "model", None))
            self.begin()
            self._modules.__enter__()

    def step_ends(self, context: Any) -> None:
        """Count a training step that has ended; the one that completes the trial ends the process."""
        if not self.num_steps:
            self._modules.__exit__(None, None, None)
        self._context = context
        self.count(self._result_of(context))

    def _result_of(self, results: Any) -> StepResult:
        return StepResult(
            loss=lm_loss(results.loss_dict),
            skipped=bool(results.skipped_iter),
            grad_norm=results.grad_norm,
            packed=self._packed.take(),
        )

    def _job(self) -> dict[str, Any]:
        from quartet_plugin.megatron.describe import describe_job

        config = self._context.state.cfg
        args = arguments_of(config)
        args.padded_vocab_size = vocabulary_of(config)
        args.world_size = _world_size()
        job = describe_job(
            args,
            as_written=self._as_written,
            neutralised=self._neutralised,
            no_custom_schedules=NO_CUSTOM_SCHEDULES,
            known_flags=known_arguments(config),
        )
        job["no_tensor_partition"] = job.get("no_tensor_partition") or NO_TENSOR_PARTITION
        missing = {knob.name for knob in SETTINGS if not has_argument(config, knob.destination)}
        job["settings"] = [setting for setting in job["settings"] if setting["name"] not in missing]
        if getattr(config, "peft", None) is not None:
            job["features"] = sorted([*job["features"], "peft"])
        return job

    def _execution(self) -> Execution | None:
        if self._context is None:
            return None
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from quartet_plugin.megatron.execution import execution_of

        return execution_of(
            self._context.model,
            # Megatron-Core's choice by its process groups, as the Bridge asks for it.
            function=get_forward_backward_func(),
            runtime=None,
            modules=self._modules.names,
            args=arguments_of(self._context.state.cfg),
            optimizer=getattr(self._context, "optimizer", None),
        )


def _world_size() -> int:
    import torch.distributed as dist

    return int(dist.get_world_size()) if dist.is_initialized() else 1
