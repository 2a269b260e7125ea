"""A launch that ended, as the search tells it and the report shows it."""

from dataclasses import dataclass
from typing import Literal

from quartet_plugin.model.plan import Plan

# The outcome of a plan that was measured with fewer layers only, and is told as predicted from that.
CROPPED = "CROPPED"
# The outcome of a plan that a rule of `search.forbid` is about: it is not launched.
FORBIDDEN = "FORBIDDEN"

Stage = Literal["baseline", "cropped", "search", "final"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """One launch's end. `plan` is None for the user's own command.

    `iteration_s` (seconds) and `tokens_per_s` are None where nothing was measured; `versus_baseline` is the
    objective over the baseline's.
    """

    label: str
    plan: Plan | None
    outcome: str
    reason: str = ""
    iteration_s: float | None = None
    tokens_per_s: float | None = None
    versus_baseline: float | None = None
