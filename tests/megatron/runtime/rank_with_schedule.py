"""One rank of a test: `rank_with_schedule.py RECORD_FOLDER ORDER SCRIPT ARGS...` on the CPU device.

ORDER is `stock`, or NAME:PLACEMENT with NAME a named schedule, `family`, or `searched@FILE` for an order that
is written out in a schedule file; PLACEMENT like 0-1-1-0, and optionally :host to send boundary tensors
through host memory, :whole for backwards in one piece, :nccl for groups that are as strict as NCCL, :troubled
for these with transfers at random legal times, :tracked to count activations in the first step as a trial on
a GPU does. `profile` is stock's order with its layers measured as by `quartet profile`, into
rank-0.profile.json.

`--gradient-accumulation-fusion` among ARGS fuses weight gradients, with stand-ins for Apex's kernels;
`--transformer-impl transformer_engine` brings a stand-in for its layers. PARTITION in the environment is the
label of a tensor partition that the layers get.
"""

import json
import os
import runpy
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.twins import APEX, ENGINE, provide

FUSION, ENGINE_LAYERS = "--gradient-accumulation-fusion", "transformer_engine"


def main() -> None:
    """Prepare this process and train in it."""
    words = sys.argv[1:]
    prepare(preparation(words))
    train(words)


def preparation(words: Sequence[str]) -> list[str]:
    """The words that decide what is imported and replaced, before anything is."""
    return sorted({FUSION, ENGINE_LAYERS} & set(words))


def prepare(flags: Sequence[str]) -> None:
    """Install the device, and bring the stand-ins that `preparation` has named."""
    from quartet_plugin.megatron import cpu_device

    cpu_device.ensure_environment()
    if FUSION in flags:
        provide(APEX)
    if ENGINE_LAYERS in flags:
        provide(ENGINE)
    cpu_device.install()


def import_runtime() -> None:
    """Import, and compile, what `train` needs beyond Megatron."""
    from quartet_plugin.megatron.runtime.install import prepare
    from quartet_plugin.runtime.programs import ScheduleSpec
    from tests.runtime.pipelines import stage_costs

    prepare(ScheduleSpec(costs=stage_costs((0, 1)), name="zb-h1"), num_microbatches=2)


def train(words: Sequence[str]) -> None:
    """Install runtime and recording, then run the script."""
    from quartet_plugin.megatron import cpu_device

    folder, order, script, *arguments = words
    # The device replaces kernels that need a GPU, unless their stand-ins have been brought.
    given = set(arguments)
    if FUSION in arguments:
        arguments.remove(FUSION)
        given |= {"--no-gradient-accumulation-fusion"}
    if ENGINE_LAYERS in arguments:
        given |= {"--transformer-impl", "local"}
    from tests.megatron.rank_on_cpu import record_steps

    if ":nccl" in order or ":troubled" in order:
        simulate_nccl(troubled=":troubled" in order)
    if order == "profile":
        profile(Path(folder), delays_te=ENGINE_LAYERS in arguments)
    elif order != "stock":
        install(order, arguments, Path(folder))
    record_steps(Path(folder))
    sys.argv = [script, *arguments, *cpu_device.required_flags(given)]
    runpy.run_path(script, run_name="__main__")
    cpu_device.exit_now()


def profile(folder: Path, *, delays_te: bool) -> None:
    """Let the layers of ten steps be measured, of which the first four are warm-up."""
    from megatron.training import training

    from quartet_plugin.megatron.profiling import LayerProfiler
    from quartet_plugin.protocol.attempt_files import TrialSpec
    from quartet_plugin.rank.files import RankFileWriter
    from quartet_plugin.rank.rendezvous import RankEnv

    spec = TrialSpec(attempt_id="0" * 32, folder=str(folder), warmup=4, measure=6, plan_key=None)
    profiler = LayerProfiler(RankFileWriter(spec, RankEnv.of(os.environ)))
    profiler.prepare(delays_te=delays_te)
    training.train_step = profiler.wrap(training.train_step)


def simulate_nccl(*, troubled: bool) -> None:
    """Let Megatron's process groups be `ncclsim`."""
    from tests.runtime import nccl_sim

    if troubled:
        os.environ[nccl_sim.TROUBLE] = "7"
    nccl_sim.install()


def install(order: str, arguments: list[str], folder: Path) -> None:
    """Put the runtime in place for the number of microbatches that the flags say."""
    from quartet_plugin.megatron import seams
    from quartet_plugin.megatron.runtime.install import prepare
    from quartet_plugin.runtime.programs import ScheduleSpec
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
    prepared = prepare(
        ScheduleSpec(
            costs=stage_costs(placement),
            written=read_schedule(Path(file)) if file else None,
            name=None if name in ("family", "plain", "searched") else name,
            family=family if name == "family" else None,
            full_backward_stages=frozenset(range(len(placement))) if "whole" in rest else frozenset(),
        ),
        num_microbatches=num_microbatches(arguments, placement),
        host_transport="host" in rest,
        timeout=timedelta(seconds=90),
        delays_te=ENGINE_LAYERS in arguments,
    )
    if "tracked" in rest:
        prepared.runtime.measure(on_cpu=False)
    seams.install(prepared.wrappers | partition_wrappers(prepared.gradients))
    record_deferred(folder)
    record_reductions(folder)


def partition_wrappers(gradients: Any) -> Any:
    """What lets layers be cut as PARTITION says, their weight gradients deferred with the others."""
    from quartet_plugin.megatron.partition.install import PartitionedModels
    from quartet_plugin.model.tensor_partition import partition_from_label

    partition = partition_from_label(os.environ.get("PARTITION", "stock"))
    return {} if partition is None else PartitionedModels(partition, gradients=gradients).wrappers


def record_deferred(folder: Path) -> None:
    """Leave a line for every I action: stage, microbatch, and the bytes that each product keeps until a W.

    Bytes are of input and output gradient, as the tensors' storages have them.
    """
    from quartet_plugin.megatron.split_backward import WeightGradients

    end = WeightGradients.end
    path = folder / f"deferred-{os.environ['RANK']}"

    def recorded(self: WeightGradients, stage: int, microbatch: int, delayed: Any = ()) -> None:
        end(self, stage, microbatch, delayed)
        pairs = [
            *map(self.tensors_of, self._pending[stage, microbatch]),
            *(layer.layer.wgrad_store.context.queue[-1][0] for layer in delayed),
        ]
        kept = [[tensor.untyped_storage().nbytes() for tensor in pair] for pair in pairs]
        with path.open("a") as stream:
            print(json.dumps([stage, microbatch, kept]), file=stream)

    WeightGradients.end = recorded  # type: ignore[method-assign]


def record_reductions(folder: Path) -> None:
    """Leave a line at the end of every chunk's last action with overlapped reductions: microbatches of the
    step, bucket groups of the chunk, and how many of their reductions have been started in an action.
    """
    from quartet_plugin.megatron.runtime.reduction import GradReduction

    microbatch_done = GradReduction.microbatch_done
    path = folder / f"reductions-{os.environ['RANK']}"

    def recorded(self: GradReduction, chunk: int) -> None:
        groups = self._groups[chunk]
        if groups and self._microbatches_left[chunk] == 1:
            with path.open("a") as stream:
                print(self.num_microbatches, len(groups), len(self._started & set(groups)), file=stream)
        microbatch_done(self, chunk)

    GradReduction.microbatch_done = recorded  # type: ignore[method-assign]


def num_microbatches(arguments: list[str], placement: tuple[int, ...]) -> int:
    """Of the final batch, the last of a batch that changes in steps; flags that come last win."""

    def value(flag: str, default: int) -> int:
        at = [n for n, word in enumerate(arguments) if word == flag]
        return int(arguments[at[-1] + 1].rpartition(":")[2]) if at else default

    ranks = int(os.environ["WORLD_SIZE"]) // (max(placement) + 1)
    shared = value("--tensor-model-parallel-size", 1) * value("--context-parallel-size", 1)
    data_parallel = ranks // shared
    batch = value("--step-batch-size-schedule", value("--global-batch-size", 1))
    return batch // value("--micro-batch-size", 1) // data_parallel


if __name__ == "__main__":
    main()
