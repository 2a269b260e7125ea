"""The memory limit of a run's cluster file: plans above it do not fit, and a command above it is no baseline.

The devices may have more memory than the file says. A plan's trial is then measured and still does not fit.
The user's command, trial 0, is measured as well, so that the job is known; the best stock plan that fits
stands in for it in the final rounds.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quartet_plugin.model.plan import NodeInfo, Plan
from quartet_plugin.model.receipt import Receipt
from quartet_plugin.model.trial_record import FinishedTrial
from quartet_plugin.trial.compared_start import ComparedSteps
from quartet_plugin.trial.node_speed import NodeSpeed
from quartet_plugin.trial.request import Outcome, Progress, TrialRequest, TrialResult
from quartet_plugin.tuner.trial_backend import ComparedTrial, ParityCheck, ShouldStop, TrialBackend


@dataclass(frozen=True, slots=True)
class LimitedBackend:
    """A backend on which a measured plan does not fit where a rank's peak is above `limit_bytes`.

    The user's command is measured as it is.
    """

    backend: TrialBackend
    limit_bytes: int

    def recover(self, folder: Path, *, should_stop: ShouldStop, skip: Collection[Path] = ()) -> None:
        """See `TrialBackend`."""
        self.backend.recover(folder, should_stop=should_stop, skip=skip)

    def recorded(self, folder: Path, *, plan_key: str | None) -> TrialResult | None:
        """See `TrialBackend`."""
        result = self.backend.recorded(folder, plan_key=plan_key)
        return None if result is None else self.judged(result)

    def supersede(self, folder: Path) -> bool:
        """See `TrialBackend`."""
        return self.backend.supersede(folder)

    def run(
        self, request: TrialRequest, *, on_progress: Callable[[Progress], None], should_stop: ShouldStop
    ) -> TrialResult:
        """See `TrialBackend`."""
        return self.judged(self.backend.run(request, on_progress=on_progress, should_stop=should_stop))

    def check(
        self, request: ParityCheck, *, on_progress: Callable[[Progress], None], should_stop: ShouldStop
    ) -> Receipt:
        """See `TrialBackend`."""
        return self.backend.check(request, on_progress=on_progress, should_stop=should_stop)

    def adopt(self, request: ParityCheck, result: TrialResult, *, should_stop: ShouldStop) -> ComparedSteps:
        """See `TrialBackend`."""
        return self.backend.adopt(request, result, should_stop=should_stop)

    def compare(
        self,
        request: ParityCheck,
        result: TrialResult,
        *,
        on_progress: Callable[[Progress], None],
        should_stop: ShouldStop,
    ) -> ComparedTrial:
        """See `TrialBackend`."""
        compared = self.backend.compare(request, result, on_progress=on_progress, should_stop=should_stop)
        return replace(compared, result=self.judged(compared.result))

    def nodes(self, result: TrialResult) -> tuple[NodeInfo, ...]:
        """See `TrialBackend`."""
        return self.backend.nodes(result)

    def node_speeds(self, result: TrialResult) -> tuple[NodeSpeed, ...]:
        """See `TrialBackend`."""
        return self.backend.node_speeds(result)

    def modules(self, result: TrialResult) -> tuple[str, ...] | None:
        """See `TrialBackend`."""
        return self.backend.modules(result)

    def judged(self, result: TrialResult) -> TrialResult:
        """The result, infeasible where a measured plan's peak is above the limit."""
        excess = result.peak_memory_bytes - self.limit_bytes
        if result.plan_key is None or not result.is_measured or excess <= 0:
            return result
        return replace(
            result,
            outcome=Outcome.INFEASIBLE,
            reason=f"out of memory: {above_limit(result.peak_memory_bytes, self.limit_bytes)}",
            memory_excess_bytes=excess,
        )


def above_limit(peak_bytes: int, limit_bytes: int) -> str:
    """The peak and the limit that it is above, in words."""
    return (
        f"a rank's peak is {peak_bytes / 2**20:,.0f} MiB, "
        f"above the {limit_bytes / 2**20:,.0f} MiB of machine.cluster"
    )


def stand_in_of(ranked: Sequence[FinishedTrial], *, command: Plan) -> FinishedTrial | None:
    """The first of `ranked`, the best first, that an unmodified framework runs with the command's shape."""

    def is_stock(plan: Plan) -> bool:
        is_own = plan.schedule.custom is None and plan.layout.tensor_partition is None
        return is_own and plan.mapping.is_stock and plan.shape == command.shape

    return next((trial for trial in ranked if is_stock(trial.plan)), None)
