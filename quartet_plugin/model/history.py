"""A tuning run as its folder and its study hold it: the search reads it back, the reports show it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quartet_plugin.model.axis_gains import AxisGains
from quartet_plugin.model.cluster import Precision
from quartet_plugin.model.launch import DEPTH_PROXY, Phase
from quartet_plugin.model.measurement import Comparison, Objective, Regret
from quartet_plugin.model.plan import NodeInfo, Plan
from quartet_plugin.model.shape_curve import ShapeCurve
from quartet_plugin.model.trial_record import speedup

PARTS = ("shape", "layout", "split", "schedule", "mapping")

RunState = Literal["running", "finished", "stopped", "lost", "elsewhere"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The highest memory of one process; `rank` is Megatron's RANK."""

    rank: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One trial. Times are seconds, None where nothing was measured.

    `plan` is None where its file is gone; `labels` (by PARTS) are there all the same where the study has
    them.
    `iterations_s` are the measured iterations, `iteration_s` their median. `value` is the objective, as it
    would have been when the baseline was measured: `drift` is how fast the machine was since.
    `predicted_iteration_s` and `predicted_memory_bytes` are what the cost model said before the launch.
    `expected_improvement` is the share by which the planner expected the plan to be faster than the best
    known plan, chance included, when it proposed it; None of a plan that the exploring sampler chose.
    `repeats` is the number of the trial that measured the same plan before, `source` the run and trial that
    did where another run was begun with. `is_cut`: it ended early, since it was clearly slower than the best;
    it cannot win. `folder` is the latest attempt's,
    relative to the run.
    """

    number: int
    is_running: bool = False
    plan: Plan | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    outcome: str = ""
    verdict: str = ""
    reason: str = ""
    phase: str = ""
    value: float | None = None
    iteration_s: float | None = None
    iterations_s: tuple[float, ...] = ()
    tokens_per_s: float | None = None
    model_flops_per_s_per_device: float | None = None
    peak_memory_bytes: int = 0
    memory_excess_bytes: int = 0
    predicted_iteration_s: float | None = None
    predicted_memory_bytes: int | None = None
    expected_improvement: float | None = None
    ranks: tuple[RankMemory, ...] = ()
    wall_s: float = 0.0
    num_attempts: int = 0
    repeats: int | None = None
    source: str | None = None
    is_cut: bool = False
    drift: float = 1.0
    folder: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether the iteration time may be compared."""
        is_whole = self.verdict == "measured" and self.outcome != DEPTH_PROXY
        return is_whole and self.iteration_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """A plan after the final rounds."""

    number: int
    comparison: Comparison


# Between two runs of one plan lie a few percent; a smaller change is never a drift of the machine.
LEAST_DRIFT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftMeasurement:
    """The baseline's objective after `num_tried` trials, over what it was at the start.

    A ratio from `1 / chance_limit` to `chance_limit` is within chance; the limit is None in events of earlier
    releases, which lack it.
    """

    num_tried: int
    ratio: float
    chance_limit: float | None = None

    @property
    def is_within_chance(self) -> bool | None:
        """Whether the machine counts as unchanged; None where the limit is not known."""
        if self.chance_limit is None:
            return None
        return 1.0 / self.chance_limit <= self.ratio <= self.chance_limit

    @property
    def sentence(self) -> str:
        """The check with its verdict and what trials are compared with, for the middle of a line."""
        ran = (
            f"after {self.num_tried} trials your command was measured again: {self.ratio:.2f}x of its first "
            "speed"
        )
        if self.chance_limit is None:
            return ran
        span = f"the noise range {1.0 / self.chance_limit:.2f}x to {self.chance_limit:.2f}x"
        if self.is_within_chance:
            return f"{ran}, inside {span}; later trials are still compared with the first measurement"
        return (
            f"{ran}, outside {span}; the machine has changed, and later trials are compared with the new "
            "measurement"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNode:
    """A node that computes `factor` times slower than the others of its kind, in two launches at least."""

    host: str
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLaunch:
    """A launch without a result: the slowest process's phase and iteration, `elapsed_s` since its start.

    `number` is the trial's; 0 for what belongs to none. `worker` runs it, empty for the tuner itself.
    """

    number: int
    stage: Phase
    round_number: int | None
    attempt: int
    phase: str
    iteration: int
    num_iterations: int
    elapsed_s: float
    worker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """A worker of the run; `trial` is what it measures now, None where it waits."""

    name: str
    host: str
    pid: int
    devices: str
    trial: int | None
    renewed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHolder:
    """Who holds the run folder; `is_alive` is None where that cannot be seen from this host."""

    host: str
    pid: int
    generation: int
    is_alive: bool | None
    renewed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSeconds:
    """The seconds of a run's launches by what they went into; the rest of each launch is its start and end.

    `gate_s` are whole launches of the parity gate and the iterations of trials that it compares; `warmup_s`
    and `measured_s` are the other iterations. Of all launches `num_warm` were forked from a trial server, and
    `num_cold` were started anew. `num_measured` were measured, `num_unstable` of them with iterations that
    vary too much.
    """

    gate_s: float = 0.0
    warmup_s: float = 0.0
    measured_s: float = 0.0
    num_warm: int = 0
    num_cold: int = 0
    num_measured: int = 0
    num_unstable: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """A run so far.

    `command` has its secrets masked and `storage` no password. `began_at` and `ended_at` are seconds since
    1970; `elapsed_s` is of the latest session. `features` of the user's job keep the axes `locked` as they
    are; `neutralised` flags were left out in trials. `num_asked` trials were asked for, `num_spent` are used
    up. `drift_checks` say how the machine drifted, `slow_nodes` which nodes are slow now, `regret` what a
    search that has ended may have missed, `axis_gains` what each axis of the winner gave, `shape_curve` has
    the best plan of each of several shapes. `baseline_note` says why the baseline is not the user's command,
    empty where it is. `limits` are what the latest proposal did not predict, a line each.
    `launch_s` are the seconds of all launches that have ended, whatever for, `launch_parts` what they went
    into, and `search_s` those of all sessions. `precision` is the format of the layers' products. `faults`
    are files that could not be read.
    """

    name: str
    path: str
    cwd: str
    command: tuple[str, ...]
    config: Mapping[str, Any]
    quartet_version: str
    storage: str
    state: RunState
    holder: LeaseHolder | None
    running: tuple[RunningLaunch, ...]
    began_at: float | None
    ended_at: float | None
    elapsed_s: float
    time_left_s: float | None
    num_asked: int
    num_spent: int
    objective: Objective
    nodes: tuple[NodeInfo, ...]
    features: tuple[str, ...]
    neutralised: tuple[str, ...]
    locked: Mapping[str, str]
    trials: tuple[TrialRow, ...]
    finalists: tuple[Finalist, ...]
    winner: Plan | None
    faults: tuple[str, ...] = ()
    drift_checks: tuple[DriftMeasurement, ...] = ()
    slow_nodes: tuple[SlowNode, ...] = ()
    workers: tuple[WorkerRow, ...] = ()
    regret: Regret | None = None
    axis_gains: AxisGains | None = None
    shape_curve: ShapeCurve | None = None
    launch_s: float = 0.0
    launch_parts: LaunchSeconds = LaunchSeconds()
    search_s: float = 0.0
    baseline_note: str = ""
    limits: tuple[str, ...] = ()
    precision: Precision = "bf16"

    @property
    def baseline(self) -> TrialRow | None:
        """Trial 0, where it was launched."""
        return next((row for row in self.trials if row.number == 0), None)

    @property
    def best(self) -> TrialRow | None:
        """The best single measurement so far, the baseline's included."""
        measured = [row for row in self.trials if row.is_measured and row.value is not None]
        return max(measured, key=lambda row: (row.value or 0.0, -row.number), default=None)

    def row(self, number: int) -> TrialRow | None:
        """The trial of that number."""
        return next((row for row in self.trials if row.number == number), None)

    def versus_baseline(self, row: TrialRow) -> float | None:
        """A trial's speedup over the baseline, corrected by its `drift`; None without a measurement."""
        baseline = self.baseline
        if baseline is None or not baseline.value or not row.is_measured or row.value is None:
            return None
        return speedup(row.value, baseline_value=baseline.value)
