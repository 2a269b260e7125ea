"""What reductions cost on a slow link: `python -m benchmarks.early_reduction [--rate 270mbit] [ORDER ...]`.

Four processes train a small GPT on the CPU device, two pipelines of two ranks each (PP 2 x DP 2). Each
pipeline is in a network namespace of its own, and a shaped link joins the two: only gradients cross it.
Layers sleep, so that computation takes the same time on any machine and shares no core with the reduction.
The link is shaped in every second iteration; in the others the reduction is as good as free. The medians of
the two are compared: the loss. `least` is the loss of the shortest
iterations, which says more on a machine that others use. `share` is the time of all reductions alone, of both
pipeline ranks, over that free iteration; `exposed` is what a rank waits for them at the end of an iteration.
`bound` is the least loss that is possible where reductions start when they do: the link takes what has been
started, in that order, without a pause.

  stock     Megatron's schedule of that name, with --overlap-grad-reduce
  by chunk  the same order by the runtime; a chunk's reductions start after its last microbatch
  by group  each of DDP's bucket groups starts when its gradients are complete
  by part   the runtime as it is: large groups start in parts, and the last W's of a chunk go layer by layer

Needs root, `ip` and `tc`. `--output` keeps all times as JSON. `--repeats` runs all of it in turns.
"""

import argparse
import json
import os
import runpy
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from benchmarks.scenarios.network import address, joined_namespaces, namespace

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "pretrain_gpt.py"
FLAGS = shlex.split("""
    --num-layers 16 --hidden-size 256 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8
    --pipeline-model-parallel-size 2 --micro-batch-size 1 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 1023 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --attention-dropout 0 --hidden-dropout 0
    --log-interval 1000 --eval-interval 1000 --eval-iters 0 --num-workers 0 --overlap-grad-reduce
    --ddp-bucket-size 250000 --no-align-grad-reduce --no-check-for-nan-in-loss-and-grad
""")
NUM_RANKS, PORT, FREE = 4, 29533, "40gbit"
LIMIT_S = 300.0
WARMUP_STEPS = 2  # Even: the first iteration after them is a free one.
RUNTIMES = ("stock", "by chunk", "by group", "by part")
LINEAR, LOOP = (0, 1), (0, 1) * 4
# Of a rank's iteration: `starts` (when a reduction started, and its bytes), `computed_s` (when nothing was
# left to compute) and the `ends` of reductions.
type Trace = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order of actions; `is_stock`: Megatron has it too."""

    placement: tuple[int, ...]
    is_stock: bool = False

    @property
    def layout(self) -> str:
        """Megatron's word for an even split of the layers."""
        return f"E{'|'.join(['t' * (16 // len(self.placement))] * len(self.placement))}L"


ORDERS = {
    "1f1b": Order(placement=LINEAR, is_stock=True),
    "interleaved": Order(placement=LOOP, is_stock=True),
    "breadth-first": Order(placement=LOOP),
    "zb-h1": Order(placement=LINEAR),
    "zb-v": Order(placement=(0, 1, 1, 0)),
}


def main() -> None:
    """Measure every order with and without the shaped link, or be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("orders", nargs="*", default=list(ORDERS), metavar="ORDER")
    parser.add_argument("--rate", default="270mbit", help="of the link, each way, as tc writes it")
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=RUNTIMES)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--layer-ms", type=float, default=60.0, help="of a forward, of an I, and of a W")
    parser.add_argument("--steps", type=int, default=6, help="of each kind, after the first two")
    parser.add_argument("--repeats", type=int, default=1, help="of all orders and runtimes, in turns")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--as-rank", metavar="ORDER:RUNTIME:FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [name for name in options.orders if name not in ORDERS]
    if unknown:
        parser.error(f"{unknown[0]}: expected some of {', '.join(ORDERS)}")
    if options.as_rank is not None:
        run_rank(options)
        return
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    print(f"{'order':<15}{'runtime':<10}", end="")
    print(
        f"{'free':>9}{'shaped':>9}{'reduction':>11}{'share':>8}{'loss':>8}{'least':>8}{'exposed':>9}{'bound':>8}"
    )
    for _ in range(options.repeats):
        for name in options.orders:
            for runtime in options.runtimes:
                if runtime == "stock" and not ORDERS[name].is_stock:
                    continue
                run = measure(options, name, runtime)
                results.setdefault((name, runtime), []).append(run)
                print(row(name, runtime, [run]), flush=True)
    if options.repeats > 1:
        print(f"all {options.repeats} repeats")
        for (name, runtime), runs in results.items():
            print(row(name, runtime, runs))
    if options.output is not None:
        lines = [
            {"order": name, "runtime": runtime, "runs": runs} for (name, runtime), runs in results.items()
        ]
        options.output.write_text(json.dumps(lines, indent=1) + "\n")


def row(name: str, runtime: str, runs: Sequence[dict[str, Any]]) -> str:
    """A line of the table."""
    free, shaped = ([s for run in runs for s in run["steps_s"][first::2]] for first in (0, 1))
    free_s, shaped_s = statistics.median(free), statistics.median(shaped)
    reduction_s = statistics.median(run["reduction_s"] for run in runs)
    exposed_s = statistics.median(s for run in runs for s in run["exposed_s"][1::2])
    bound_s = statistics.median(
        s for run in runs for s in least_losses_s(run["traces"], reduction_s=reduction_s)[::2]
    )
    return (
        f"{name:<15}{runtime:<10}{free_s:>7.3f} s{shaped_s:>7.3f} s{reduction_s:>9.3f} s"
        f"{reduction_s / free_s:>8.1%}{shaped_s / free_s - 1:>8.1%}"
        f"{min(shaped) / min(free) - 1:>8.1%}"
        f"{exposed_s / free_s:>9.1%}{bound_s / free_s:>8.1%}"
    )


def least_losses_s(traces: Sequence[Sequence[Trace]], *, reduction_s: float) -> list[float]:
    """By iteration: how long a link would still be busy when the last rank has nothing left to compute.

    `traces` are by rank and iteration. The ranks of a pipeline share the link; all take the same bytes.
    """
    losses_s = []
    for iteration in zip(*traces, strict=True):
        num_bytes = sum(size for trace in iteration[::2] for _, size in trace["starts"])
        ends_s = []
        for pipeline in (iteration[::2], iteration[1::2]):
            end_s = 0.0
            for start_s, size in sorted(start for trace in pipeline for start in trace["starts"]):
                end_s = max(end_s, start_s) + size / num_bytes * reduction_s
            ends_s.append(end_s)
        losses_s.append(max(0.0, max(ends_s) - max(trace["computed_s"] for trace in iteration)))
    return losses_s


def measure(options: argparse.Namespace, name: str, runtime: str) -> dict[str, Any]:
    """The times of one run: every iteration's, of its slowest rank, and of the reductions alone."""
    with tempfile.TemporaryDirectory() as folder, joined_namespaces([FREE, FREE]):
        words = [
            *(sys.executable, "-m", "benchmarks.early_reduction", "--as-rank", f"{name}:{runtime}:{folder}"),
            *("--microbatches", str(options.microbatches), "--layer-ms", str(options.layer_ms)),
            *("--steps", str(options.steps), "--rate", options.rate),
        ]
        ranks = []
        try:
            for rank in range(NUM_RANKS):
                environment = os.environ | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank // 2),
                    "WORLD_SIZE": str(NUM_RANKS),
                    "MASTER_PORT": str(PORT),
                    "OMP_NUM_THREADS": "1",
                    "PYTHONWARNINGS": "ignore",
                }
                with (Path(folder) / f"log-{rank}").open("wb") as log:
                    ranks.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log))
            deadline_s = time.monotonic() + LIMIT_S
            codes = [rank.wait(timeout=max(1.0, deadline_s - time.monotonic())) for rank in ranks]
        finally:
            for started in ranks:
                started.kill()
                started.wait()
        if any(codes):
            failed = next(rank for rank, code in enumerate(codes) if code)
            raise SystemExit((Path(folder) / f"log-{failed}").read_text(errors="replace")[-3000:])
        found = [json.loads((Path(folder) / f"times-{rank}").read_text()) for rank in range(NUM_RANKS)]
    return {
        **{
            name: [max(times) for times in zip(*(rank[name] for rank in found), strict=True)]
            for name in ("steps_s", "exposed_s")
        },
        "reduction_s": max(rank["reduction_s"] for rank in found),
        "traces": [rank["traces"] for rank in found],
    }


def run_rank(options: argparse.Namespace) -> None:
    """Train in this rank's namespace, with layers that sleep."""
    name, runtime, folder = options.as_rank.split(":")
    # Ranks of a pipeline are two apart.
    place = namespace(int(os.environ["RANK"]) % 2)
    with Path("/run/netns", place).open("rb") as file:
        os.setns(file.fileno(), os.CLONE_NEWNET)
    os.environ |= {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": f"{place}-0"}
    from quartet_plugin.megatron import cpu_device

    cpu_device.ensure_environment()
    cpu_device.install()
    from megatron.training import training

    seconds = options.layer_ms / 1e3
    gradients = None if runtime == "stock" else install(name, runtime, options.microbatches, seconds)
    let_layers_sleep(seconds, is_deferred=lambda: gradients is not None and gradients.open is not None)
    record = Path(folder) / f"times-{os.environ['RANK']}"
    link = Link(f"{place}-0", rate=options.rate, is_mine=os.environ["LOCAL_RANK"] == "0")
    training.train_step = timed(training.train_step, steps=2 * options.steps, record=record, link=link)
    flags = [
        *(*FLAGS, "--pipeline-model-parallel-layout", ORDERS[name].layout),
        *("--global-batch-size", str(2 * options.microbatches)),
        *("--train-iters", str(WARMUP_STEPS + 2 * options.steps)),
    ]
    sys.argv = [str(SCRIPT), *flags, *cpu_device.required_flags(set(flags))]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    cpu_device.exit_now()


def install(name: str, runtime: str, num_microbatches: int, seconds: float) -> Any:
    """Put the schedule's runtime in place; returns its deferred weight gradients."""
    import numpy as np

    from quartet_plugin.megatron import seams, split_backward
    from quartet_plugin.megatron.runtime import reduction
    from quartet_plugin.megatron.runtime.install import prepare
    from quartet_plugin.megatron.runtime.reduction import GradReductions
    from quartet_plugin.model.costs import StageCosts
    from quartet_plugin.runtime.programs import ScheduleSpec

    placement = ORDERS[name].placement
    ones = np.ones(len(placement))
    costs = StageCosts(
        device_of_stage=np.array(placement),
        forward_s=ones,
        input_grad_s=ones,
        weight_grad_s=ones,
        backward_s=2 * ones,
        activation_bytes=ones,
        forward_transfer_s=0 * ones,
        backward_transfer_s=0 * ones,
        held_fraction=0.5,
    )
    deferred: list[Any] = []
    gradients = split_backward.WeightGradients
    initialize, accumulate = gradients.__init__, gradients.accumulate

    def kept(self: Any) -> None:
        initialize(self)
        deferred.append(self)

    def slow_accumulate(self: Any, pending: Any) -> None:
        # A layer has four products; the head's counts as one of them.
        time.sleep(seconds / 4)
        accumulate(self, pending)

    gradients.__init__ = kept  # type: ignore[method-assign]
    gradients.accumulate = slow_accumulate  # type: ignore[method-assign]
    if runtime == "by chunk":
        # Every step is taken for the first, which reduces by chunk.
        GradReductions.end = GradReductions.abort  # type: ignore[method-assign]
    if runtime != "by part":
        reduction.parts_of = lambda group: [group]  # type: ignore[attr-defined]
        gradients.order_by_layer = lambda *_: None  # type: ignore[method-assign]
    prepared = prepare(ScheduleSpec(costs=costs, name=name), num_microbatches=num_microbatches)
    seams.install(prepared.wrappers)
    return deferred[0]


def let_layers_sleep(seconds: float, *, is_deferred: Callable[[], bool]) -> None:
    """A forward of a transformer layer sleeps, its I as long, and its W, unless that is deferred.

    Half of it in the attention and half in the MLP, whose weights' gradients come one after the other.
    """
    import torch
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.mlp import MLP

    class Sleep(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(_: Any, hidden: Any) -> Any:
            time.sleep(seconds / 2)
            return hidden.clone()

        @staticmethod
        def backward(_: Any, grad: Any) -> Any:
            time.sleep(seconds / 2 if is_deferred() else seconds)
            return grad

    def hook(module: Any, _: Any, output: Any) -> Any:
        return (Sleep.apply(output[0]), *output[1:]) if isinstance(module, (SelfAttention, MLP)) else None

    torch.nn.modules.module.register_module_forward_hook(hook)


@dataclass(frozen=True, slots=True)
class Link:
    """The way out of this rank's namespace; `is_mine`: this rank shapes it."""

    device: str
    _: KW_ONLY
    rate: str
    is_mine: bool

    def shape(self, *, is_free: bool) -> None:
        """Let the link pass what it can, or `rate`. Nothing may be on its way."""
        rate = FREE if is_free else self.rate
        words = ("tc", "qdisc", "change", "dev", self.device, "root", "tbf", "rate", rate)
        if self.is_mine:
            subprocess.run((*words, "burst", "128kb", "latency", "50ms"), check=True)


def timed(train_step: Callable[..., Any], *, steps: int, record: Path, link: Link) -> Callable[..., Any]:
    """Megatron's `train_step`, which leaves its times and that of all reductions alone after the last."""
    import torch.distributed as dist
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    times_s: list[float] = []
    exposed_s: list[float] = []
    traces: list[Trace] = []
    begins_s = [0.0]
    finish = DistributedDataParallel.finish_grad_sync
    start = _ParamAndGradBucketGroup.start_grad_sync

    def since_begin() -> float:
        return time.perf_counter() - begins_s[-1]

    def timed_finish(self: Any, *args: Any, **kwargs: Any) -> None:
        begin_s = since_begin()
        finish(self, *args, **kwargs)
        exposed_s[-1] += since_begin() - begin_s
        traces[-1].setdefault("computed_s", begin_s)

    def traced_start(self: Any, *args: Any, **kwargs: Any) -> None:
        before, begin_s, trace = self.grad_reduce_handle, since_begin(), traces[-1]
        start(self, *args, **kwargs)
        if self.grad_reduce_handle is not before:
            trace["starts"].append((begin_s, sum(bucket.grad_data.nbytes for bucket in self.buckets)))
            future = self.grad_reduce_handle.works[-1].get_future()
            future.add_done_callback(lambda _: trace["ends"].append(since_begin()))

    DistributedDataParallel.finish_grad_sync = timed_finish
    _ParamAndGradBucketGroup.start_grad_sync = traced_start

    def timed_train_step(*args: Any, **kwargs: Any) -> Any:
        dist.barrier()
        link.shape(is_free=len(times_s) % 2 == 0)
        dist.barrier()
        begins_s.append(time.perf_counter())
        exposed_s.append(0.0)
        traces.append({"starts": [], "ends": []})
        result = train_step(*args, **kwargs)
        times_s.append(since_begin())
        if len(times_s) == WARMUP_STEPS + steps:
            traces.append({"starts": [], "ends": []})
            exposed_s.append(0.0)
            for chunk in args[2]:
                chunk.zero_grad_buffer()
            dist.barrier()
            link.shape(is_free=False)
            dist.barrier()
            begin = time.perf_counter()
            for chunk in args[2]:
                chunk.start_grad_sync()
            for chunk in args[2]:
                chunk.finish_grad_sync()
            dist.barrier()
            reduction_s = time.perf_counter() - begin
            measured = slice(WARMUP_STEPS, WARMUP_STEPS + steps)
            times = {
                "steps_s": times_s[measured],
                "exposed_s": exposed_s[measured],
                "traces": traces[measured],
            }
            record.write_text(json.dumps({**times, "reduction_s": reduction_s}))
        return result

    return timed_train_step


if __name__ == "__main__":
    main()
