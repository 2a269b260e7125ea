"""The plan of one trial of a run, for `quartet show` and `quartet explain`, with what was measured of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quartet_plugin.cli.command import find_run, path_here
from quartet_plugin.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from quartet_plugin.model.history import TrialRow
    from quartet_plugin.model.measurement import Comparison
    from quartet_plugin.model.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan:
    """A trial's plan: its `row`, the baseline's row, and the final rounds' comparison, None without rounds.

    `best_plan` is where the run keeps its winner, whether there is one or not.
    """

    plan: "Plan"
    row: "TrialRow"
    baseline: "TrialRow | None"
    comparison: "Comparison | None"
    best_plan: Path

    @property
    def measured_s(self) -> float | None:
        """Seconds an iteration: of the final rounds, else of the trial; None where neither measured it."""
        if self.comparison is not None:
            return self.comparison.plan.iteration_s.median
        return self.row.iteration_s

    @property
    def baseline_s(self) -> float | None:
        """Seconds an iteration of the user's command: of the final rounds, else of its trial."""
        if self.comparison is not None:
            return self.comparison.baseline.iteration_s.median
        return None if self.baseline is None else self.baseline.iteration_s


def plan_of_trial(name: str, number: int, *, run_dir: Path) -> TrialPlan:
    """The plan of trial `number` of the run `name`.

    Raises UsageError for a plan file, ConfigError where there is no such run, trial or plan.
    """
    from quartet_plugin.cli.runs import read_whole
    from quartet_plugin.tuner.history import open_run

    if Path(name).is_file():
        raise UsageError(f"--trial {number}: {name} is a plan file; name a run's folder or name instead")
    run = find_run(name, run_dir=run_dir)
    history, _, _ = read_whole(run)
    row = history.row(number)
    if row is None or row.plan is None:
        raise ConfigError(
            f"--trial {number}: the run has no such plan; `quartet trials {path_here(run)}` lists its trials"
        )
    finalist = next((finalist for finalist in history.finalists if finalist.number == number), None)
    return TrialPlan(
        plan=row.plan,
        row=row,
        baseline=history.baseline,
        comparison=None if finalist is None else finalist.comparison,
        best_plan=open_run(run).folder.best_plan,
    )
