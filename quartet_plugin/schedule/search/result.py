"""What a search returns."""

from dataclasses import dataclass

from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A named schedule's best result: `score_s` is its makespan, or period when that is the objective."""

    label: str
    schedule: Schedule
    score_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found.

    `named_best` is the best named schedule that fits, None when none does; `named` all that fit, best
    first. `found_s` is the best score seen, also when the order lost under noise and was not taken.
    `lower_bound_s` is a makespan that nothing the search was allowed to use can beat, 0 where none is known.
    """

    schedule: Schedule
    simulation: Simulation
    named_best: Named | None
    named: tuple[Named, ...]
    found_s: float
    lower_bound_s: float
    num_evaluations: int
    elapsed_s: float
