"""Which layouts were refused, and by which constraint: grouped and counted."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.bounds import unique_rows
from quartet_plugin.planner.candidates import degrees, fault_of_degrees
from quartet_plugin.planner.columns import CP, PP, TP
from quartet_plugin.planner.job import PlanRequest

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One constraint and how many it refused: combinations of TP, CP and PP, or whole layouts for memory."""

    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLarge:
    """Layouts of equal degrees that do not fit: how many, and a lower bound of what the least one needs."""

    tensor_parallel: int
    context_parallel: int
    pipeline_parallel: int
    count: int
    least_bytes: float

    @classmethod
    def by_degrees(cls, columns: IntArray, memory_bytes: FloatArray) -> "list[TooLarge]":
        """Rows of candidates with their bounds, grouped."""
        if not len(columns):
            return []
        keys, _, groups = unique_rows(columns[:, [TP, CP, PP]])
        counts = np.bincount(groups, minlength=len(keys))
        least = np.full(len(keys), np.inf)
        np.minimum.at(least, groups, memory_bytes)
        return [
            cls(
                tensor_parallel=tp,
                context_parallel=cp,
                pipeline_parallel=pp,
                count=int(count),
                least_bytes=float(need),
            )
            for (tp, cp, pp), count, need in zip(keys.tolist(), counts, least, strict=True)
        ]


def refused_degrees(job: PlanRequest, shape: ModelShape) -> list[Refusal]:
    """Combinations of degrees that no layout can have, by the first constraint each breaks."""
    faults = (fault_of_degrees(job, shape, tp, cp, pp) for tp, cp, pp in degrees(job))
    counted = Counter(fault for fault in faults if fault is not None)
    return [Refusal(reason=reason, count=count) for reason, count in counted.most_common()]


def too_large_of(found: Iterable[TooLarge], available_bytes: float) -> list[Refusal]:
    """Layouts that do not fit in memory, by degrees."""
    rows = sorted(found, key=lambda one: -one.count)
    return [
        Refusal(
            reason=f"memory: {_label(one)} needs {_need(one.least_bytes, available_bytes)}",
            count=one.count,
        )
        for one in rows
    ]


def _label(one: TooLarge) -> str:
    context = f" CP {one.context_parallel}" if one.context_parallel > 1 else ""
    return f"TP {one.tensor_parallel}{context} PP {one.pipeline_parallel}"


def _need(least_bytes: float, available_bytes: float) -> str:
    limit = f"the {available_bytes / GB:.0f} GB that are usable"
    if least_bytes > available_bytes:
        return f"at least {least_bytes / GB:.0f} GB of {limit}"
    return f"more than {limit}"
