"""The example's pretrain script with every rank on the first device, and stock's transfers through the host.

gloo sends and receives host memory alone. Megatron's own schedules are the reference that a plan is compared
with, so that their batched transfers are staged here; the plugin's runtime stages its own.
"""

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"


class StagedTransfer:
    """A transfer of a device's tensor over its copy in host memory."""

    def __init__(self, work: Any, host: Any, *, target: Any = None) -> None:
        """`target` is the device's tensor that the host's is copied into; None for a send."""
        self._work, self._host, self._target = work, host, target

    def wait(self) -> None:
        """Wait for the transfer; a received tensor is on the device then."""
        self._work.wait()
        if self._target is not None:
            self._target.copy_(self._host)


def staged(batch: Callable[[Sequence[Any]], list[Any]]) -> Callable[[Sequence[Any]], list[Any]]:
    """`torch.distributed.batch_isend_irecv` for tensors of any device."""

    def batch_through_host(operations: Sequence[Any]) -> list[Any]:
        import torch.distributed as dist

        if not any(operation.tensor.is_cuda for operation in operations):
            return batch(operations)
        works: list[Any] = []
        for operation in operations:
            tensor, is_send = operation.tensor, operation.op is dist.isend
            host = tensor.cpu() if is_send else tensor.new_empty(tensor.shape, device="cpu")
            work = operation.op(host, operation.peer, group=operation.group, tag=operation.tag)
            works.append(StagedTransfer(work, host, target=None if is_send else tensor))
        return works

    return batch_through_host


def main() -> None:
    """Run the script on the first device."""
    import torch.distributed as dist

    # After the plugin's entry has read it: the ranks keep their places in a plan.
    os.environ["LOCAL_RANK"] = "0"
    dist.batch_isend_irecv = staged(dist.batch_isend_irecv)
    sys.argv[0] = str(SCRIPT)
    sys.path[0] = str(SCRIPT.parent)
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
