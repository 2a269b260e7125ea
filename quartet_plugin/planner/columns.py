"""The columns of a job's candidate layouts, and the rules of `search.forbid` over them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.costs import IntArray
from quartet_plugin.space.config import STOCK_NAMES, Forbidden

# The columns of a candidate.
TP, CP, PP, DP, SIZE, VIRTUAL, EP, SPLIT, MODE, SHARDED = range(10)
_COLUMN_OF = {
    "tensor_parallel": TP,
    "pipeline_parallel": PP,
    "data_parallel": DP,
    "virtual_stages": VIRTUAL,
    "micro_batch_size": SIZE,
}


def check_rules(rules: Sequence[Forbidden]) -> None:
    """Raises ConfigError for a rule over what a plan without a run does not choose."""
    for rule in rules:
        for axis, values in rule.axes.items():
            if axis not in (*_COLUMN_OF, "schedule"):
                raise ConfigError(
                    f"search.forbid: {rule.label}: {axis}; a plan without a run is forbidden by "
                    f"{', '.join(_COLUMN_OF)} and schedule; others are for `quartet tune`"
                )
            unknown = [value for value in values if axis == "schedule" and value not in STOCK_NAMES]
            if unknown:
                raise ConfigError(
                    f"search.forbid: {rule.label}: {unknown[0]}; a plan without a run has "
                    f"{', '.join(STOCK_NAMES[:-1])} or {STOCK_NAMES[-1]}"
                )


def is_forbidden(columns: IntArray, rules: Sequence[Forbidden]) -> NDArray[np.bool_]:
    """Whether each candidate meets a rule [candidates]."""
    met = np.zeros(len(columns), dtype=np.bool_)
    for rule in rules:
        one = np.ones(len(columns), dtype=np.bool_)
        for axis, values in rule.axes.items():
            column, numbers = _comparable(columns, axis, values)
            one &= np.isin(column, numbers)
        met |= one
    return met


def _comparable(columns: IntArray, axis: str, values: Sequence[Any]) -> tuple[IntArray, list[int]]:
    if axis != "schedule":
        return columns[:, _COLUMN_OF[axis]], [int(value) for value in values]
    number = np.where(columns[:, PP] == 1, 0, np.where(columns[:, VIRTUAL] == 1, 1, 2))
    return number, [STOCK_NAMES.index(str(value)) for value in values]
