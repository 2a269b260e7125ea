"""The covariance of plans' residuals."""

from dataclasses import replace

import pytest

from quartet_plugin.calibration.plan_gp import RESIDUAL_SPREADS, Residuals, features_of
from quartet_plugin.model.plan import Plan
from tests.model.plans import PLAN

EXPERTS_APART = replace(PLAN.layout, expert_parallel=2)


def covariance(first: Plan, second: Plan) -> float:
    residuals = Residuals()
    return float(residuals.covariance(residuals.groups([first]), residuals.groups([second]))[0, 0])


def test_equal_plans_share_everything() -> None:
    residuals = Residuals()
    groups = residuals.groups([PLAN])
    assert covariance(PLAN, PLAN) == pytest.approx(float(residuals.variance(groups)[0]))


def test_layouts_that_spread_experts_otherwise_share_no_degrees() -> None:
    """Their exchanges may be far longer than predicted, which says nothing of a layout without any."""
    apart = replace(PLAN, layout=EXPERTS_APART)
    shared = sum(RESIDUAL_SPREADS[name] ** 2 for name in ("shape", "schedule"))
    assert covariance(PLAN, apart) == pytest.approx(shared)
    features = features_of([PLAN, apart])
    assert features.similarity(features, reach=1.0)[0, 1] < 1.0
