"""One rank of a test: `rank_with_schedule.py RECORD_FOLDER ORDER SCRIPT ARGS...` on the CPU device.

ORDER is `stock`, or NAME:PLACEMENT with NAME a named schedule, `family`, or `searched@FILE` for an order that
is written out in a schedule file; PLACEMENT like 0-1-1-0, and optionally :host to send boundary tensors
through host memory, :whole for backwards in one piece.
"""

import copy
import os
import runpy
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any


def main() -> None:
    """Install device, runtime and recording, then run the script."""
    from quartet_plugin.megatron import cpu_device

    cpu_device.ensure_environment()
    folder, order, script, *arguments = sys.argv[1:]
    cpu_device.install()
    from tests.megatron.rank_on_cpu import record_steps

    if "--sequence-parallel" in arguments:
        mark_norms()
    if order != "stock":
        install(order, arguments, Path(folder))
    record_steps(Path(folder))
    # The device refuses sequence parallelism for want of a norm, which has just been brought.
    given = set(arguments) - {"--sequence-parallel"}
    sys.argv = [script, *arguments, *cpu_device.required_flags(given)]
    runpy.run_path(script, run_name="__main__")
    cpu_device.exit_now()


def install(order: str, arguments: list[str], folder: Path) -> None:
    """Put the runtime in place for the number of microbatches that the flags say."""
    from quartet_plugin.megatron import seams
    from quartet_plugin.megatron.runtime.install import prepare
    from quartet_plugin.runtime.programs import ScheduleSpec
    from quartet_plugin.runtime.records import Recorder
    from quartet_plugin.schedule.family import Family
    from quartet_plugin.schedule.files import read_schedule
    from tests.runtime.pipelines import stage_costs

    name, stages, *rest = order.split(":")
    placement = tuple(int(device) for device in stages.split("-"))
    chunks = len(placement) // (max(placement) + 1)
    family = Family(
        stretch_forward=(1.0,) * chunks,
        stretch_backward=(1.0,) * chunks,
        shift_forward=(0.0,) * chunks,
        shift_backward=(0.0,) * chunks,
        slack=2.0,
        memory_cap=float(max(placement) + 2),
        w_limit=2.0,
    )
    name, _, file = name.partition("@")
    recorder = Recorder()
    prepared = prepare(
        ScheduleSpec(
            costs=stage_costs(placement),
            written=read_schedule(Path(file)) if file else None,
            name=None if name in ("family", "plain", "searched") else name,
            family=family if name == "family" else None,
            full_backward_stages=frozenset(range(len(placement))) if "whole" in rest else frozenset(),
        ),
        num_microbatches=num_microbatches(arguments, placement),
        recorder=recorder,
        host_transport="host" in rest,
        timeout=timedelta(seconds=90),
    )
    seams.install(prepared.wrappers)
    count_deferred(folder)


def count_deferred(folder: Path) -> None:
    """Leave a line for every W action: how many weights it computed the gradients of."""
    from quartet_plugin.megatron.split_backward import WeightGradients

    run = WeightGradients.run
    path = folder / f"deferred-{os.environ['RANK']}"

    def counted(self: WeightGradients, stage: int, microbatch: int) -> None:
        with path.open("a") as stream:
            print(stage, microbatch, len(self._pending[stage, microbatch]), file=stream)
        run(self, stage, microbatch)

    WeightGradients.run = counted  # type: ignore[method-assign]


def mark_norms() -> None:
    """A torch norm whose parameters are marked as Transformer Engine's are under sequence parallelism.

    Megatron refuses torch's own norm there only because its gradients would not be reduced without the mark.
    """
    import torch
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def marked(cls: Any, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        norm: torch.nn.Module = original(cls, replace_flag(config), *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    def replace_flag(config: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        return plain

    WrappedTorchNorm.__new__ = marked


def num_microbatches(arguments: list[str], placement: tuple[int, ...]) -> int:
    """Of the final batch; flags that come last win."""

    def value(flag: str, default: int) -> int:
        at = [n for n, word in enumerate(arguments) if word == flag]
        return int(arguments[at[-1] + 1]) if at else default

    ranks = int(os.environ["WORLD_SIZE"]) // (max(placement) + 1)
    data_parallel = ranks // value("--tensor-model-parallel-size", 1)
    return value("--global-batch-size", 1) // value("--micro-batch-size", 1) // data_parallel


if __name__ == "__main__":
    main()
