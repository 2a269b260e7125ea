"""Measures Megatron's `train_step`, and writes what the plan's own schedule recorded."""

from typing import Any

from quartet_plugin.rank.files import RankFileWriter
from quartet_plugin.rank.step_meter import StepMeter, rank_now


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

    def _job(self) -> dict[str, Any] | None:
        if rank_now() != 0:
            return None
        from megatron.training.global_vars import get_args

        from quartet_plugin.megatron.describe import describe_job

        return describe_job(get_args(), neutralised=self._neutralised)
