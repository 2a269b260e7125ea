"""The example script with dropout and a fault: `faulty_pretrain.py --fault NAME FLAGS...`.

none      trains
gradient  a wrong weight gradient in the third layer, from the second step on, where the split is 3+1
stage     every gradient of stage 0 is 1 + 1e-4 times what it should be, where a device has several stages
oom       rank 1 runs out of memory before its second step
hang      rank 1 does not come to its second step, and the file of --mark appears
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
from deepspeed.runtime.pipe import schedule as stock
from torch.nn import functional

import quartet_plugin.deepspeed
from examples import pretrain_deepspeed as example

LAYER = 2
FACTOR = 1.01
STAGE_FACTOR = 1.0 + 1e-4


def main() -> None:
    """Run the example with the fault in its model or its loop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", required=True)
    parser.add_argument("--mark", type=Path)
    known, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    forward, train = example.Block.forward, example.train

    def noisy(block: Any, hidden: torch.Tensor) -> torch.Tensor:
        return functional.dropout(forward(block, hidden), 0.2, block.training)

    def faulty(engine: Any, args: argparse.Namespace) -> None:
        if known.fault == "gradient":
            spoil(engine)
        if known.fault == "stage":
            scale_stage_0(engine)
        step, num_steps = engine.train_batch, 0

        def faulty_step() -> Any:
            nonlocal num_steps
            num_steps += 1
            act(known.fault, rank=engine.global_rank, number=num_steps, mark=known.mark)
            return step()

        engine.train_batch = faulty_step
        train(engine, args)

    if known.fault == "drop-in":
        deepspeed.initialize = quartet_plugin.deepspeed.initialize
    example.Block.forward = noisy  # type: ignore[assignment, method-assign]
    example.train = faulty
    example.main()


def act(fault: str, *, rank: int, number: int, mark: Path | None) -> None:
    """Before step `number` of a rank."""
    if fault == "slow":
        time.sleep(0.2)
    if rank != 1 or number != 2:
        return
    if fault == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if fault == "hang":
        assert mark is not None
        mark.touch()
        time.sleep(600)


def spoil(engine: Any) -> None:
    """Lose a part of one weight's gradient, as a schedule could."""
    module = engine.module
    if list(module.parts) != [0, LAYER + 2, LAYER + 4] or module.stage_owner(LAYER + 1) != module.stage_id:
        return
    block = module.forward_funcs[LAYER + 1]
    block.up.weight.register_hook(lambda gradient: gradient * (FACTOR if engine.global_steps else 1.0))


def scale_stage_0(engine: Any) -> None:
    """Scale what the optimizer is given for embedding and first layer, before anything measures it.

    Only where the device also has the last stage: the numbers of its layers then have a gap.
    """
    module, step = engine.module, engine._INSTRUCTION_MAP[stock.OptimizerStep]
    numbers = list(getattr(module, "_numbers", None) or ())
    if not numbers or numbers == list(range(numbers[0], numbers[-1] + 1)):
        return
    layers = zip(numbers, module.forward_funcs, strict=True)
    weights = [weight for number, layer in layers if number < 2 for weight in layer.parameters()]

    def scaled_step(running: Any, **kwargs: Any) -> None:
        for weight in weights:
            weight.grad.mul_(STAGE_FACTOR)
        step(running, **kwargs)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, stock.OptimizerStep: scaled_step}


if __name__ == "__main__":
    main()
