"""Stands in for torchrun where its 3 s of start-up would be all that is measured.

Workers get sessions of their own; the first one that fails ends the others; the report at the end has
torchrun's own words, which tests with the real one hold it to.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from types import FrameType


def main() -> int:
    """Start the workers, wait for them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--master-port", default="29500")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    first = int(os.environ.get("PET_NODE_RANK", "0")) * options.nproc_per_node
    world_size = int(os.environ.get("PET_NNODES", "1")) * options.nproc_per_node
    workers = [
        subprocess.Popen(
            [sys.executable, "-u", *options.script],
            env={
                **os.environ,
                "RANK": str(first + rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_PORT": options.master_port,
            },
            start_new_session=True,
        )
        for rank in range(options.nproc_per_node)
    ]

    def stop(number: int, frame: FrameType | None) -> None:
        end(workers)
        sys.exit(1)

    signal.signal(signal.SIGTERM, stop)
    while True:
        codes = [worker.poll() for worker in workers]
        for rank, code in enumerate(codes):
            if code:
                print("E0101 00:00:00.000000 1 torch/distributed/elastic/x.py:1] failed (exitcode: 1)")
                print(f"Root Cause (first observed failure):\n[0]:\n  rank      : {rank}")
                print(f"  exitcode  : {code} (pid: {workers[rank].pid})\n", flush=True)
                end(workers)
                return 1
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.02)


def end(workers: list[subprocess.Popen[bytes]]) -> None:
    """SIGTERM, half a minute, SIGKILL."""
    for worker in workers:
        worker.terminate()
    for worker in workers:
        try:
            worker.wait(30)
        except subprocess.TimeoutExpired:
            worker.kill()


if __name__ == "__main__":
    sys.exit(main())
