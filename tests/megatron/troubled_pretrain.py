"""The example script with a fault: `troubled_pretrain.py FAULT FLAGS...`, FAULT a key of `FAULTS`."""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
AT_CALL = 3


def out_of_memory() -> None:
    """What torch raises when the GPU is full."""
    import torch

    if os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total ...")


def ask_to_stop() -> None:
    """What a runner does to end a trial early."""
    folder = next(Path(word).parent for word in sys.orig_argv if word.endswith("trial.json"))
    (folder / "STOP").touch()


FAULTS = {"out-of-memory": out_of_memory, "stop": ask_to_stop}


def main() -> None:
    """Run the example, with the fault in the optimizer's third step."""
    fault = FAULTS[sys.argv.pop(1)]
    from megatron.core.optimizer.optimizer import FP32Optimizer

    step = FP32Optimizer.step_with_ready_grads
    calls = 0

    def troubled_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == AT_CALL:
            fault()
        return step(*args, **kwargs)

    FP32Optimizer.step_with_ready_grads = troubled_step
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
