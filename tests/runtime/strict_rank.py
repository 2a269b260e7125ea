"""One of two ranks that break NCCL's rules on `ncclsim`, one after the other; the last ends the process."""

import os
import time

import torch
import torch.distributed as dist

from tests.runtime import nccl_sim


def main() -> None:
    """RANK is the other process's LOCAL_RANK, as under a plan that moves ranks."""
    os.environ |= {nccl_sim.TROUBLE: "1", "RANK": str(1 - int(os.environ["LOCAL_RANK"]))}
    nccl_sim.install()
    dist.init_process_group("gloo")
    try:
        dist.barrier()
    except RuntimeError as error:
        print(f"barrier: {error}", flush=True)
    # A group that has used its device takes that for a barrier.
    dist.all_reduce(torch.zeros(1))
    if dist.get_rank() == 0:
        dist.isend(torch.ones(4), 1).wait()
        send()
    else:
        dist.irecv(torch.empty(4), 0).wait()
        receive()


def send() -> None:
    """Send, and then change what is being sent."""
    tensor = torch.arange(4.0)
    work = dist.isend(tensor, 1)
    print(f"sent before there is a receive: {work.is_completed()}", flush=True)
    dist.barrier()
    work.wait()
    print(f"sent behind the wait: {work.is_completed()}", flush=True)
    dist.isend(tensor, 1)
    tensor.zero_()
    dist.barrier()
    time.sleep(60)


def receive() -> None:
    """Look into a buffer before the wait."""
    dist.barrier()
    tensor = torch.zeros(4)
    work = dist.irecv(tensor, 0)
    work.wait()
    print(f"received behind the wait: {tensor.tolist()}", flush=True)
    dist.barrier()
    dist.irecv(tensor, 0).wait()


if __name__ == "__main__":
    main()
