"""One of two devices of a test: rank 1 dies in the middle of a schedule, rank 0 says what it waited for."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from quartet_plugin.errors import InfrastructureError
from quartet_plugin.runtime import transport
from quartet_plugin.runtime.executor import Executor
from quartet_plugin.runtime.process_groups import Channels
from quartet_plugin.runtime.programs import ProgramCache
from quartet_plugin.runtime.records import NullRecorder
from tests.runtime.pipelines import ROWS, WIDTH, TorchStages, spec_of


class Dying(TorchStages):
    """Ends its process in one action."""

    def forward(self, stage: int, microbatch: int, received: Any) -> Any:
        """F, until microbatch 2."""
        if microbatch == 2:
            os._exit(9)
        return super().forward(stage, microbatch, received)


def main() -> None:
    """Run 1F1B of four microbatches."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    programs = ProgramCache(spec_of("1f1b", 2))
    boundary = transport.Boundary(shape=(ROWS, WIDTH), dtype=torch.float64, device=torch.device("cpu"))
    channels = Channels.open(programs.spec.placement, ranks=(0, 1))
    kind = TorchStages if rank == 0 else Dying
    begin = time.monotonic()
    try:
        Executor(programs.program(4), device=rank).run(
            kind(num_stages=2, stages=[rank]), transport.PairTransport(channels, boundary), NullRecorder()
        )
    except InfrastructureError as error:
        print(f"after {time.monotonic() - begin:.1f} s: {error} {error.__notes__}", flush=True)
        os._exit(5)


if __name__ == "__main__":
    main()
