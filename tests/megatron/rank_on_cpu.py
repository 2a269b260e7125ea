"""One rank of a test: `rank_on_cpu.py RECORD_FOLDER SCRIPT ARGS...` runs a Megatron script on the CPU device.

With RECORD_FOLDER other than `-`, the loss and gradient norm that `train_step` returns are written as
RECORD_FOLDER/rank-K.json, as the floats they are: printed log lines are rounded.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Install the device, wrap `train_step`, append the flags a CPU run needs, run the script."""
    from quartet_plugin.megatron import cpu_device

    cpu_device.ensure_environment()
    folder, script, *arguments = sys.argv[1:]
    cpu_device.install()
    if folder != "-":
        record_steps(Path(folder))
    sys.argv = [script, *arguments, *cpu_device.required_flags(set(arguments))]
    runpy.run_path(script, run_name="__main__")
    cpu_device.exit_now()


def record_steps(folder: Path) -> None:
    """Rebind Megatron's `train_step` to one that also appends its results to this rank's file."""
    from megatron.training import training

    train_step = training.train_step
    steps: list[dict[str, Any]] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        results = train_step(*args, **kwargs)
        losses, grad_norm = results[0], results[5]
        steps.append(
            {
                "loss": {name: float(value) for name, value in losses.items()},
                "grad_norm": None if grad_norm is None else float(grad_norm),
            }
        )
        path = folder / f"rank-{os.environ['RANK']}.json"
        path.write_text(json.dumps(steps))
        return results

    training.train_step = recorded


if __name__ == "__main__":
    main()
