"""The best plans of large published models with experts against Megatron's own checks."""

import pytest

from benchmarks.plan_gpt175b import job_of
from quartet_plugin.cli.export import flags_of
from quartet_plugin.planner.job import parse_job
from quartet_plugin.planner.order_search import planned_ranking
from quartet_plugin.planner.plans import plain_layout, plan_of
from tests.megatron.test_production_commands import ProductionCommand, configured, hopper

# What a training says beside its plan. Fused rotations want Transformer Engine itself.
WORDS = "--mock-data --tokenizer-type NullTokenizer --train-iters 10 --lr 1e-4 --no-rope-fusion"
# Megatron wants it beside TP, before Blackwell.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
BEST = 10


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "case", ["deepseek-v3-256", "deepseek-v3-256-gb200", "qwen3-235b-256", "gpt-oss-120b-64-b200"]
)
def test_megatron_accepts_the_best_plans(case: str) -> None:
    job = parse_job(job_of(case), where="job")
    ranking = planned_ranking(job, top=BEST, has_search=False)
    plain = plain_layout(job, best=ranking.best[0])
    command = ProductionCommand(case, tuple(WORDS.split()), job.machines.num_devices, ENVIRONMENT)
    assert len(ranking.best) == BEST
    with hopper(command):
        for place, best in enumerate(ranking.best, start=1):
            plan = plan_of(job, best, plain=plain, name=case, place=place)
            words = [*command.words]
            for name, value in flags_of(plan).items():
                words += [name] if value is True else [name, str(value)]
            args = configured(words)
            layout = plan.layout
            assert job.experts is not None
            assert args.num_experts == job.experts.num_experts
            assert args.expert_model_parallel_size == layout.expert_parallel
            assert args.data_parallel_size == layout.data_parallel
