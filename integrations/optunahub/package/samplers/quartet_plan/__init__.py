"""The sampler of quartet_plugin in the layout of OptunaHub's registry."""

from quartet_plugin.planner.described_space import space_of
from quartet_plugin.planner.job import read_job
from quartet_plugin.study.plan_sampler import PlanSampler, suggest_plan

__all__ = ["PlanSampler", "read_job", "space_of", "suggest_plan"]
