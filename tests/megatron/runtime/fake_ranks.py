"""`fake_ranks.py RANK...` prints `RANK DEVICE DIGEST...` for ranks of a fake group of 16 with TP 2 and PP 8.

Each rank makes its programs anew, as its process would; nothing is communicated.
"""

import sys

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from quartet_plugin.megatron.placement.state import StagePlacement
from quartet_plugin.megatron.runtime.binding import Runtime
from quartet_plugin.megatron.runtime.reduction import GradReductions
from quartet_plugin.megatron.split_backward import WeightGradients
from quartet_plugin.runtime.programs import ProgramCache, ScheduleSpec
from quartet_plugin.schedule.family import plain_family
from quartet_plugin.schedule.placement import build
from tests.runtime.pipelines import stage_costs

TENSOR, PIPELINE = 2, 8
RANKS = TENSOR * PIPELINE


def specs() -> list[ScheduleSpec]:
    """A named schedule, and an order of the family, whose keys are sums of seconds that no float holds."""
    costs = stage_costs(build("v", num_devices=PIPELINE, num_chunks=None), transfer_s=0.1)
    by_name = ScheduleSpec(costs=costs, name="zb-v")
    return [
        by_name,
        ScheduleSpec(costs=costs, family=plain_family(by_name.placement, num_devices=by_name.num_devices)),
    ]


def main() -> None:
    """One rank after the other."""
    for rank in map(int, sys.argv[1:]):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=TENSOR,
            pipeline_model_parallel_size=PIPELINE,
            create_gloo_process_groups=False,
        )
        executors = [
            Runtime(
                ProgramCache(spec),
                placement=StagePlacement(spec.placement),
                gradients=WeightGradients(),
                reductions=GradReductions(),
            ).executor(num_microbatches)
            for spec in specs()
            for num_microbatches in (8, 13)
        ]
        (device,) = {executor.device for executor in executors}
        print(rank, device, *(executor.program.digest for executor in executors), flush=True)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
