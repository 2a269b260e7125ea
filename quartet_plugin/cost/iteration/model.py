"""An iteration's seconds and their slopes by the logarithms of the coefficients, for any plan.

A `Coefficient` multiplies each cause of a stage's time. The actions run in the plan's order, slowed down as
the slots of the plan's mapping are, so that every plan of a space has seconds and slopes: all that the
posterior of the coefficients needs. The terms and the replay are those of `cost.predict`; with every
coefficient at 1, on equal devices, so are the seconds. `log_coefficients` [num_coefficients] are logarithms
throughout. See docs/search.md.
"""

from collections.abc import Sequence

import numpy as np

from quartet_plugin.cost.coefficients import INDEX, Coefficient, MachineModel
from quartet_plugin.cost.constants import ClusterConstants
from quartet_plugin.cost.core_sharing import core_sharing_of
from quartet_plugin.cost.iteration.kernel import (
    UNSLOWED,
    pipeline_time,
    scaled_sends,
    stage_times,
    stage_work,
)
from quartet_plugin.cost.iteration.orders import (
    OrderedActions,
    WeightedOrders,
    device_of_stages,
)
from quartet_plugin.cost.iteration.plan_terms import (
    PART_OF,
    UNSLOWED_PARTS,
    UnitArrays,
    sends_of,
    slowdown_indices,
    stage_seconds,
    step_seconds,
    step_terms_of,
)
from quartet_plugin.cost.iteration.replay import DEADLOCK, blocks_on_sends, both_ways, makespans, with_sends
from quartet_plugin.cost.iteration.step import (
    RowPrediction,
    contention_gain,
    pipeline_terms,
    straggler_share,
    summed,
)
from quartet_plugin.cost.iteration.terms import StageParts
from quartet_plugin.cost.run import (
    TrainingRun,
)
from quartet_plugin.cost.times import Times
from quartet_plugin.errors import PlanError
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.plan import Plan

_LINKS = [INDEX[link] for link in (Coefficient.TRANSFER, Coefficient.NETWORK, Coefficient.LATENCY)]
_NO_ORDER = np.zeros(0, dtype=np.int64)


class IterationModel:
    """One plan's iteration: evaluated under any coefficients."""

    def __init__(
        self,
        plan: Plan,
        *,
        machine_model: MachineModel,
        run: TrainingRun,
        units: UnitArrays,
        links: tuple[float, float, float],
        orders: WeightedOrders,
    ) -> None:
        self.run = run
        self._machine_model, self._units, self._orders = machine_model, units, orders
        self._is_custom = plan.schedule.custom is not None
        self._is_blocking = blocks_on_sends(run)
        ranks, num_stages = plan.layout.pipeline_parallel, plan.layout.num_stages
        self._placement = np.array(device_of_stages(run), dtype=np.int64)
        self._compute, self._unslowed = stage_seconds(run, units)
        self._core_sharing = core_sharing_of(plan, machine_model.nodes)
        self._no_core_slowdown = np.ones(ranks)
        self._last_core_slowdown: tuple[bytes, FloatArray] | None = None
        indices = slowdown_indices(plan, machine_model)
        self._slot_indices = np.zeros((0, 0), dtype=np.int64) if indices is None else indices
        self._sends = sends_of(plan, run, self._placement, links, machine_model)
        self._step_terms = step_terms_of(
            plan, run, machine_model, self._compute.sum(axis=0) + self._unslowed.sum(axis=0)
        )
        constants = machine_model.constants
        self._step = step_seconds(self._step_terms, machine_model)
        self._counts = np.full((3, num_stages), float(plan.num_microbatches))
        self._share = 1.0 + straggler_share(run, constants)
        if isinstance(constants, ClusterConstants):
            self._share *= constants.residual
        self._gain = contention_gain(run.software, run.cluster, constants)

    @property
    def step_seconds(self) -> FloatArray:
        """Seconds once an iteration under coefficients of 1 [num_coefficients]."""
        return self._step

    @property
    def share(self) -> float:
        """The iteration over the sum of its terms: stragglers, and what no term explains."""
        return self._share

    def evaluate(self, log_coefficients: FloatArray) -> tuple[float, FloatArray]:
        """Seconds an iteration, and their slopes by `log_coefficients`.

        Raises PlanError for orders that do not run.
        """
        return self._evaluate(np.exp(log_coefficients), core_slowdown=self._core_slowdown(log_coefficients))

    def seconds(self, points: FloatArray) -> FloatArray:
        """The seconds of `evaluate` at each of `points` [num, num_coefficients].

        They are replayed together where nothing but the order of actions decides the time.
        """
        if self._core_sharing is not None or self._gain:
            return np.array([self.evaluate(point)[0] for point in points])
        scales = np.exp(points)
        times, delays = stage_times(
            scales,
            self._compute,
            self._unslowed,
            self._slot_indices,
            self._no_core_slowdown,
            self._placement,
            self._sends,
            self._is_blocking,
            self._is_custom,
        )
        pipeline = self._makespans(times, delays)
        if len(self._orders) > 1:
            pipeline = np.maximum(pipeline, self._busiest(times))
        seconds: FloatArray = self._share * (pipeline + (scales * self._step).sum(axis=1))
        return seconds

    def _makespans(self, times: FloatArray, delays: FloatArray) -> FloatArray:
        """The pipeline's seconds under several times of its stages [num]: see `replay.makespans`."""
        if not self._orders:
            total: FloatArray = np.einsum("ds,dsn->n", self._counts, times[:3])
            return total
        seconds = np.zeros(times.shape[2])
        for order, weight in self._orders:
            spans = makespans(
                order.orders,
                order.sequence,
                order.num_devices,
                order.placement,
                order.num_microbatches,
                times,
                delays,
            )
            if spans.min() < 0.0:
                raise PlanError(DEADLOCK)
            seconds += weight * spans
        return seconds

    def _busiest(self, times: FloatArray) -> FloatArray:
        """Seconds of work of the busiest rank under several times of the stages [num]."""
        by_rank = np.zeros((self.run.layout.pipeline_parallel, times.shape[2]))
        np.add.at(by_rank, self._placement, times[:3].sum(axis=0))
        busiest: FloatArray = self.run.num_microbatches * by_rank.max(axis=0)
        return busiest

    def predict(self, log_coefficients: FloatArray) -> RowPrediction:
        """The iteration's terms under any coefficients; they sum to the seconds of `evaluate`."""
        scale, num_stages = np.exp(log_coefficients), len(self._placement)
        slowdown = self._core_slowdown(log_coefficients)
        if len(self._slot_indices):
            slowdown = slowdown * scale[self._slot_indices].max(axis=1)
        units = self._units.parts
        stages: list[StageParts] = []
        for stage, counts in enumerate(self.run.layer_counts):
            held: list[tuple[StageParts, int, Coefficient | None]] = [
                *((layer, count, None) for layer, count in zip(units.layers, counts, strict=True)),
                (units.action, 1, None),
            ]
            if stage == 0:
                held.append((units.embedding, 1, Coefficient.EMBEDDING))
            if stage == num_stages - 2 and self.run.is_mtp_before_last:
                held.append((units.further, 1, None))
            if stage == num_stages - 1:
                held.append((units.head, 1, Coefficient.HEAD))
            stages.append(self._scaled(held, scale, float(slowdown[self._placement[stage]])))
        forward_s, backward_s = both_ways(scale[_LINKS] @ self._sends)
        pipeline = pipeline_terms(
            self.run, self._machine_model.constants, stages, forward_s=forward_s, backward_s=backward_s
        )
        step = {
            name: float(scale[INDEX[coefficient]]) * seconds
            for coefficient, terms in self._step_terms.items()
            for name, seconds in terms.items()
        }
        return summed(self.run, self._machine_model.constants, pipeline, step)

    def _scaled(
        self, held: Sequence[tuple[StageParts, int, Coefficient | None]], scale: FloatArray, slowdown: float
    ) -> StageParts:
        """The parts of what a stage holds, each so often, under the coefficients `scale`."""
        speed = scale[INDEX[Coefficient.SPEED]] * slowdown
        if self._is_custom:
            speed *= scale[INDEX[Coefficient.RUNTIME]]
        directions = (1.0, scale[INDEX[Coefficient.INPUT_GRAD]], scale[INDEX[Coefficient.WEIGHT_GRAD]])
        stage: StageParts = {}
        for unit, count, end in held:
            for name, times in unit.items():
                if name in UNSLOWED_PARTS:
                    added = times.scaled(count * float(scale[UNSLOWED[UNSLOWED_PARTS.index(name)]]))
                else:
                    factor = count * speed * scale[INDEX[end or PART_OF[name]]]
                    added = Times(*(float(t * factor * d) for t, d in zip(times, directions, strict=True)))
                stage[name] = stage[name].plus(added) if name in stage else added
        return stage

    def _evaluate(self, scale: FloatArray, *, core_slowdown: FloatArray) -> tuple[float, FloatArray]:
        seconds, slopes = self._pipeline(scale, core_slowdown=core_slowdown)
        if self._gain and self._orders:
            # Ranks that share a memory gain by each other's waiting.
            busy_slopes = np.zeros(len(scale))
            busy = self._time(scale, busy_slopes, core_slowdown=core_slowdown, counts=self._counts)
            ranks = self.run.layout.pipeline_parallel
            waits = self.run.layout.world_size / (self.run.layout.world_size - 1)
            if waits * (seconds - busy / ranks) > seconds:
                seconds, slopes = (1 - self._gain) * seconds, (1 - self._gain) * slopes
            else:
                seconds -= self._gain * waits * (seconds - busy / ranks)
                slopes -= self._gain * waits * (slopes - busy_slopes / ranks)
        step = scale * self._step
        return self._share * (seconds + float(step.sum())), self._share * (slopes + step)

    def _pipeline(self, scale: FloatArray, *, core_slowdown: FloatArray) -> tuple[float, FloatArray]:
        """The pipeline's seconds and slopes: of all microbatches one by one, or of the weighted orders."""
        slopes = np.zeros(len(scale))
        if not self._orders:
            return self._time(scale, slopes, core_slowdown=core_slowdown, counts=self._counts), slopes
        seconds = 0.0
        for order, weight in self._orders:
            slopes_of_order = np.zeros(len(scale))
            span = self._time(scale, slopes_of_order, core_slowdown=core_slowdown, order=order)
            if span < 0.0:
                raise PlanError(DEADLOCK)
            seconds += weight * span
            slopes += weight * slopes_of_order
        if len(self._orders) > 1:
            return self._at_least_busy(seconds, slopes, scale, core_slowdown)
        return seconds, slopes

    def _at_least_busy(
        self, seconds: float, slopes: FloatArray, scale: FloatArray, core_slowdown: FloatArray
    ) -> tuple[float, FloatArray]:
        """The extrapolated seconds, or those of the busiest rank where the line is less steep."""
        work, _, _ = stage_work(
            scale,
            self._compute,
            self._unslowed,
            self._slot_indices,
            core_slowdown,
            self._placement,
            self._is_custom,
        )
        times, _ = with_sends(work, scaled_sends(scale, self._sends), self._is_blocking)
        busy = times[:3].sum(axis=0)
        by_rank = self.run.num_microbatches * np.bincount(self._placement, weights=busy)
        if by_rank.max() <= seconds:
            return seconds, slopes
        counts = self._counts * (self._placement == by_rank.argmax())
        slopes_of_rank = np.zeros(len(scale))
        busiest = self._time(scale, slopes_of_rank, core_slowdown=core_slowdown, counts=counts)
        return busiest, slopes_of_rank

    def _core_slowdown(self, log_coefficients: FloatArray) -> FloatArray:
        """The slowdown of each rank's compute by core sharing [pp]."""
        if self._core_sharing is None:
            return self._no_core_slowdown
        key = log_coefficients.tobytes()
        if self._last_core_slowdown is None or self._last_core_slowdown[0] != key:
            scale = np.exp(log_coefficients)
            slowdown = self._core_sharing.consistent_slowdown(
                self._work(scale),
                span_s=lambda core_slowdown: self._evaluate(scale, core_slowdown=core_slowdown)[0],
            )
            self._last_core_slowdown = (key, slowdown)
        return self._last_core_slowdown[1]

    def _work(self, scale: FloatArray) -> FloatArray:
        """Seconds of compute of each pipeline rank in an iteration, alone on its cores [pp]."""
        work = np.zeros(len(self._no_core_slowdown))
        for stage, rank in enumerate(self._placement):
            counts = np.zeros_like(self._counts)
            counts[:, stage] = self._counts[:, stage]
            slopes = np.zeros(len(scale))
            work[rank] += self._time(
                scale, slopes, core_slowdown=self._no_core_slowdown, counts=counts, has_sends=False
            )
        return work

    def shares_cores(self, stage: int) -> bool:
        """Whether a stage's processes share cores, so that an action's time depends on other processes."""
        sharing = self._core_sharing
        return sharing is not None and bool(sharing.greatest_slowdown[self._placement[stage]] > 1.0)

    def evaluate_action(
        self, log_coefficients: FloatArray, *, stage: int, directions: Sequence[int]
    ) -> tuple[float, FloatArray]:
        """Seconds of a stage's action that computes `directions` (0 forward, 1 input, 2 weight gradient).

        The second value is their slopes by `log_coefficients`.
        """
        counts = np.zeros_like(self._counts)
        counts[list(directions), stage] = 1.0
        slopes = np.zeros(len(log_coefficients))
        core_slowdown = self._core_slowdown(log_coefficients)
        seconds = self._time(
            np.exp(log_coefficients), slopes, core_slowdown=core_slowdown, counts=counts, has_sends=False
        )
        return seconds, slopes

    def _time(
        self,
        scale: FloatArray,
        slopes: FloatArray,
        *,
        core_slowdown: FloatArray,
        counts: FloatArray | None = None,
        order: OrderedActions | None = None,
        has_sends: bool = True,
    ) -> float:
        return pipeline_time(
            scale,
            self._compute,
            self._unslowed,
            self._slot_indices,
            core_slowdown,
            self._placement,
            self._sends,
            self._is_blocking and has_sends,
            self._is_custom,
            self._counts if counts is None else counts,
            _NO_ORDER if order is None else order.orders,
            _NO_ORDER if order is None else order.offsets,
            0 if order is None else order.num_microbatches,
            slopes,
        )
