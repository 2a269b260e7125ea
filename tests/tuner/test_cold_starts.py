"""Why processes start cold is said when a launch first shows it, and once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from quartet_plugin.trial.request import Progress, TrialRequest, TrialResult
from quartet_plugin.tuner.trial_backend import ShouldStop
from tests.tuner.fakes import FakeMachine, Watching, tune
from tests.tuner.fakes import begin_with_journal as begin


@dataclass
class ColdMachine(FakeMachine):
    """Every launch starts cold, for the reason that its number has."""

    def run(
        self, request: TrialRequest, *, on_progress: Callable[[Progress], None], should_stop: ShouldStop
    ) -> TrialResult:
        """One launch."""
        result = super().run(request, on_progress=on_progress, should_stop=should_stop)
        reason = "no fork" if len(self.launched) < 3 else "no server"
        return replace(result, start="cold", cold_reason=reason)


def test_each_reason_is_said_once(tmp_path: Path) -> None:
    watching = Watching()
    run = begin(tmp_path / "r", study={"trials": 3, "rounds": 3, "control": 0}, trial={"crop": "none"})
    tune(run, ColdMachine(), observer=watching)
    said = [line for line in watching.messages if "cold" in line]
    assert said == ["processes start cold: no fork", "processes start cold: no server"]
