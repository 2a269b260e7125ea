"""Measures Megatron's `train_step`, and writes what the plan's own schedule recorded."""

from typing import Any

from quartet_plugin.rank.files import RankFileWriter
from quartet_plugin.rank.step_meter import StepMeter, StepResult


def step_result(results: Any) -> StepResult:
    """The result in the tuple of Megatron's `train_step`; of several losses the language model's."""
    losses, skipped, grad_norm = results[0], results[1], results[5]
    first = next(iter(losses.values()), None) if losses else None
    loss = losses.get("lm loss", first) if losses else None
    return StepResult(loss=loss, skipped=bool(skipped), grad_norm=grad_norm)


class MegatronMeter(StepMeter):
    """The meter of one rank; `runtime`, set later, is the plan's own schedule at work."""

    def __init__(self, files: RankFileWriter, *, neutralised: list[str], started_at: float) -> None:
        super().__init__(files, neutralised=neutralised, started_at=started_at)
        self.runtime: Any = None

    def write(self) -> None:
        """Write what was measured so far, and the actions of the last step."""
        super().write()
        if self.runtime is not None:
            from quartet_plugin.megatron.actions import write_actions

            write_actions(self._files, self.runtime)

    def _result_of(self, results: Any) -> StepResult:
        return step_result(results)

    def _job(self) -> dict[str, Any]:
        from megatron.training.global_vars import get_args

        from quartet_plugin.megatron.describe import describe_job

        return describe_job(get_args(), neutralised=self._neutralised)
