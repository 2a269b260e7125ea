"""A plan's speedup as predicted before its launch, to compare with the measured one."""

from quartet_plugin.model.plan import Plan
from quartet_plugin.report.formatting import speedup_spread


def predicted_speedup(plan: Plan) -> float | None:
    """The objective over the baseline's by the plan's predicted seconds and the baseline's measured ones.

    None of a plan that was not predicted or not measured in turns.
    """
    measured, prediction = plan.measurement, plan.prediction
    if measured is None or prediction is None or prediction.iteration_s is None:
        return None
    ratio = measured.baseline.iteration_s.median / prediction.iteration_s
    if measured.objective == "tokens_per_s":
        return ratio
    return ratio * plan.shape.model_flops_per_sequence / plan.made_for.shape.model_flops_per_sequence


def speedup_pair(plan: Plan) -> str:
    """Both speedups of a plan that was measured in turns, the predicted one where there is one."""
    assert plan.measurement is not None
    words = f"{speedup_spread(plan.measurement.speedup)}, measured in turns"
    predicted = predicted_speedup(plan)
    return words if predicted is None else f"{words}; predicted {predicted:.2f}x"
