"""How the search has plans run: the protocol, and the one that starts real processes."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from quartet_plugin.errors import QuartetError
from quartet_plugin.model.plan import NodeInfo
from quartet_plugin.search.job import nodes_of
from quartet_plugin.trial.request import Outcome, Progress, TrialRequest, TrialResult

# What a trial can end as and stay so; everything else is launched again by a resumed run.
SETTLED = frozenset({Outcome.OK, Outcome.UNSTABLE, Outcome.INFEASIBLE, Outcome.WRONG})

ShouldStop = Callable[[], bool]


class Launches(Protocol):
    """Runs plans, and knows what was run before."""

    def recover(self, folder: Path, *, should_stop: ShouldStop) -> None:
        """See to their end what an earlier process started below `folder`."""

    def recorded(self, folder: Path, *, plan_key: str | None) -> TrialResult | None:
        """The settled result of this plan in a trial's folder."""

    def run(
        self, request: TrialRequest, *, on_progress: Callable[[Progress], None], should_stop: ShouldStop
    ) -> TrialResult:
        """Launch a plan and measure it."""

    def nodes(self, result: TrialResult) -> tuple[NodeInfo, ...]:
        """The nodes and slots a measured trial ran on."""


class LocalLaunches:
    """Runs plans with `trial.runner` on this machine."""

    def recover(self, folder: Path, *, should_stop: ShouldStop) -> None:
        """See `Launches`."""
        from quartet_plugin.trial.recover import recover

        if folder.is_dir():
            recover(folder, stop=should_stop)

    def recorded(self, folder: Path, *, plan_key: str | None) -> TrialResult | None:
        """See `Launches`."""
        from quartet_plugin.trial.attempt import PREFIX, read_result

        attempts = sorted(folder.glob(f"{PREFIX}*"), key=_attempt_number, reverse=True)
        for attempt in attempts:
            # A file that breaks its format is worth nothing: the plan is launched again, in a new folder.
            with contextlib.suppress(QuartetError):
                found = read_result(attempt)
                result = None if found is None else _judged(found)
                if result and result.plan_key == plan_key and result.outcome in SETTLED:
                    return result
        return None

    def run(
        self, request: TrialRequest, *, on_progress: Callable[[Progress], None], should_stop: ShouldStop
    ) -> TrialResult:
        """See `Launches`."""
        from quartet_plugin.trial.runner import run_trial

        return _judged(run_trial(request, on_progress=on_progress, stop=should_stop))

    def nodes(self, result: TrialResult) -> tuple[NodeInfo, ...]:
        """See `Launches`."""
        from quartet_plugin.trial.files import RankFiles

        snapshot = RankFiles(result.folder, attempt_id=result.attempt_id).scan()
        return nodes_of(snapshot.reports.values())


def _judged(result: TrialResult) -> TrialResult:
    """A plan that the adapter refuses beside this command does not fit; the harness is not broken."""
    if result.outcome is not Outcome.HARNESS or result.plan_key is None:
        return result
    from quartet_plugin.trial.files import RankFiles

    errs = RankFiles(result.folder, attempt_id=result.attempt_id).scan().errs
    kinds = {err.kind for err in errs.values() if err.kind != "network"}
    return replace(result, outcome=Outcome.INFEASIBLE) if kinds == {"plan"} else result


def _attempt_number(path: Path) -> int:
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
