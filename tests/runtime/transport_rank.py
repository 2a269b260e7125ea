"""One device of a test: `transport_rank.py GROUPS SCHEDULE...` compares gradients with those of one piece.

GROUPS are `gloo`, `ncclsim`, `troubled` (ncclsim with transfers at random legal times), or `bound` (ncclsim
under a default group with a bound device).
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from quartet_plugin.deepspeed.transport import ValueTransport
from quartet_plugin.runtime import transport
from quartet_plugin.runtime.executor import Executor
from quartet_plugin.runtime.process_groups import Channels, agree_on_program
from quartet_plugin.runtime.programs import ProgramCache
from quartet_plugin.runtime.records import Recorder
from quartet_plugin.schedule.placement import stages_of_device
from tests.runtime import nccl_sim
from tests.runtime.pipelines import ROWS, WIDTH, TorchStages, reference_grads, spec_of

BOUNDARY = transport.Boundary(shape=(ROWS, WIDTH), dtype=torch.float64, device=torch.device("cpu"))


class Freeing(TorchStages):
    """Frees an activation's own storage as soon as it is handed over, as Megatron does."""

    def forward(self, stage: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        """F; only the view that was handed over keeps the storage."""
        output: torch.Tensor | None = super().forward(stage, microbatch, received)
        if output is None:
            return None
        # Tanh needs its output in the backward: keep that, and free a copy in its place.
        value, kept = self._held[stage, microbatch]
        copied = kept.clone()
        handed = copied.detach()
        copied.data = torch.empty(1, dtype=copied.dtype)
        self._held[stage, microbatch] = (value, kept)
        return handed


def main() -> None:
    """Every schedule named on the command line, twice, over every transport that the groups can have."""
    kind, *names = sys.argv[1:]
    if kind != "gloo":
        os.environ |= {nccl_sim.TROUBLE: "5"} if kind == "troubled" else {}
        nccl_sim.install()
    dist.init_process_group("gloo")
    if kind == "bound":
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    for name in names:
        run(ProgramCache(spec_of(name, dist.get_world_size())), is_gloo=kind == "gloo")
    dist.barrier()
    print(f"rank {dist.get_rank()} done", flush=True)
    os._exit(0)


def run(programs: ProgramCache, *, is_gloo: bool) -> None:
    """Compare the gradients of two runs with those of one piece."""
    rank, size = dist.get_rank(), dist.get_world_size()
    placement = programs.spec.placement
    stages = stages_of_device(placement, size)[rank]
    channels = Channels.open(placement, ranks=range(size), has_host_group=True)
    agree_on_program(programs.program(4), group=dist.group.WORLD, device=BOUNDARY.device)
    made = communicators(channels)
    for moving in transports(channels, is_gloo=is_gloo):
        compute = Freeing(num_stages=len(placement), stages=stages)
        for num_microbatches in (4, 7):
            Executor(programs.program(num_microbatches), device=rank).run(compute, moving, Recorder())
        assert not moving._pending
        assert not moving._leaving._sends
        assert compute.is_idle
        for stage, parameter in compute.weights.items():
            expected = sum(reference_grads(compute.num_stages, m)[stage] for m in (4, 7))
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-12)
    assert communicators(channels) == made, "a communicator was made inside of a step"


def transports(channels: Channels, *, is_gloo: bool) -> list[Any]:
    """Those of Megatron and of DeepSpeed."""
    device = BOUNDARY.device
    return [
        transport.PairTransport(channels, BOUNDARY),
        *([transport.HostTransport(channels, BOUNDARY)] if is_gloo else []),
        *(ValueTransport(channels, device=device, is_dynamic=is_dynamic) for is_dynamic in (False, True)),
    ]


def communicators(channels: Channels) -> list[int]:
    """The number of communicators that each group has; gloo makes all with the group."""
    return [len(getattr(group, "_communicators", ())) for group in channels.groups]


if __name__ == "__main__":
    main()
