"""The orders of a run's actions, by named schedule or as a plan carries them, and which stages a rank holds.

Beyond a few rounds of microbatches an order repeats, so its makespan grows by the same time every round: two
short orders, weighted, stand for any number of microbatches. On very unequal stages the rhythm may be no
divisor of a round, or change later; tests/cost/iteration/test_orders.py states the error.
"""

import functools

import numpy as np

from quartet_plugin.cost.run import ScheduleKind, TrainingRun
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.custom_schedule import CustomSchedule
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import ScheduleChoice
from quartet_plugin.schedule import kernel
from quartet_plugin.schedule import placement as places
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.choice import generated, written_of
from quartet_plugin.schedule.compilation import compiled, inner
from quartet_plugin.schedule.kernel import Lanes
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.placement import Placement, PlacementKind
from quartet_plugin.schedule.schedule import Schedule, marked_parts
from quartet_plugin.schedule.simulate import flatten

# Rounds of microbatches that are simulated action by action, and the last ones of them, which give the rate
# beyond: some orders repeat only after several rounds.
FULL_ROUNDS, FOLDED_ROUNDS = 8, 2
# Rounds of microbatches after which memory has reached its peak, or grows alike with every round.
MEMORY_ROUNDS = 4


class OrderedActions:
    """A schedule's orders as flat arrays: made once, run with any times. One copy of the model only."""

    def __init__(self, schedule: Schedule) -> None:
        self.num_microbatches = schedule.num_microbatches
        self.num_stages = schedule.num_stages
        self.num_devices = schedule.num_devices
        self.placement = np.asarray(schedule.placement, dtype=np.int64)
        self.orders, self.offsets = flatten(schedule)
        self.parts = marked_parts(schedule)

    @functools.cached_property
    def sequence(self) -> IntArray:
        """The indices of the actions, each after all that it waits for; some where the orders do not run.

        Pairs are left out of account: their parts wait for one another as single actions do.
        """
        return _sequence(self.orders, self.offsets, self.placement, self.num_microbatches)


@inner
def lanes_of(
    placement: IntArray, route: IntArray, times_s: FloatArray, sends_s: FloatArray, exchange_s: FloatArray
) -> Lanes:
    """The lanes of stages that hold no memory; the arguments are those of `Lanes`."""
    num_stages = len(placement)
    no_bytes = np.zeros(num_stages)
    return Lanes(num_stages, len(route), placement, times_s, sends_s, no_bytes, 0.0, route, exchange_s)


@compiled
def _sequence(orders: IntArray, offsets: IntArray, placement: IntArray, num_microbatches: int) -> IntArray:
    """The indices of the actions that run, as a replay without times reaches them."""
    route = np.zeros(num_microbatches, dtype=np.int64)
    none, no_sends = np.zeros((4, len(placement))), np.zeros((2, len(placement)))
    lanes = lanes_of(placement, route, none, no_sends, no_sends)
    ran, _, _, sequence = kernel.run_orders(orders, offsets, np.empty(0, dtype=np.uint8), lanes)
    return sequence[:ran]


WeightedOrders = tuple[tuple[OrderedActions, float], ...]


def device_of_stages(run: TrainingRun) -> Placement:
    """The pipeline rank of each stage under the run's schedule."""
    if run.custom is not None:
        return run.custom.placement
    return _placement(
        run.layout.pipeline_parallel, run.layout.virtual_stages, _has_snake_placement(run.schedule)
    )


def stages_of_devices(run: TrainingRun) -> tuple[tuple[int, ...], ...]:
    """The stages of each pipeline rank, in model order."""
    return _stages(run.layout.pipeline_parallel, device_of_stages(run))


@functools.cache
def _has_snake_placement(kind: ScheduleKind) -> bool:
    """Whether the stages of one chunk after the other run to and fro over the devices."""
    return kind.spec is not None and kind.spec.placement in (PlacementKind.V, PlacementKind.SNAKE)


@functools.lru_cache(maxsize=512)
def _placement(num_devices: int, num_chunks: int, is_snake: bool) -> Placement:
    return places.snake(num_devices, num_chunks) if is_snake else places.loop(num_devices, num_chunks)


@functools.lru_cache(maxsize=512)
def _stages(num_devices: int, placement: Placement) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(stages) for stages in places.stages_of_device(placement, num_devices))


def folded_counts(num_microbatches: int, *, unit: int) -> tuple[int, int] | None:
    """Two smaller numbers of microbatches to extrapolate from, ascending; None for a small number.

    The order repeats every `unit` microbatches.
    """
    if num_microbatches <= (FULL_ROUNDS + 1) * unit:
        return None
    longer = FULL_ROUNDS * unit + num_microbatches % unit
    return longer - FOLDED_ROUNDS * unit, longer


def folded(num_microbatches: int, *, unit: int, least_rest: int = 0) -> list[tuple[int, float]]:
    """The numbers of microbatches to simulate for `num_microbatches`, with their weights.

    An incomplete round of fewer than `least_rest` microbatches cannot run: between two counts that can, time
    is taken as linear.
    """
    rest = num_microbatches % unit
    if 0 < rest < least_rest:
        lower, upper = (folded(num_microbatches - rest + more, unit=unit) for more in (0, unit))
        if num_microbatches < unit:
            return upper
        share = rest / unit
        return [(size, (1 - share) * w) for size, w in lower] + [(size, share * w) for size, w in upper]
    counts = folded_counts(num_microbatches, unit=unit)
    if counts is None:
        return [(num_microbatches, 1.0)]
    shorter, longer = counts
    beyond = (num_microbatches - longer) / (longer - shorter)
    return [(longer, 1.0 + beyond), (shorter, -beyond)]


def orders_of(run: TrainingRun) -> WeightedOrders:
    """The run's orders with their weights; none without a pipeline."""
    layout, count = run.layout, run.num_microbatches
    if layout.pipeline_parallel == 1 or count == 0:
        return ()
    if run.custom is not None and run.custom.orders is not None:
        return ((ordered(run, count), 1.0),)
    # Megatron runs no group of fewer microbatches than ranks.
    least_rest = layout.pipeline_parallel if run.schedule is ScheduleKind.INTERLEAVED else 0
    sizes = folded(count, unit=_round(run), least_rest=least_rest)
    return tuple((ordered(run, size), weight) for size, weight in sizes)


def ordered(run: TrainingRun, num_microbatches: int) -> OrderedActions:
    """The run's order for `num_microbatches`.

    Raises ConfigError for a schedule that does not exist for these sizes.
    """
    layout, custom = run.layout, run.custom
    if run.schedule is ScheduleKind.CUSTOM:
        assert custom is not None
        # The points of a family compare by what they are made of.
        return _carried(custom, repr(custom.family), layout, num_microbatches)
    return _named(run.schedule, layout.pipeline_parallel, layout.virtual_stages, num_microbatches, run.group)


@functools.lru_cache(maxsize=512)
def _named(
    kind: ScheduleKind, num_devices: int, num_chunks: int, num_microbatches: int, group: int | None
) -> OrderedActions:
    return OrderedActions(
        named(
            kind.value,
            num_devices=num_devices,
            num_microbatches=num_microbatches,
            num_chunks=num_chunks,
            group=group,
        )
    )


@functools.lru_cache(maxsize=512)
def _carried(custom: CustomSchedule, _family: str, layout: Layout, num_microbatches: int) -> OrderedActions:
    written = written_of(custom, num_microbatches=num_microbatches)
    if written is not None:
        return OrderedActions(written)
    choice = ScheduleChoice(name="custom", custom=custom)
    return OrderedActions(generated(choice, layout=layout, num_microbatches=num_microbatches))


def clear_caches() -> None:
    """Forget all orders, for measurements from empty caches."""
    _named.cache_clear()
    _carried.cache_clear()


def _round(run: TrainingRun) -> int:
    """The microbatches after which the run's order repeats."""
    return run.group or run.layout.pipeline_parallel


def activation_peak(run: TrainingRun, stage_bytes: FloatArray, held_bytes: FloatArray) -> FloatArray:
    """The schedule's peak activation bytes on each device.

    A stage keeps `stage_bytes` [num_stages] of a microbatch from F to B or I, `held_bytes` [num_stages] from
    I to W. Beyond a few rounds the peak is steady, or grows alike with every round where all forwards come
    first.
    """
    devices, count, unit = run.layout.pipeline_parallel, run.num_microbatches, _round(run)
    if devices == 1:
        return np.array([float(stage_bytes.sum())])
    if run.schedule is ScheduleKind.INTERLEAVED:
        count = -(-count // unit) * unit
    longer = MEMORY_ROUNDS * unit + count % unit
    is_written = run.custom is not None and run.custom.orders is not None
    if count <= longer or is_written:
        return _peak(run, stage_bytes, held_bytes, count)
    peak = _peak(run, stage_bytes, held_bytes, longer)
    if run.schedule is not ScheduleKind.CUSTOM:
        growth = peak - _peak(run, stage_bytes, held_bytes, longer - unit)
        peak = peak + growth * (count - longer) / unit
    return peak


def _peak(
    run: TrainingRun, stage_bytes: FloatArray, held_bytes: FloatArray, num_microbatches: int
) -> FloatArray:
    order = ordered(run, num_microbatches)
    # Bytes by kind of action and stage.
    changes = np.zeros((4, len(stage_bytes)))
    changes[ActionKind.F], changes[ActionKind.B] = stage_bytes, -stage_bytes
    changes[ActionKind.I], changes[ActionKind.W] = held_bytes - stage_bytes, -held_bytes
    steps = changes[order.orders & 3, (order.orders >> 2) // num_microbatches]
    # Devices run as many actions each, unless the order was written by hand.
    if (np.diff(order.offsets) == order.offsets[1]).all():
        peaks: FloatArray = steps.reshape(len(order.offsets) - 1, -1).cumsum(axis=1).max(axis=1)
        return peaks
    return np.array([part.cumsum().max() for part in np.split(steps, order.offsets[1:-1])])
