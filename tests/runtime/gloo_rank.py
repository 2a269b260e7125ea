"""One device of a test: runs schedules over real gloo groups and compares the gradients with one piece's."""

import os
import sys

import torch
import torch.distributed as dist

from quartet_plugin.runtime import transport
from quartet_plugin.runtime.executor import Executor
from quartet_plugin.runtime.programs import ProgramCache
from quartet_plugin.runtime.records import Recorder
from quartet_plugin.schedule.lowering import GROUP_NAMES
from quartet_plugin.schedule.placement import stages_of_device
from tests.runtime.pipelines import ROWS, WIDTH, TorchStages, reference_grads, spec_of


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
    """Every schedule named on the command line, twice, over both transports."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    boundary = transport.Boundary(shape=(ROWS, WIDTH), dtype=torch.float64, device=torch.device("cpu"))
    channels = transport.Channels.open(GROUP_NAMES, ranks=range(size))
    for name in sys.argv[1:]:
        programs = ProgramCache(spec_of(name, size))
        stages = stages_of_device(programs.spec.placement, size)[rank]
        assert programs.program(4).groups == GROUP_NAMES[: len(programs.program(4).groups)]
        for kind in (transport.PairTransport, transport.HostTransport):
            moving = kind(channels, boundary)
            compute = Freeing(num_stages=len(programs.spec.placement), stages=stages)
            for num_microbatches in (4, 7):
                executor = Executor(programs.program(num_microbatches), device=rank)
                executor.run(compute, moving, Recorder())
            assert not moving._pending
            assert compute.is_idle
            for stage, parameter in compute.weights.items():
                expected = sum(reference_grads(compute.num_stages, m)[stage] for m in (4, 7))
                torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-12)
    dist.barrier()
    print(f"rank {rank} done", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
