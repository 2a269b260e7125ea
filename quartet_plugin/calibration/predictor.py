"""Predicts every plan of a space from what was told: the cost model, corrected by each trial.

The cost model's causes of time are the prior's mean; every told iteration, and every action that the ranks
recorded, corrects their factors, and what no factor explains is shared by plans that are alike. A prediction
says how sure it is. It depends on the told trials alone, in whatever process they are read again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quartet_plugin.calibration.feasibility import FeasibilityModel
from quartet_plugin.calibration.launch_noise import LEAST, launch_noise
from quartet_plugin.calibration.machine_prior import LINKS
from quartet_plugin.calibration.observations import MeasuredAction, action_times
from quartet_plugin.calibration.posterior import Measured, PosteriorSample, fit
from quartet_plugin.calibration.residuals import Groups, Residuals
from quartet_plugin.cost.coefficients import COEFFICIENTS, INDEX, Coefficient, MachineModel
from quartet_plugin.cost.iteration import IterationModel, IterationModelCache, StageLoads
from quartet_plugin.errors import QuartetError
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial

# Deviations, relative, beside those of two launches of one plan: more where one was cut short, or ran in
# another study.
CUT_NOISE = 0.06
OTHER_RUN_NOISE = 0.04
# Of a model with fewer layers, beside what the cost model makes of the difference.
CROP_NOISE = 0.03
# Of an action's time beside its recorded median: actions of a stage are no exact multiples of its layers.
ACTION_NOISE = 0.06
# Finished trials whose times are used: the latest, besides the baseline.
MAX_MEASURED = 200
# Plans whose iteration_model is kept.
MAX_KEPT = 20_000

# Where the search for the factors begins: at what is assumed, and where the ends or the links are far off it.
STARTS: tuple[Mapping[Coefficient, float], ...] = (
    {},
    {Coefficient.HEAD: 3.0},
    {Coefficient.HEAD: 1.0 / 3.0},
    dict.fromkeys(LINKS, 10.0),
    {Coefficient.HEAD: 3.0, **dict.fromkeys(LINKS, 10.0)},
    {Coefficient.ACTION: 10.0, Coefficient.LAUNCH: 3.0},
)
# And where one slot is so much faster than the others.
FAST_PACE, MAX_PACE_STARTS = 0.5, 4

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
    """What was measured of trial `number`'s `plan` with fewer layers, as the plan `small`.

    `spread` is the relative standard error of `iteration_s`.
    """

    number: int
    plan: Plan
    small: Plan
    iteration_s: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Time:
    """One measured time: an iteration, or a stage's action.

    `noise` is what is known of this one alone; `extra` comes on top of what launches lie apart.
    """

    log_s: float
    noise: float
    extra: float = 0.0
    iteration_model: IterationModel
    action: MeasuredAction | None = None


class PlanPredictor:
    """The posterior of a study. `folder_of` gives a trial's folder, where its ranks left their records.

    `odds` says how likely a plan runs at all.
    """

    def __init__(
        self, machine_model: MachineModel, *, num_iterations: int, folder_of: FolderOf | None = None
    ) -> None:
        self._machine_model = machine_model
        self._iteration_models = IterationModelCache(machine_model)
        self._num_iterations = num_iterations
        self._folder_of = folder_of
        self._residuals = Residuals()
        self._learned: dict[int, tuple[_Time, ...]] = {}
        self._records: dict[int, FinishedTrial] = {}
        self._seen: set[int] = set()
        self._cropped: dict[int, tuple[Plan, _Time]] = {}
        self.feasibility = FeasibilityModel(machine_model)
        self._known: dict[object, IterationModel] = {}
        self._runs: dict[object, bool] = {}
        self._views: list[PosteriorSample] = []
        self._groups: Groups | None = None

    def learn(self, trials: Sequence[FinishedTrial]) -> None:
        """Take in the records that are new; those of plans that were answered from others add nothing."""
        for trial in trials:
            record = trial.record
            if trial.number in self._seen or record.repeats is not None:
                continue
            self._seen.add(trial.number)
            self.feasibility.learn(trial)
            is_whole = record.verdict == "measured" and not record.is_depth_proxy
            if is_whole and record.iteration_s is not None and self.knows(trial.plan):
                self._records[trial.number] = trial
                self._learned[trial.number] = tuple(self._times_of(trial))
                self._views = []

    def learn_depth_proxy(self, found: DepthProxyTime) -> None:
        """Take in what a cropped model says of its plan, once a trial; `knows` must take both apart."""
        time = _Time(
            log_s=math.log(found.iteration_s),
            noise=math.hypot(LEAST, found.spread),
            extra=CROP_NOISE,
            iteration_model=self._iteration_model(found.small),
        )
        self._cropped[found.number] = (found.plan, time)
        self._views = []

    def knows(self, plan: Plan) -> bool:
        """Whether the cost model can take the plan apart: it has no word for some orders."""
        key = identity(plan)
        if key not in self._runs:
            try:
                self._runs[key] = (
                    self._iteration_model(plan).evaluate(np.zeros(self._machine_model.num_coefficients))[0]
                    > 0.0
                )
            except QuartetError:
                self._runs[key] = False
        return self._runs[key]

    @property
    def is_ready(self) -> bool:
        """Whether anything was measured."""
        return bool(self._records)

    @property
    def measured(self) -> dict[int, Plan]:
        """The plans that were measured, by their trials in order."""
        return {number: self._records[number].plan for number in sorted(self._records)}

    def predict(self, plans: Sequence[Plan]) -> list[PlanPrediction]:
        """What each iteration will take, of plans that are known. Something must have been measured."""
        if not plans:
            return []
        views = self.posterior_samples()
        assert self._groups is not None
        iteration_models = [self._iteration_model(plan) for plan in plans]
        groups = self._residuals.groups(plans)
        shared = np.zeros((len(plans), len(views[0].weighted)))
        shared[:, : len(self._groups)] = self._residuals.covariance(groups, self._groups)
        own = self._residuals.variance(groups)
        log_s, spread = np.empty((len(views), len(plans))), np.empty((len(views), len(plans)))
        for at, view in enumerate(views):
            seconds = np.array(
                [iteration_model.evaluate(view.point)[0] for iteration_model in iteration_models]
            )
            log_s[at], spread[at] = view.correct(np.log(seconds), shared=shared, own=own)
        return _mixed(np.array([view.weight for view in views]), log_s, spread)

    def most_likely_s(self, plans: Sequence[Plan]) -> list[float]:
        """Seconds an iteration as the likeliest explanation has it, without residuals: for ordering."""
        point = self.posterior_samples()[0].point
        return [self._iteration_model(plan).evaluate(point)[0] for plan in plans]

    def end_loads(self, plan: Plan) -> StageLoads:
        """The plan's end loads and its ranks' slowdowns under the most likely coefficients."""
        return self._iteration_models.end_loads(plan, self.posterior_samples()[0].point)

    def similarity(self, plans: Sequence[Plan], others: Sequence[Plan]) -> FloatArray:
        """How much of each plan's residual it shares with the nearest of `others`, from 0 to 1 [plans]."""
        if not plans or not others:
            return np.zeros(len(plans))
        groups = self._residuals.groups(plans)
        shared = self._residuals.covariance(groups, self._residuals.groups(others)).max(axis=1)
        found: FloatArray = shared / self._residuals.variance(groups)
        return found

    def posterior_samples(self) -> list[PosteriorSample]:
        """The samples of the coefficients' posterior, the most likely one first."""
        if not self._views:
            self._views = self._fit()
        return self._views

    def _times_of(self, trial: FinishedTrial) -> list[_Time]:
        record, plan = trial.record, trial.plan
        assert record.iteration_s is not None
        iteration_model = self._iteration_model(plan)
        is_cut = record.num_iterations is not None and record.num_iterations < self._num_iterations
        extra = math.hypot(CUT_NOISE * is_cut, OTHER_RUN_NOISE * (record.source is not None))
        drift = math.log(record.drift)
        log_s, noise = math.log(record.iteration_s) + drift, math.hypot(LEAST, record.spread or 0.0)
        found = [_Time(log_s=log_s, noise=noise, extra=extra, iteration_model=iteration_model)]
        if self._folder_of is None or record.source is not None or plan.schedule.custom is None:
            return found
        for action in action_times(self._folder_of(trial.number), attempt_id=record.attempt_id):
            if action.stage < plan.layout.num_stages and not iteration_model.is_crowded(action.stage):
                log_s = math.log(action.seconds) + drift
                found.append(
                    _Time(log_s=log_s, noise=ACTION_NOISE, iteration_model=iteration_model, action=action)
                )
        return found

    def _iteration_model(self, plan: Plan) -> IterationModel:
        key = identity(plan)
        if key not in self._known:
            if len(self._known) >= MAX_KEPT:
                self._known.clear()
            self._known[key] = self._iteration_models.of(plan)
        return self._known[key]

    def _fit(self) -> list[PosteriorSample]:
        numbers = sorted(self._records)
        if len(numbers) > MAX_MEASURED:
            numbers = [numbers[0], *numbers[-MAX_MEASURED + 1 :]]
        smaller = [self._cropped[number] for number in sorted(self._cropped)[-MAX_MEASURED:]]
        wholes = [*(self._learned[number][0] for number in numbers), *(time for _, time in smaller)]
        times = [*wholes, *(one for number in numbers for one in self._learned[number][1:])]
        self._groups = self._residuals.groups(
            [*(self._records[number].plan for number in numbers), *(plan for plan, _ in smaller)]
        )
        noise = np.array([one.noise for one in times])
        noise[: len(wholes)] = np.maximum(
            noise[: len(wholes)], launch_noise(one.record for one in self._records.values())
        )
        noise = np.hypot(noise, [one.extra for one in times])
        covariance = np.zeros((len(times), len(times)))
        covariance[: len(wholes), : len(wholes)] = self._residuals.covariance(self._groups, self._groups)
        return fit(
            lambda point: _modelled(times, point),
            Measured(
                log_s=np.array([one.log_s for one in times]),
                noise=noise,
                covariance=covariance,
            ),
            starts=[self._anchored(wholes[0], one) for one in self._starts()],
            spreads=self._machine_model.spreads,
        )

    def _starts(self) -> list[FloatArray]:
        found = []
        for factors in STARTS:
            point = np.zeros(self._machine_model.num_coefficients)
            for factor, ratio in factors.items():
                point[INDEX[factor]] = math.log(ratio)
            found.append(point)
        for at in range(
            len(COEFFICIENTS), min(self._machine_model.num_coefficients, len(COEFFICIENTS) + MAX_PACE_STARTS)
        ):
            point = np.zeros(self._machine_model.num_coefficients)
            point[at] = math.log(FAST_PACE)
            found.append(point)
        return found

    def _anchored(self, baseline: _Time, point: FloatArray) -> FloatArray:
        """Factors to begin with; how fast the machine is was only assumed: the first trial says it."""
        found = point.copy()
        found[INDEX[Coefficient.SPEED]] = baseline.log_s - math.log(
            baseline.iteration_model.evaluate(point)[0]
        )
        return found


def _mixed(weights: FloatArray, log_s: FloatArray, spread: FloatArray) -> list[PlanPrediction]:
    """Forecasts of a mixture: `log_s` and `spread` are [views, plans]."""
    mean = weights @ log_s
    wide = np.sqrt(weights @ (spread**2 + (log_s - mean) ** 2))
    return [
        PlanPrediction(
            iteration_s=math.exp(mean[at]),
            spread=float(wide[at]),
            posterior_samples=tuple(
                zip(weights.tolist(), log_s[:, at].tolist(), spread[:, at].tolist(), strict=True)
            ),
        )
        for at in range(len(mean))
    ]


def _modelled(times: Sequence[_Time], point: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Logarithms of what the model says of each time [n], and their slopes [n, k]."""
    log_s, slopes = np.empty(len(times)), np.empty((len(times), len(point)))
    for at, one in enumerate(times):
        if one.action is None:
            seconds, each = one.iteration_model.evaluate(point)
        else:
            seconds, each = one.iteration_model.stage(
                point, stage=one.action.stage, directions=one.action.directions
            )
        log_s[at], slopes[at] = math.log(seconds), each / seconds
    return log_s, slopes


def identity(plan: Plan) -> object:
    """What tells plans of one run apart, cheaper than their key."""
    custom = plan.schedule.custom
    return (
        plan.shape,
        plan.layout,
        plan.split,
        plan.schedule,
        None if custom is None else repr(custom.family),
        plan.mapping.slots,
    )
