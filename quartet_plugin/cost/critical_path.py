"""How long a schedule takes, and which actions it waits for: the counts along its critical path.

A makespan is the sum of the actions and transfers on one path through the schedule, so how often each
stage's actions lie on that path is also its derivative by their times: one simulation gives a time and all
its slopes.
"""

from dataclasses import dataclass

import numpy as np

from quartet_plugin.errors import PlanError
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.plan import Plan
from quartet_plugin.schedule import kernel
from quartet_plugin.schedule.choice import generated, written_of
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import flatten

# Rounds of microbatches that are simulated as they are, and those taken for the rate beyond them.
FULL_ROUNDS, FOLDED_ROUNDS = 8, 2
# Two ends count as the same time within this part of the makespan.
SAME = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Path:
    """A makespan and what lies on its critical path.

    `actions` [4, num_stages] counts forwards, input gradients, weight gradients and whole backwards, `sends`
    [2, num_stages] the transfers out of a stage: forward-going and backward-going ones.
    """

    seconds: float
    actions: FloatArray
    sends: FloatArray


class OrderedActions:
    """A schedule's orders, flat: made once, run with any times. One copy of the model only."""

    def __init__(self, schedule: Schedule) -> None:
        self.num_microbatches = schedule.num_microbatches
        self.num_stages = schedule.num_stages
        self.placement = np.asarray(schedule.placement, dtype=np.int64)
        self.orders, self.offsets = flatten(schedule)
        self._route = np.zeros(schedule.num_microbatches, dtype=np.int64)

    def path(self, times_s: FloatArray, sends_s: FloatArray) -> Path:
        """The critical path for `times_s` [4, num_stages] by kind and `sends_s` [2, num_stages].

        `sends_s[0, s]` is from stage s to s + 1, `sends_s[1, s]` from s to s - 1. Raises PlanError for orders
        that do not run.
        """
        actions = np.zeros((4, self.num_stages))
        sends = np.zeros((2, self.num_stages))
        seconds = critical_path(
            self.orders,
            self.offsets,
            self.num_stages,
            self.num_microbatches,
            self.placement,
            np.ascontiguousarray(times_s),
            np.ascontiguousarray(sends_s),
            self._route,
            SAME,
            actions,
            sends,
        )
        if seconds < 0.0:
            raise PlanError("orders: they wait for each other; take another schedule")
        return Path(seconds=seconds, actions=actions, sends=sends)


def orders_of(plan: Plan) -> tuple[tuple[OrderedActions, float], ...]:
    """The plan's orders with their weights: many microbatches are two shorter runs, extrapolated.

    None without a pipeline.
    """
    layout, schedule, count = plan.layout, plan.schedule, plan.num_microbatches
    if layout.pipeline_parallel == 1:
        return ()
    custom = schedule.custom
    if custom is not None:
        written = written_of(custom, num_microbatches=count)
        if written is not None:
            return ((OrderedActions(written), 1.0),)
    unit = schedule.group or layout.pipeline_parallel
    return tuple(
        (OrderedActions(generated(schedule, layout=layout, num_microbatches=size)), weight)
        for size, weight in folded(count, unit=unit)
    )


def folded(count: int, *, unit: int) -> list[tuple[int, float]]:
    """Numbers of microbatches to simulate for `count`, with weights: an order repeats every `unit`."""
    if count <= (FULL_ROUNDS + 1) * unit:
        return [(count, 1.0)]
    longer = FULL_ROUNDS * unit + count % unit
    shorter = longer - FOLDED_ROUNDS * unit
    more = (count - longer) / (longer - shorter)
    return [(longer, 1.0 + more), (shorter, -more)]


@kernel.compiled
def critical_path(
    orders: IntArray,
    offsets: IntArray,
    num_stages: int,
    num_microbatches: int,
    placement: IntArray,
    times: FloatArray,
    sends_s: FloatArray,
    route: IntArray,
    same: float,
    actions: FloatArray,
    sends: FloatArray,
) -> float:
    """The makespan, -1 where the orders do not run; fills the counts of `Path`."""
    count = len(orders)
    start = np.empty(count)
    end = np.empty(count)
    sequence = np.empty(count, dtype=np.int64)
    ran = kernel.run_orders(
        orders, offsets, num_stages, num_microbatches, placement, times, sends_s, route, start, end, sequence
    )
    if ran < count:
        return -1.0
    # The place of each unit's forward, and of what makes its gradient.
    forward = np.full(num_stages * num_microbatches, -1)
    gradient = np.full(num_stages * num_microbatches, -1)
    first = np.zeros(count, dtype=np.uint8)
    for device in range(len(offsets) - 1):
        if offsets[device] < offsets[device + 1]:
            first[offsets[device]] = 1
    for at in range(count):
        kind = orders[at] & 3
        if kind == kernel.F:
            forward[orders[at] >> 2] = at
        elif kind != kernel.W:
            gradient[orders[at] >> 2] = at
    at = 0
    for other in range(count):
        if end[other] > end[at]:
            at = other
    makespan = end[at]
    near = same * makespan
    while True:
        unit = orders[at] >> 2
        kind = orders[at] & 3
        stage = unit // num_microbatches
        actions[kind, stage] += 1.0
        if start[at] <= near:
            break
        if first[at] == 0 and end[at - 1] >= start[at] - near:
            at -= 1
            continue
        # It waited for another stage: the only other reason to start late.
        if kind == kernel.F:
            sends[0, stage - 1] += 1.0
            at = forward[unit - num_microbatches]
        else:
            sends[1, stage + 1] += 1.0
            at = gradient[unit + num_microbatches]
    return float(makespan)
