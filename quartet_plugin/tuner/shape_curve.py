"""The curve of throughput against shape that the trials and the calibrated model give, at equal budget."""

import math
from typing import TYPE_CHECKING

from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.shape_curve import ShapeCurve
from quartet_plugin.model.trial_record import FinishedTrial, speedup
from quartet_plugin.scaling.shape_curve import shape_curve
from quartet_plugin.space.plan_space import Space
from quartet_plugin.tuner.tune_result import TuneResult

if TYPE_CHECKING:
    from quartet_plugin.tuner.proposer import Proposer


def shape_curve_of(space: Space, search: TuneResult, *, proposer: "Proposer | None") -> ShapeCurve | None:
    """The curve of a search that has ended; None where it had one shape."""
    if len(space.shapes) < 2:
        return None
    return shape_curve(
        space.shapes,
        objective=search.objective,
        of_command=search.baseline.shape,
        measured=_best_trials(search),
        predicted={} if proposer is None else _predicted(search, proposer),
    )


def _best_trials(search: TuneResult) -> dict[ModelShape, tuple[float, int]]:
    """The best measured trial of each shape: its speedup over the user's command, and its number."""
    baseline = _measured_value(search.trials[0])
    best: dict[ModelShape, tuple[float, int]] = {}
    for trial in search.trials:
        value = _measured_value(trial)
        if value is None or baseline is None:
            continue
        ratio = speedup(value, baseline_value=baseline)
        if trial.plan.shape not in best or ratio > best[trial.plan.shape][0]:
            best[trial.plan.shape] = (ratio, trial.number)
    return best


def _measured_value(trial: FinishedTrial) -> float | None:
    record = trial.record
    return record.value if record.verdict == "measured" and not record.is_depth_proxy else None


def _predicted(search: TuneResult, proposer: "Proposer") -> dict[ModelShape, float]:
    """The best predicted plan of each shape over the prediction of the user's command."""
    predictor = proposer.predictor
    predictor.learn(search.trials)
    if not predictor.is_ready or not predictor.knows(search.baseline):
        return {}
    of_baseline = proposer.log_speedup(search.baseline, predictor.predict([search.baseline])[0])
    best: dict[ModelShape, float] = {}
    for scored in proposer.final_plans():
        plan = scored.candidate.plan
        ratio = math.exp(proposer.log_speedup(plan, scored.prediction) - of_baseline)
        best[plan.shape] = max(ratio, best.get(plan.shape, 0.0))
    return best
