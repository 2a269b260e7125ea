"""Lower bounds on the seconds of a space's layouts, by which a study cuts what it cannot predict in full."""

import math
from collections.abc import Sequence

import numpy as np

from quartet_plugin.cost.constants import Constants, fitted
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.layout_table import CP, DP, EP, MODE, PARTITION, PP, SHARDED, SIZE, TP, VIRTUAL
from quartet_plugin.planner.ranking import least_seconds
from quartet_plugin.planner.table_rows import RECOMPUTE, unique_rows

# The columns that tell layouts apart; the others are of their schedules and splits.
_COLUMNS = (TP, CP, PP, DP, SIZE, VIRTUAL, EP, MODE, SHARDED, PARTITION)


def least_seconds_of(
    layouts: Sequence[tuple[ModelShape, Layout]], *, request: PlanRequest, constants: Constants | None
) -> list[float]:
    """Seconds for equal work that no schedule of each layout is under with the balanced split.

    They are by the cost model. Where the balanced split does not fit in memory, no split that fits is under
    them. They are infinite where none fits, and 0 for a layout that has no schedule of a table.
    """
    known: dict[object, float] = {}
    for shape, table, seconds in least_seconds(request, constants=constants or fitted()):
        keys, _, groups = unique_rows(table.columns[:, list(_COLUMNS)])
        least = np.full(len(keys), np.inf)
        np.minimum.at(least, groups, seconds)
        for (*key, cut), bound in zip(keys.tolist(), least.tolist(), strict=True):
            row = (shape, *key, table.partitions[cut])
            known[row] = min(bound, known.get(row, math.inf))
    return [known.get((shape, *_key(layout)), 0.0) for shape, layout in layouts]


def _key(layout: Layout) -> tuple[object, ...]:
    """The layout's values of the columns, its partition last."""
    return (
        layout.tensor_parallel,
        layout.context_parallel,
        layout.pipeline_parallel,
        layout.data_parallel,
        layout.micro_batch_size,
        layout.virtual_stages,
        layout.expert_parallel,
        RECOMPUTE.index(layout.recompute),
        int(layout.distributed_optimizer),
        layout.tensor_partition,
    )
