"""The best plans of large models with experts beside the layouts that their vendor publishes for the machine.

    python -m benchmarks.plan_published                        # four jobs
    python -m benchmarks.plan_published --case qwen3-235b-256  # one of them

Recipes: NVIDIA-NeMo/Megatron-Bridge v0.6.0, src/megatron/bridge/perf_recipes. Where a recipe has another
batch or precision than the job, its layout is predicted with the job's. Prints of both the seconds, the
terms and the memory of the fullest device, and the seconds that the planning took.
"""

import argparse
import os
import time
from dataclasses import dataclass, replace

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.plan_gpt175b import job_of
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.memory import peak_memory
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.model.layout import Layout, Recompute
from quartet_plugin.planner.job import PlanRequest, parse_job
from quartet_plugin.planner.order_search import planned_ranking
from quartet_plugin.split.layers import even_split_with_ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A recipe's layout: tensor and pipeline parallel, chunks, expert parallel, micro-batch.

    `ends`: the layers that its split takes embedding and head for.
    `has_whole_experts`: each expert on one device; `expert_overlap`: all-to-all beside other microbatches.
    """

    recipe: str
    degrees: tuple[int, int, int, int, int]
    ends: tuple[int, int] = (0, 0)
    recompute: Recompute = "none"
    has_whole_experts: bool = True
    expert_overlap: bool = False

    def run(self, job: PlanRequest) -> TrainingRun:
        """The job with this layout."""
        tensor, pipeline, chunks, expert, micro_batch = self.degrees
        layout = Layout(
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            data_parallel=job.machines.num_devices // (tensor * pipeline),
            virtual_stages=chunks,
            context_parallel=1,
            expert_parallel=expert,
            micro_batch_size=micro_batch,
            sequence_parallel=tensor > 1,
            distributed_optimizer=True,
            recompute=self.recompute,
        )
        split = even_split_with_ends(
            job.shape.num_layers, num_stages=layout.num_stages, embedding=self.ends[0], head=self.ends[1]
        )
        run = job.run(job.shape, layout, split)
        software = replace(run.software, expert_overlap=self.expert_overlap)
        return replace(run, has_whole_experts=self.has_whole_experts and tensor > 1, software=software)


PUBLISHED = {
    "deepseek-v3-256-gb200": (
        Published(recipe="deepseek_v3_pretrain_256gpu_gb200_bf16", degrees=(1, 4, 4, 64, 1), ends=(0, 3)),
    ),
    # There is none for 256 H100: the one for 256 B200, whose domains have eight devices, too.
    "deepseek-v3-256": (
        Published(
            recipe="deepseek_v3_pretrain_256gpu_b200_fp8cs",
            degrees=(1, 16, 1, 8, 1),
            ends=(0, 3),
            recompute="full",
        ),
    ),
    "qwen3-235b-256": (
        Published(
            recipe="qwen3_235b_a22b_pretrain_256gpu_h100_fp8cs_large_scale",
            degrees=(2, 8, 4, 32, 1),
            ends=(1, 1),
            expert_overlap=True,
        ),
    ),
    # There is none for 64 B200.
    "gpt-oss-120b-64-b200": (
        Published(recipe="gpt_oss_120b_pretrain_64gpu_h100_bf16", degrees=(1, 4, 1, 8, 1)),
        Published(recipe="gpt_oss_120b_pretrain_64gpu_gb200_bf16", degrees=(1, 1, 1, 64, 4)),
    ),
}


def show(name: str, run: TrainingRun) -> None:
    """Print the seconds, the largest terms and the memory of one layout."""
    prediction, memory = predict(run, fitted()), peak_memory(run)
    terms = sorted(prediction.terms.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{term.removesuffix('_s')} {value:.2f}" for term, value in terms if value > 0.05)
    print(f"{name}: {prediction.iter_time_s:.2f} s, {run.layout.label}, recompute {run.layout.recompute}")
    print(f"   {shown}; {memory.total_bytes / 2**30:.0f} GiB of {memory.available_bytes / 2**30:.0f}")


def show_case(case: str) -> None:
    """Print the best plan of a job, then the published layouts."""
    start = time.perf_counter()
    job = parse_job(job_of(case), where="job")
    best = planned_ranking(job, top=1, has_search=False).best[0]
    print(f"{case}, planned in {time.perf_counter() - start:.2f} s")
    show(
        "   best plan",
        job.run(best.shape, best.layout, best.split, schedule=best.schedule, group=best.group),
    )
    for published in PUBLISHED[case]:
        show(f"   {published.recipe}", published.run(job))


def main() -> None:
    """Print all cases, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", choices=PUBLISHED)
    options = parser.parse_args()
    for case in PUBLISHED if options.case is None else (options.case,):
        show_case(case)


if __name__ == "__main__":
    main()
