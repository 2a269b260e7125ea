"""The example script with dropout and a fault: `faulty_pretrain.py --fault NAME FLAGS...`.

none      trains
gradient  a wrong weight gradient in the third layer, from the second step on, where the split is 3+1
oom       rank 1 runs out of memory before its second step
hang      rank 1 does not come to its second step
slow      every step takes its time
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import deepspeed
import torch
from torch.nn import functional

import quartet_plugin.deepspeed
from examples import pretrain_deepspeed as example

LAYER = 2
FACTOR = 1.01


def main() -> None:
    """Run the example with the fault in its model or its loop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", required=True)
    known, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    forward, train = example.Block.forward, example.train

    def noisy(block: Any, hidden: torch.Tensor) -> torch.Tensor:
        return functional.dropout(forward(block, hidden), 0.2, block.training)

    def faulty(engine: Any, args: argparse.Namespace) -> None:
        if known.fault == "gradient":
            spoil(engine)
        step, num_steps = engine.train_batch, 0

        def faulty_step() -> Any:
            nonlocal num_steps
            num_steps += 1
            act(known.fault, rank=engine.global_rank, number=num_steps)
            return step()

        engine.train_batch = faulty_step
        train(engine, args)

    if known.fault == "drop-in":
        deepspeed.initialize = quartet_plugin.deepspeed.initialize
    example.Block.forward = noisy  # type: ignore[assignment, method-assign]
    example.train = faulty
    example.main()


def act(fault: str, *, rank: int, number: int) -> None:
    """Before step `number` of a rank."""
    if fault == "slow":
        time.sleep(0.2)
    if rank != 1 or number != 2:
        return
    if fault == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if fault == "hang":
        time.sleep(600)


def spoil(engine: Any) -> None:
    """Lose a part of one weight's gradient, as a schedule could."""
    module = engine.module
    if list(module.parts) != [0, LAYER + 2, LAYER + 4] or module.stage_owner(LAYER + 1) != module.stage_id:
        return
    block = module.forward_funcs[LAYER + 1]
    block.up.weight.register_hook(lambda gradient: gradient * (FACTOR if engine.global_steps else 1.0))


if __name__ == "__main__":
    main()
