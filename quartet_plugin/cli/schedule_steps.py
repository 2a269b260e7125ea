"""What the schedule commands share: they read options, simulate with all checks, and write result files."""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quartet_plugin.cli.output import tell
from quartet_plugin.errors import PlanError, QuartetError, UsageError
from quartet_plugin.model.files import shown

if TYPE_CHECKING:
    from quartet_plugin.model.costs import Costs
    from quartet_plugin.schedule.schedule import Schedule
    from quartet_plugin.schedule.search import SearchResult
    from quartet_plugin.schedule.simulate import Simulation

AUTO = "auto"
EVEN = "even"
PLACEMENTS = ("linear", "loop", "v", "snake")

# Devices up to which a search's bound is worth its time, and up to which the solver may add cuts.
_BOUND_UP_TO, _CUTS_UP_TO = 32, 8
_CLEARLY_SHORTER = 0.002
_RESERVE_S = 0.25  # of a core, to write the result and to end

# Floats hold every integer up to here.
MAX_NUMBER = 2**53
Counts = tuple[int, ...]


class SearchProgress:
    """Keeps what a search has reached, and prints it on stderr whenever it is clearly shorter."""

    def __init__(self, bound_s: float | None) -> None:
        self.result: SearchResult | None = None
        self._bound_s = bound_s
        self._said_s = math.inf

    def __call__(self, result: "SearchResult") -> None:
        """Take the result of another round."""
        from quartet_plugin.report.summary import compared_with_bound, seconds

        self.result = result
        makespan_s = result.simulation.makespan_s
        if makespan_s < self._said_s * (1 - _CLEARLY_SHORTER):
            self._said_s = makespan_s
            bound_s = max(self._bound_s or 0.0, result.lower_bound_s)
            distance = f", bound: {compared_with_bound(makespan_s, bound_s)}" if bound_s else ""
            tell(
                f"quartet: {result.elapsed_s:.1f} s, {result.num_evaluations} evaluations: makespan "
                f"{seconds(makespan_s)}{distance}"
            )


@dataclass(frozen=True, slots=True)
class CommandClock:
    """What is left of a limit on the whole command."""

    started_s: float
    limit_s: float | None

    @property
    def spent_s(self) -> float:
        """Seconds since the process started."""
        return time.monotonic() - self.started_s

    def left_s(self, *, compiled_s: float) -> float | None:
        """Seconds to search in, less a reserve that grows with how busy the machine was so far."""
        if self.limit_s is None:
            return None
        slowdown = min(8.0, max(1.0, self.spent_s / max(0.1, time.process_time())))
        reserve_s = min(_RESERVE_S * slowdown, 0.3 * self.limit_s)
        return max(0.0, self.limit_s - (self.spent_s - compiled_s) - reserve_s)


def parse_placement(text: str) -> str | Counts:
    """`auto`, a shape's name, or a list of devices like `0,1,1,0`; raises UsageError."""
    if text in (AUTO, *PLACEMENTS):
        return text
    rule = f"must be auto, {', '.join(PLACEMENTS)}, or a list like 0,1,1,0"
    return _numbers(text, option="--placement", rule=rule)


def parse_chunks(text: str) -> int | None:
    """A number of stages a device, None for `auto`; raises UsageError."""
    if text == AUTO:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text) >= 1):
        raise UsageError(f"--chunks: {shown(text)}: must be auto or a number from 1")
    return int(text)


def parse_split(text: str) -> str | Counts:
    """`auto`, `even`, or counts like `3,2,2`; raises UsageError."""
    if text in (AUTO, EVEN):
        return text
    return _numbers(text, option="--split", rule="must be auto, even, or counts like 3,2,2, one a stage")


def check_effort(*, time_limit: float | None, evaluations: int | None, seed: int) -> None:
    """Raise UsageError for limits of a search that make no sense."""
    if time_limit is not None and evaluations is not None:
        raise UsageError("--time-limit and --evaluations: both are given; give only one")
    if time_limit is not None and not (math.isfinite(time_limit) and time_limit > 0):
        raise UsageError(f"--time-limit: {time_limit}: must be a number of seconds above 0")
    for option, value, least in (("--evaluations", evaluations, 1), ("--seed", seed, 0)):
        if value is not None and not least <= value < MAX_NUMBER:
            raise UsageError(f"{option}: {str(value)[:40]}: must be from {least} to 2^53")


def _numbers(text: str, *, option: str, rule: str) -> Counts:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) <= 6 for part in parts):
        raise UsageError(f"{option}: {shown(text)}: {rule}")
    return tuple(map(int, parts))


def at_uniform_costs(schedule: "Schedule") -> "Simulation":
    """Simulate with F = I = W = 1 for a device's stages together, B = 2, and no transfer time."""
    import numpy as np

    from quartet_plugin.model.costs import StageCosts
    from quartet_plugin.schedule.simulate import simulate as run

    share = np.full(schedule.num_stages, schedule.num_devices / schedule.num_stages)
    none = np.zeros(schedule.num_stages)
    lanes = [
        StageCosts(
            device_of_stage=np.asarray(route, dtype=np.int64),
            forward_s=share,
            input_grad_s=share,
            weight_grad_s=share,
            backward_s=2 * share,
            activation_bytes=share,
            forward_transfer_s=none,
            backward_transfer_s=none,
            held_fraction=1.0,
        )
        for route in schedule.routes or (schedule.placement,)
    ]
    return run(schedule, lanes[0], other_route=lanes[1] if len(lanes) == 2 else None)


def simulated(schedule: "Schedule", costs: "Costs") -> "Simulation":
    """Simulate after all checks, so that a refusal names the rule and shows the cell."""
    from quartet_plugin.schedule.simulate import simulate_costs
    from quartet_plugin.schedule.validate import check_actions, check_costs, check_progress

    check_costs(schedule, costs)
    check_actions(schedule)
    try:
        return simulate_costs(schedule, costs)
    except PlanError:
        check_progress(schedule)
        raise


def picture(schedule: "Schedule", simulation: "Simulation | None") -> bytes:
    """The PNG, in unit times without a simulation."""
    from quartet_plugin.report.timeline import timeline_png

    title = str(schedule.origin.get("name", "searched" if "family" in schedule.origin else ""))
    if simulation is not None:
        return timeline_png(schedule, simulation, title=title)
    return timeline_png(schedule, at_uniform_costs(schedule), title=title, unit_times=True)


def write_trace(path: Path, schedule: "Schedule", simulation: "Simulation", costs: "Costs") -> None:
    """Write the trace for Perfetto, memory included."""
    from quartet_plugin.model.costs import stage_costs
    from quartet_plugin.model.files import write_text_atomic
    from quartet_plugin.report.perfetto import trace
    from quartet_plugin.report.summary import describe

    layers = schedule.layers_per_stage
    assert layers is not None, "a schedule to simulate needs its split"
    stages = stage_costs(costs, placement=schedule.placement, layers_per_stage=layers)
    value = trace(schedule, simulation, name=describe(schedule), costs=stages)
    write_text_atomic(path, json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n")


def figures(simulation: "Simulation") -> dict[str, Any]:
    """`predicted` of SCHEDULE.json."""
    return {
        "makespan_s": float(simulation.makespan_s),
        "period_s": float(simulation.period_s),
        "bubble_fraction": float(simulation.bubble_fraction),
        "peak_activation_bytes": simulation.peak_activation_bytes.tolist(),
    }


def quick_bound(
    costs: "Costs",
    placement: "Counts | None",
    split: "str | Counts",
    chunks: int | None,
    *,
    allow_empty: bool,
) -> float | None:
    """A bound to compare a search with, for a small part of its time; the same whenever it is asked for.

    Where the split is open the placement is taken as open too, which is quick and still a bound.
    """
    from quartet_plugin.schedule.bound import lower_bound

    is_open = isinstance(split, str)
    if is_open and costs.num_devices > _BOUND_UP_TO:
        return None
    try:
        return lower_bound(
            costs,
            placement=None if is_open else placement,
            layers_per_stage=None if isinstance(split, str) else split,
            num_chunks=chunks if is_open else None,
            allow_empty=allow_empty,
            max_nodes=1 if costs.num_devices <= _CUTS_UP_TO else 0,
        ).makespan_s
    except QuartetError:
        return None  # the search refuses the same sizes in its own words


def fixed_placement(costs: "Costs", places: "str | Counts", chunks: int | None) -> "Counts | None":
    """The placement the options fix, checked; None where they leave it open."""
    from quartet_plugin.schedule.placement import build

    if places == AUTO:
        return None
    if places in ("loop", "snake") and chunks is None:
        return None
    return build(places, num_devices=costs.num_devices, num_chunks=chunks)


def num_stages(costs: "Costs", placement: "Counts | None", chunks: int | None) -> int | None:
    """The number of stages the options fix; None where they leave it open."""
    if placement is not None:
        return len(placement)
    return None if chunks is None else chunks * costs.num_devices


def layers_of(
    split: "str | Counts", costs: "Costs", num_stages: int | None, *, allow_empty: bool
) -> "Counts":
    """The layers of each stage that `--split even` or `--split COUNTS` asks for, checked."""
    from quartet_plugin.split.entries import check_entries, even_entries

    if isinstance(split, str):
        if num_stages is None:
            raise UsageError("--split even: the number of stages is not known; add --placement or --chunks")
        return even_entries(costs, num_stages, allow_empty=allow_empty)
    if len(split) % costs.num_devices:
        raise UsageError(
            f"--split: {len(split)} counts on {costs.num_devices} devices; give one a stage, and every "
            "device holds equally many stages"
        )
    return check_entries(costs, split, num_stages=num_stages or len(split), allow_empty=allow_empty)
