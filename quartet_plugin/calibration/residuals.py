"""What plans have in common that no cost model knows: which measured-over-predicted ratios they share.

A residual is a sum of independent parts, one for each group of features that two plans may share, and one
that fades as their splits part. A measurement moves the predictions of the plans that share its groups,
shrunk by how much of its own deviation noise explains.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.plan import Plan

# One standard deviation of each group's part, relative, before it is learned how large residuals are.
SPREADS = {
    "shape": 0.04,
    "degrees": 0.08,
    "micro_batch": 0.05,
    "schedule": 0.03,
    "mapping": 0.04,
    "layout and schedule": 0.04,
}
SPLIT_SPREAD = 0.03
# Splits of one layout that differ by this share of a stage's layers are half strangers.
SPLIT_REACH = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Plans by their groups: `codes` [n, groups], and `counts` [n] their layers a stage over the mean."""

    codes: FloatArray
    counts: tuple[FloatArray, ...]

    def __len__(self) -> int:
        return len(self.counts)


@dataclass(slots=True)
class Residuals:
    """Numbers the groups of plans, and says how their residuals vary together."""

    _known: dict[object, int] = field(default_factory=dict)

    def groups(self, plans: Sequence[Plan]) -> Groups:
        """The plans' groups."""
        return Groups(
            codes=np.array([self._codes(plan) for plan in plans], dtype=np.float64).reshape(
                len(plans), len(SPREADS) + 1
            ),
            counts=tuple(_relative(plan) for plan in plans),
        )

    def covariance(self, rows: Groups, columns: Groups) -> FloatArray:
        """Of the residuals of `rows` with those of `columns` [rows, columns]."""
        same = rows.codes[:, None, :] == columns.codes[None, :, :]
        found: FloatArray = same[:, :, :-1] @ np.array([one**2 for one in SPREADS.values()])
        for row, column in zip(*np.nonzero(same[:, :, -1]), strict=True):
            apart = float(np.abs(rows.counts[row] - columns.counts[column]).mean())
            found[row, column] += SPLIT_SPREAD**2 * np.exp(-0.5 * (apart / SPLIT_REACH) ** 2)
        return found

    def variance(self, rows: Groups) -> FloatArray:
        """Of each plan's residual [rows]."""
        total = sum(one**2 for one in SPREADS.values()) + SPLIT_SPREAD**2
        return np.full(len(rows), total)

    def _codes(self, plan: Plan) -> list[int]:
        layout = plan.layout
        degrees = layout.degrees
        schedule = "stock" if plan.schedule.custom is None else plan.schedule.label
        keys = (
            plan.shape,
            degrees,
            (degrees, layout.micro_batch_size),
            schedule,
            (degrees, plan.mapping),
            (layout, plan.schedule.label),
            (plan.shape, layout, plan.schedule.label, plan.mapping),
        )
        return [self._known.setdefault((at, key), len(self._known)) for at, key in enumerate(keys)]


def _relative(plan: Plan) -> FloatArray:
    counts = np.array(plan.split.transformer_layers_per_stage, dtype=np.float64)
    return counts * len(counts) / max(1.0, counts.sum())
