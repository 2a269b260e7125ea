"""Predicts every plan of a space: the iteration model, corrected by each finished trial.

The iteration model under its assumed coefficients is the prior's mean. Every measured iteration, and every
action that the ranks recorded, corrects the coefficients; residuals that no coefficient explains are shared
by similar plans. A prediction has a spread. It depends on the finished trials alone, in whatever process they
are read again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from quartet_plugin.calibration.feasibility import FeasibilityModel
from quartet_plugin.calibration.machine_prior import LINKS
from quartet_plugin.calibration.observations import LEAST_NOISE, MeasuredAction, action_times, launch_noise
from quartet_plugin.calibration.plan_gp import Groups, Residuals
from quartet_plugin.calibration.posterior import UNLIKE_ODDS, Measured, PosteriorSample, fit
from quartet_plugin.cost.coefficients import COEFFICIENTS, INDEX, Coefficient, MachineModel
from quartet_plugin.cost.iteration.cache import IterationModelCache
from quartet_plugin.cost.iteration.model import IterationModel
from quartet_plugin.cost.iteration.split_model import CalibratedSplits, SplitModel
from quartet_plugin.cost.iteration.step import RowPrediction
from quartet_plugin.errors import QuartetError
from quartet_plugin.mapping.orders import slots_of
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial

# Relative deviations beside the noise of launches: of a trial that was cut short, and of one that ran in
# another study.
CUT_NOISE = 0.06
OTHER_RUN_NOISE = 0.04
# Of a depth proxy's time, beside the iteration model's difference between the two depths.
DEPTH_PROXY_NOISE = 0.03
# Of an action's recorded median: actions of a stage are no exact multiples of its layers.
ACTION_NOISE = 0.06
# Finished trials whose times are used: the baseline and the latest.
MAX_MEASURED = 200
# Split models that are kept.
MAX_KEPT = 20_000

# Where the search for the coefficients starts: at what is assumed, and where head, links or actions are far
# off.
STARTS: tuple[Mapping[Coefficient, float], ...] = (
    {},
    {Coefficient.HEAD: 3.0},
    {Coefficient.HEAD: 1.0 / 3.0},
    dict.fromkeys(LINKS, 10.0),
    {Coefficient.HEAD: 3.0, **dict.fromkeys(LINKS, 10.0)},
    {Coefficient.ACTION: 10.0, Coefficient.LAUNCH: 3.0},
)
# And where one slot is this much faster than the others, for each of the first slots.
FAST_SLOT, MAX_SLOT_STARTS = 0.5, 4

FolderOf = Callable[[int], Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrediction:
    """A predicted iteration; `spread` is a standard deviation of its logarithm, without a launch's noise.

    `posterior_samples` holds each sample's weight, logarithm of seconds and spread of that logarithm.
    """

    iteration_s: float
    spread: float
    posterior_samples: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthProxyTime:
    """The measured time of `small`, the depth proxy (fewer layers) of trial `number`'s `plan`.

    `spread` is the relative standard error of `iteration_s`.
    """

    number: int
    plan: Plan
    small: Plan
    iteration_s: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Time:
    """One measured time: of an iteration, or of a stage's action where `action` is set.

    `noise` is its known relative deviation; `extra` adds to the deviation of launches. `log_drift` is the
    logarithm of the machine's speed then over its first, and `node_slowdowns` are the nodes that were slow.
    """

    log_s: float
    noise: float
    extra: float = 0.0
    iteration_model: IterationModel
    action: MeasuredAction | None = None
    log_drift: float = 0.0
    node_slowdowns: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNodes:
    """The nodes that are slow now, by host, and `known`: all that were slow in two launches of the run.

    `drift` is the machine's speed over its first. Of a node that is not `known` nothing that a trial noticed
    is believed.
    """

    slowdowns: Mapping[str, float] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    drift: float = 1.0


class PlanPredictor:
    """The posterior of a study: predicts iterations from the trials that it learned.

    `folder_of` gives a trial's folder, where its ranks left their records; `feasibility` predicts whether a
    plan runs at all.
    """

    def __init__(
        self, machine_model: MachineModel, *, num_iterations: int, folder_of: FolderOf | None = None
    ) -> None:
        self.feasibility = FeasibilityModel(machine_model)
        self.machine_model = machine_model
        self._num_iterations = num_iterations
        self._folder_of = folder_of
        self._model_cache = IterationModelCache(machine_model)
        self._split_models: dict[object, SplitModel] = {}
        self._assumed_s: dict[object, float | None] = {}
        self._residuals = Residuals()
        self._trials: dict[int, FinishedTrial] = {}
        self._times: dict[int, tuple[_Time, ...]] = {}
        self._learned: set[int] = set()
        self._above_limit: set[int] = set()
        self._num_learned = 0
        self._depth_proxies: dict[int, tuple[Plan, _Time]] = {}
        self._samples: list[PosteriorSample] = []
        # Of every plan that was predicted with these samples.
        self._seconds: tuple[list[PosteriorSample], dict[object, FloatArray]] | None = None
        self._groups: Groups | None = None
        self._slow_nodes = SlowNodes()
        # By how much the drift that slow nodes explain is taken out of predictions.
        self._log_drift = 0.0

    @property
    def slow_nodes(self) -> SlowNodes:
        """The nodes that are slow now: plans are predicted as they run on these.

        The seconds are those of the machine at its first speed, as trials are compared.
        """
        return self._slow_nodes

    @slow_nodes.setter
    def slow_nodes(self, slow_nodes: SlowNodes) -> None:
        if slow_nodes != self._slow_nodes:
            self._slow_nodes = slow_nodes
            self._num_learned += 1
            self._samples = []

    def learn(self, trials: Sequence[FinishedTrial]) -> None:
        """Learn the trials that are new; those that repeat another trial's measurement add nothing."""
        for trial in trials:
            record = trial.record
            if trial.number in self._learned or record.repeats is not None:
                continue
            self._learned.add(trial.number)
            self._num_learned += 1
            self.feasibility.learn(trial)
            if record.verdict == "measured" and self.feasibility.exceeds_limit(trial):
                self._above_limit.add(trial.number)
            is_full = record.verdict == "measured" and not record.is_depth_proxy
            if is_full and record.iteration_s is not None and self.knows(trial.plan):
                self._trials[trial.number] = trial
                self._times[trial.number] = tuple(self._times_of(trial))
                self._samples = []

    def learn_depth_proxy(self, proxy: DepthProxyTime) -> None:
        """Learn the time of a trial's depth proxy, once a trial; `knows` must hold for both plans."""
        time = _Time(
            log_s=math.log(proxy.iteration_s),
            noise=math.hypot(LEAST_NOISE, proxy.spread),
            extra=DEPTH_PROXY_NOISE,
            iteration_model=self._model_cache.of(proxy.small),
        )
        self._depth_proxies[proxy.number] = (proxy.plan, time)
        self._num_learned += 1
        self._samples = []

    def knows(self, plan: Plan) -> bool:
        """Whether the iteration model can predict the plan: some orders of actions it cannot."""
        return self._assumed_seconds(plan) is not None

    def relative_cost(self, plan: Plan, *, baseline: Plan) -> float | None:
        """The plan's time for equal model FLOPs over the baseline's under the coefficients before any trial.

        None where one of the two cannot be predicted.
        """
        seconds, baseline_s = self._assumed_seconds(plan), self._assumed_seconds(baseline)
        if seconds is None or baseline_s is None:
            return None
        work = plan.shape.model_flops_per_sequence / baseline.shape.model_flops_per_sequence
        return seconds / (baseline_s * work)

    def _assumed_seconds(self, plan: Plan) -> float | None:
        """Seconds per iteration with all coefficients at their assumed values; None without a prediction."""
        key = plan.identity
        if key not in self._assumed_s:
            self._assumed_s[key] = None
            with suppress(QuartetError):
                assumed = np.zeros(self.machine_model.num_coefficients)
                seconds, _ = self._model_cache.of(plan).evaluate(assumed)
                self._assumed_s[key] = seconds if seconds > 0.0 else None
        return self._assumed_s[key]

    @property
    def is_ready(self) -> bool:
        """Whether anything was measured."""
        return bool(self._trials)

    @property
    def num_learned(self) -> int:
        """The number of calibrations; predictions change only with this number."""
        return self._num_learned

    @property
    def measured(self) -> dict[int, Plan]:
        """The measured plans by the numbers of their trials, in order."""
        return {number: self._trials[number].plan for number in sorted(self._trials)}

    @property
    def above_limit(self) -> frozenset[int]:
        """The measured trials whose peak is above the user's memory limit: the command's own, trial 0."""
        return frozenset(self._above_limit)

    def predict(self, plans: Sequence[Plan]) -> list[PlanPrediction]:
        """The predicted iterations of plans for which `knows` holds. Something must have been measured."""
        if not plans:
            return []
        samples = self.posterior_samples()
        assert self._groups is not None
        groups = self._residuals.groups(plans)
        shared = np.zeros((len(plans), len(samples[0].weighted)))
        shared[:, : len(self._groups)] = self._residuals.covariance(groups, self._groups)
        variance = self._residuals.variance(groups)
        log_s, spread = np.empty((len(samples), len(plans))), np.empty((len(samples), len(plans)))
        seconds = np.array([self._seconds_of(plan) for plan in plans]).T
        for index, sample in enumerate(samples):
            log_s[index], spread[index] = sample.correct(
                np.log(seconds[index]), shared=shared, variance=variance
            )
        return _mixed(np.array([sample.weight for sample in samples]), log_s, spread)

    def predict_terms(self, plan: Plan) -> RowPrediction:
        """The predicted iteration of a plan for which `knows` holds, with its terms.

        They are those of the most likely coefficients; the term `residual_s` has what is left to the seconds
        of `predict`, so that they sum to these.
        """
        model = self._model_cache.of(plan).predict(self.posterior_samples()[0].point)
        seconds = self.predict([plan])[0].iteration_s
        residual_s = model.terms.get("residual_s", 0.0) + seconds - model.iter_time_s
        return replace(model, iter_time_s=seconds, terms={**model.terms, "residual_s": residual_s})

    def most_likely_s(self, plans: Sequence[Plan]) -> list[float]:
        """Seconds an iteration under the most likely coefficients, without residuals: for ordering plans."""
        return [float(self._seconds_of(plan)[0]) for plan in plans]

    def _seconds_of(self, plan: Plan) -> FloatArray:
        """Seconds an iteration under each sample of the posterior, without residuals [num_samples]."""
        samples, key = self.posterior_samples(), plan.identity
        if self._seconds is None or self._seconds[0] is not samples:
            self._seconds = (samples, {})
        seconds = self._seconds[1]
        if key not in seconds:
            points = np.array([sample.point for sample in samples])
            seconds[key] = self._model_cache.of(plan).seconds(points) * math.exp(self._log_drift)
        return seconds[key]

    def split_model(self, plan: Plan) -> CalibratedSplits | None:
        """The plan's model for any split and mapping as calibrated; None without a pipeline."""
        if plan.layout.pipeline_parallel == 1:
            return None
        return CalibratedSplits(model=self._split_model(plan), point=self.posterior_samples()[0].point)

    def assumed_split_model(self, plan: Plan) -> CalibratedSplits | None:
        """The plan's model for any split with coefficients as assumed; None without a pipeline."""
        if plan.layout.pipeline_parallel == 1:
            return None
        point = np.zeros(self.machine_model.num_coefficients)
        return CalibratedSplits(model=self._split_model(plan), point=point)

    def assumed_s(self, plan: Plan) -> float:
        """Seconds an iteration with coefficients at their assumed values; `knows` must hold for the plan."""
        return float(
            self._model_cache.of(plan).seconds(np.zeros((1, self.machine_model.num_coefficients)))[0]
        )

    def _split_model(self, plan: Plan) -> SplitModel:
        custom = plan.schedule.custom
        family = None if custom is None else repr(custom.family)
        share = self._model_cache.recomputed_share(plan)
        key = (plan.shape, plan.layout, plan.schedule, family, share, plan.split.mtp_before_last)
        if key not in self._split_models:
            if len(self._split_models) >= MAX_KEPT:
                self._split_models.clear()
            self._split_models[key] = self._model_cache.split_model(plan)
        return self._split_models[key]

    def similarity(self, plans: Sequence[Plan], others: Sequence[Plan]) -> FloatArray:
        """The share of each plan's residual that it has in common with the nearest of `others` [plans]."""
        if not plans or not others:
            return np.zeros(len(plans))
        groups = self._residuals.groups(plans)
        shared = self._residuals.covariance(groups, self._residuals.groups(others)).max(axis=1)
        similarity: FloatArray = shared / self._residuals.variance(groups)
        return similarity

    def posterior_samples(self) -> list[PosteriorSample]:
        """The samples of the coefficients' posterior, the most likely one first."""
        if not self._samples:
            self._samples = self._fit()
        return self._samples

    def coefficient_covariance(self) -> FloatArray:
        """The covariance of the coefficients' logarithms [k, k] about the most likely point (Laplace's).

        Unlike the samples it holds all of what is not known of a coefficient that no trial shows.
        """
        self.posterior_samples()
        return self._coefficient_covariance

    def _times_of(self, trial: FinishedTrial) -> list[_Time]:
        record, plan = trial.record, trial.plan
        assert record.iteration_s is not None
        model = self._model_cache.of(plan)
        is_cut = record.is_cut or (
            record.num_iterations is not None and record.num_iterations < self._num_iterations
        )
        extra = math.hypot(CUT_NOISE * is_cut, OTHER_RUN_NOISE * (record.source is not None))
        time = _Time(
            log_s=math.log(record.iteration_s),
            noise=math.hypot(LEAST_NOISE, record.spread or 0.0),
            extra=extra,
            iteration_model=model,
            log_drift=math.log(record.drift),
            node_slowdowns=(record.node_slowdowns or {}) if record.source is None else {},
        )
        times = [time]
        if self._folder_of is None or record.source is not None or plan.schedule.custom is None:
            return times
        for action in action_times(self._folder_of(trial.number), attempt_id=record.attempt_id):
            if action.stage < plan.layout.num_stages and not model.shares_cores(action.stage):
                log_s = math.log(action.seconds)
                times.append(replace(time, log_s=log_s, noise=ACTION_NOISE, extra=0.0, action=action))
        return times

    def _fit(self) -> list[PosteriorSample]:
        numbers = sorted(self._trials)
        if len(numbers) > MAX_MEASURED:
            numbers = [numbers[0], *numbers[-MAX_MEASURED + 1 :]]
        proxies = [self._depth_proxies[number] for number in sorted(self._depth_proxies)[-MAX_MEASURED:]]
        iterations = [*(self._times[number][0] for number in numbers), *(time for _, time in proxies)]
        times = [*iterations, *(action for number in numbers for action in self._times[number][1:])]
        num = len(iterations)
        self._groups = self._residuals.groups(
            [*(self._trials[number].plan for number in numbers), *(plan for plan, _ in proxies)]
        )
        noise = np.array([time.noise for time in times])
        between_launches = launch_noise(trial.record for trial in self._trials.values())
        noise[:num] = np.maximum(noise[:num], between_launches)
        noise = np.hypot(noise, [time.extra for time in times])
        covariance = np.zeros((len(times), len(times)))
        covariance[:num, :num] = self._residuals.covariance(self._groups, self._groups)
        # Coefficients are those of the machine at its first measurement.
        first = self._offset(iterations[0].node_slowdowns)
        offsets = [self._offset(time.node_slowdowns) - first for time in times]
        log_s = np.array(
            [
                time.log_s + (0.0 if offset.any() else time.log_drift)
                for time, offset in zip(times, offsets, strict=True)
            ]
        )

        def model(point: FloatArray) -> tuple[FloatArray, FloatArray]:
            return _predicted(times, point, offsets)

        samples = fit(
            model,
            Measured(log_s=log_s, noise=noise, covariance=covariance),
            starts=[self._anchored(iterations[0], start) for start in self._starts()],
            spreads=self.machine_model.spreads,
            slowdowns=slice(len(COEFFICIENTS), None),
            unlike_odds=1.0 if any(node.crowds for node in self.machine_model.nodes) else UNLIKE_ODDS,
        )
        slopes = model(samples[0].point)[1]
        information = slopes.T @ samples[0].inverse @ slopes + np.diag(self.machine_model.spreads**-2.0)
        self._coefficient_covariance = np.linalg.inv(information)
        now = self._offset(self._slow_nodes.slowdowns) - first
        self._log_drift = math.log(self._slow_nodes.drift) if now.any() else 0.0
        return [replace(sample, point=sample.point + now) for sample in samples]

    def _offset(self, slowdowns: Mapping[str, float]) -> FloatArray:
        """The logarithms of slow nodes' slowdowns as an addition to the coefficients' [k]."""
        offset = np.zeros(self.machine_model.num_coefficients)
        known = {host: factor for host, factor in slowdowns.items() if host in self._slow_nodes.known}
        index = self.machine_model.slowdown_index_of_slot
        for place, slot in enumerate(slots_of(self.machine_model.nodes) if known else ()):
            factor = known.get(self.machine_model.nodes[slot.node].host, 1.0)
            if index[place] >= 0:
                offset[index[place]] = math.log(factor)
        return offset

    def _starts(self) -> list[FloatArray]:
        num, first_slot = self.machine_model.num_coefficients, len(COEFFICIENTS)
        starts = [{INDEX[coefficient]: ratio for coefficient, ratio in start.items()} for start in STARTS]
        starts += [{index: FAST_SLOT} for index in range(first_slot, min(num, first_slot + MAX_SLOT_STARTS))]
        points = np.zeros((len(starts), num))
        for point, start in zip(points, starts, strict=True):
            for index, ratio in start.items():
                point[index] = math.log(ratio)
        return list(points)

    def _anchored(self, baseline: _Time, point: FloatArray) -> FloatArray:
        """The point at the machine's speed that the baseline's time implies: it was only assumed before."""
        anchored = point.copy()
        predicted_s = baseline.iteration_model.evaluate(point)[0]
        anchored[INDEX[Coefficient.SPEED]] = baseline.log_s - math.log(predicted_s)
        return anchored


def _mixed(weights: FloatArray, log_s: FloatArray, spread: FloatArray) -> list[PlanPrediction]:
    """The predictions of a mixture: `log_s` and `spread` are [samples, plans]."""
    mean = weights @ log_s
    spread_of_mixture = np.sqrt(weights @ (spread**2 + (log_s - mean) ** 2))
    return [
        PlanPrediction(
            iteration_s=math.exp(mean[plan]),
            spread=float(spread_of_mixture[plan]),
            posterior_samples=tuple(
                zip(weights.tolist(), log_s[:, plan].tolist(), spread[:, plan].tolist(), strict=True)
            ),
        )
        for plan in range(len(mean))
    ]


def _predicted(
    times: Sequence[_Time], point: FloatArray, offsets: Sequence[FloatArray]
) -> tuple[FloatArray, FloatArray]:
    """The logarithms of the predicted times [n], and their slopes by the coefficients' logarithms [n, k].

    `offsets` [n, k] are added to the point, for the nodes that were slow.
    """
    log_s, slopes = np.empty(len(times)), np.empty((len(times), len(point)))
    for index, (time, offset) in enumerate(zip(times, offsets, strict=True)):
        model, action, moved = time.iteration_model, time.action, point + offset
        if action is None:
            seconds, slopes_s = model.evaluate(moved)
        else:
            seconds, slopes_s = model.evaluate_action(moved, stage=action.stage, directions=action.directions)
        log_s[index], slopes[index] = math.log(seconds), slopes_s / seconds
    return log_s, slopes
