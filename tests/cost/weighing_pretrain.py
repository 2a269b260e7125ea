"""The example script on the CPU device, its bytes counted after the first step: `... FOLDER FLAGS`."""

import json
import os
import runpy
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"


def main() -> None:
    """Weigh, and run the example."""
    from quartet_plugin.megatron import cpu_device

    cpu_device.ensure_environment()
    cpu_device.install()
    from quartet_plugin.megatron import seams
    from quartet_plugin.megatron.seams.declared import TRAIN_STEP

    folder = Path(sys.argv.pop(1))
    seams.install({TRAIN_STEP: lambda train_step: _weighed(train_step, folder)})
    sys.argv[1:] = [*sys.argv[1:], *cpu_device.required_flags(set(sys.argv[1:]))]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    cpu_device.exit_now()


def _weighed(train_step: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    def weighed(*args: Any, **kwargs: Any) -> Any:
        call = {**dict(zip(("forward_step_func", "data_iterator", "model", "optimizer"), args, strict=False)),
                **kwargs}  # fmt: skip
        results = train_step(*args, **kwargs)
        weights = [weight for chunk in call["model"] for weight in chunk.parameters()]
        chained = getattr(call["optimizer"], "chained_optimizers", [call["optimizer"]])
        states = [state for one in chained for state in one.optimizer.state.values()]
        content = {
            "parameters": _bytes(weights),
            "gradients": _bytes(weight.main_grad for weight in weights),
            "optimizer": _bytes(
                value for state in states for name, value in state.items() if name.startswith("exp_avg")
            ),
        }
        Path(folder, f"bytes-{os.environ['RANK']}.json").write_text(json.dumps(content))
        return results

    return weighed


def _bytes(tensors: Iterable[Any]) -> int:
    """Each once, wherever it is referred to from."""
    return sum({one.data_ptr(): one.numel() * one.element_size() for one in tensors}.values())


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLE.parents[1]))
    main()
