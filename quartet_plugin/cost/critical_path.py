"""The makespan of a schedule, and the counts of actions and transfers on its critical path.

A makespan is the sum of the actions and transfers on one path through the schedule, so the counts of each
stage's actions on that path are its derivatives by their times: one simulation gives a time and all its
slopes.
"""

import numpy as np

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.plan import Plan
from quartet_plugin.schedule import kernel
from quartet_plugin.schedule.choice import generated, written_of
from quartet_plugin.schedule.compilation import compiled
from quartet_plugin.schedule.kernel import Lanes
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import flatten

# Rounds of microbatches that are simulated action by action, and the last ones of them, which give the rate
# beyond: some orders repeat only after several rounds.
FULL_ROUNDS, FOLDED_ROUNDS = 8, 2
# Two times count as equal within this part of the makespan.
SAME = 1e-9


class OrderedActions:
    """A schedule's orders as flat arrays: made once, run with any times. One copy of the model only."""

    def __init__(self, schedule: Schedule) -> None:
        self.num_microbatches = schedule.num_microbatches
        self.num_stages = schedule.num_stages
        self.placement = np.asarray(schedule.placement, dtype=np.int64)
        self.orders, self.offsets = flatten(schedule)


def orders_of(plan: Plan) -> tuple[tuple[OrderedActions, float], ...]:
    """The plan's orders with their weights: many microbatches are extrapolated from two shorter orders.

    Empty without a pipeline.
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


def folded_counts(count: int, *, unit: int) -> tuple[int, int] | None:
    """Two smaller numbers of microbatches to extrapolate from, ascending; None where `count` is small.

    The order repeats every `unit` microbatches.
    """
    if count <= (FULL_ROUNDS + 1) * unit:
        return None
    longer = FULL_ROUNDS * unit + count % unit
    return longer - FOLDED_ROUNDS * unit, longer


def folded(count: int, *, unit: int) -> list[tuple[int, float]]:
    """The numbers of microbatches to simulate for `count`, with their weights."""
    counts = folded_counts(count, unit=unit)
    if counts is None:
        return [(count, 1.0)]
    shorter, longer = counts
    beyond = (count - longer) / (longer - shorter)
    return [(longer, 1.0 + beyond), (shorter, -beyond)]


@compiled
def critical_path(
    orders: IntArray,
    offsets: IntArray,
    placement: IntArray,
    route: IntArray,
    times_s: FloatArray,
    sends_s: FloatArray,
    same: float,
    actions: FloatArray,
    sends: FloatArray,
) -> float:
    """The makespan in seconds, -1 where the orders do not run.

    `times_s` [4, num_stages] are by kind; `sends_s[0, s]` is from stage s to s + 1, `sends_s[1, s]` from s
    to s - 1. The counts on the path are added to `actions` [4, num_stages] and `sends` [2, num_stages].
    Two times count as equal within the part `same` of the makespan.
    """
    count = len(orders)
    num_stages, num_microbatches = len(placement), len(route)
    lanes = Lanes(num_stages, num_microbatches, placement, times_s, sends_s, np.zeros(num_stages), 0.0, route)
    ran, start, end, _ = kernel.run_orders(orders, offsets, lanes)
    if ran < count:
        return -1.0
    # The position of each unit's forward, and of the action that makes its gradient.
    forward = np.full(num_stages * num_microbatches, -1)
    gradient = np.full(num_stages * num_microbatches, -1)
    first = np.zeros(count, dtype=np.uint8)
    for device in range(len(offsets) - 1):
        if offsets[device] < offsets[device + 1]:
            first[offsets[device]] = 1
    for position in range(count):
        kind = orders[position] & 3
        if kind == kernel.F:
            forward[orders[position] >> 2] = position
        elif kind != kernel.W:
            gradient[orders[position] >> 2] = position
    position = 0
    for other in range(count):
        if end[other] > end[position]:
            position = other
    makespan = end[position]
    tolerance = same * makespan
    while True:
        unit = orders[position] >> 2
        kind = orders[position] & 3
        stage = unit // num_microbatches
        actions[kind, stage] += 1.0
        if start[position] <= tolerance:
            break
        if first[position] == 0 and end[position - 1] >= start[position] - tolerance:
            position -= 1
            continue
        # It waited for another stage: the only other reason to start late.
        if kind == kernel.F:
            sends[0, stage - 1] += 1.0
            position = forward[unit - num_microbatches]
        else:
            sends[1, stage + 1] += 1.0
            position = gradient[unit + num_microbatches]
    return float(makespan)
