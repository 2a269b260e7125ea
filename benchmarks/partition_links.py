"""Rings and grids on links as slow as the products: `python -m benchmarks.partition_links [CASE ...]`.

Processes under tensor parallelism with sequence parallelism train a small GPT on the CPU device, each in a
network namespace of its own; the links are shaped. Products sleep for as long as their operations take at one
rate, and compute nothing, so that other work on the machine does not matter; messages are real.
Two jobs live side by side, stock's linears and those of the partition, and take turns, a step each in random
order: a pair. `ratio` is the median over pairs of stock's time over the partition's, with its 95 % bootstrap
interval. `model` is the ratio that follows where the linears of the partition have the price of
`quartet partition price` at these rates, those of stock the same with Megatron's overlaps, and everything
else takes what it takes in stock's iteration. `linears` is the share of stock's linears, so priced, in its
iteration; `phases` are the partition's measured phases over the priced ones, the least and the greatest.

  whole   gathering an input takes as long as a linear's mean product
  step    a ring's message takes as long as the product beside it

Gathers and reduce-scatters send each shard straight to its rank here: gloo's own reduce-scatter would send
twice the bytes, and its gather leaves one way of a connection idle now and then. Prices take links to carry
nothing but the messages, and messages to several peers to share a link evenly; so frames are large and
windows small. `--plain-links` leaves both as Linux has them.
Needs root, `ip` and `tc`. `--output` keeps all times as JSON.
"""

import argparse
import json
import os
import random
import runpy
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from benchmarks.scenarios.network import PREFIX, address, joined_namespaces, namespace
from benchmarks.scenarios.script import in_turns
from benchmarks.scenarios.turns import heard, let_through, listening
from quartet_plugin.cost.partitions import SCALE_UP, LinearPrice, PartitionRates, price_linear
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.tensor_partition import TensorPartition, partition_from_label
from quartet_plugin.partition.layer import Linear, linears_of, partition_of, planned_layer
from quartet_plugin.partition.table import Phase

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "pretrain_gpt.py"
LAYERS, MICRO_BATCH = 2, 12
# Four linears whose products are nearly alike: 3, 2, 3 and 3 times the hidden size squared.
SHAPE = ModelShape(
    num_layers=LAYERS,
    hidden_size=384,
    ffn_hidden_size=1152,
    num_attention_heads=16,
    num_query_groups=4,
    kv_channels=48,
    seq_length=64,
    vocab_size=128,
    max_position_embeddings=64,
    gated_ffn=False,
    tied_embeddings=True,
    position_embedding="learned_absolute",
)
TOKENS = SHAPE.seq_length * MICRO_BATCH
LINEARS = linears_of(SHAPE, tokens=TOKENS)
FLAGS = shlex.split(f"""
    --num-layers {LAYERS} --hidden-size 384 --ffn-hidden-size 1152 --num-attention-heads 16 --kv-channels 48
    --group-query-attention --num-query-groups 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size {MICRO_BATCH} --global-batch-size {MICRO_BATCH} --mock-data --num-workers 0
    --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 32
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --attention-dropout 0 --hidden-dropout 0
    --log-interval 1000 --eval-interval 1000 --eval-iters 0 --no-check-for-nan-in-loss-and-grad
    --sequence-parallel
""")
STOCK = "stock"
PORTS = {True: 29543, False: 29544}
WARMUP_ROUNDS, LIMIT_S, ELEMENT_BYTES = 2, 1200.0, 4
# What an idle link lets through at once: little beside a message.
BURST = "32kb"
# Headers take 1 % of such frames; in windows as large as Linux's, one message crowds out another.
FRAME_BYTES, WINDOW_BYTES = 9000, 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A partition on this number of processes, and the length of a transfer."""

    partition: str
    num_processes: int
    transfer: str

    @property
    def name(self) -> str:
        """The word of the command line."""
        return f"{self.partition}:{self.num_processes}:{self.transfer}"

    def rates(self, product_s: float) -> PartitionRates:
        """Products of `product_s` in the mean over a layer's linears, and the link that goes with them."""
        flops = statistics.fmean(2 * m * n * k / self.num_processes for m, n, k in _sizes())
        gathered_bytes = float(TOKENS * SHAPE.hidden_size * ELEMENT_BYTES)
        if self.transfer == "whole":
            gathered_bytes *= (self.num_processes - 1) / self.num_processes
        return PartitionRates(
            flops_per_s=flops / product_s,
            bytes_per_s={SCALE_UP: gathered_bytes / product_s},
            hop_s=0.0,
            element_bytes=ELEMENT_BYTES,
            units=1,
            devices_per_domain=self.num_processes,
        )


CASES = {
    case.name: case
    for transfer in ("whole", "step")
    for partition, num_processes in (("rings", 2), ("rings", 4), ("grid", 4))
    for case in [Case(partition=partition, num_processes=num_processes, transfer=transfer)]
}


def _sizes() -> list[tuple[int, int, int]]:
    return [linear.sizes for linear in LINEARS]


def main() -> None:
    """Measure every case, or be one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--product-ms", type=float, default=60.0, help="of a linear's mean product on a rank")
    parser.add_argument("--plain-links", action="store_true", help="frames of 1,500 bytes, Linux's windows")
    parser.add_argument("--namespaces", default=PREFIX, metavar="PREFIX", help="how their names begin")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--as-rank", metavar="JOB:FOLDER:ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"{unknown[0]}: expected some of {', '.join(CASES)}")
    if options.as_rank is not None:
        run_rank(options)
        return
    print(f"{'case':<15}{'link':>10}{'stock':>9}{'cut':>9}{'ratio':>8}{'interval':>16}", end="")
    print(f"{'model':>8}{'linears':>9}{'phases':>14}")
    results = []
    for name in options.cases:
        result = measure(CASES[name], options)
        results.append(
            {
                "case": name,
                "product_ms": options.product_ms,
                "plain_links": options.plain_links,
                **result,
            }
        )
        print(row(CASES[name], result, options.product_ms / 1e3), flush=True)
        if options.output is not None:
            options.output.write_text(json.dumps(results, indent=1) + "\n")


def row(case: Case, result: Mapping[str, Any], product_s: float) -> str:
    """A line of the table."""
    stock_s, cut_s = (np.array([pair[name] for pair in result["pairs"]]) for name in (STOCK, case.partition))
    ratios = stock_s / cut_s
    drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    rates = case.rates(product_s)
    stock_linears_s = LAYERS * sum(stock_linear_s(linear, case.num_processes, rates) for linear in LINEARS)
    prices = cut_prices(case, rates)
    iteration_s = float(np.median(stock_s))
    predicted_s = iteration_s - stock_linears_s + LAYERS * sum(price.time_s for price in prices)
    phases = phase_ratios(case, result["phases_s"], product_s)
    return (
        f"{case.name:<15}{rates.bytes_per_s[SCALE_UP] * 8e-6:>5.0f} Mb/s{iteration_s:>7.2f} s"
        f"{np.median(cut_s):>7.2f} s{np.median(ratios):>8.3f}{f'{low:.3f} to {high:.3f}':>16}"
        f"{iteration_s / predicted_s:>8.3f}{stock_linears_s / iteration_s:>9.1%}"
        f"{f'{min(phases):.2f} to {max(phases):.2f}':>14}"
    )


def phase_ratios(case: Case, phases_s: Mapping[str, float], product_s: float) -> list[float]:
    """The measured seconds of each linear's phases over the priced ones."""
    return [
        phases_s[phase_key(linear.sizes, case, phase)] / price.phases[phase].time_s
        for linear, price in zip(LINEARS, cut_prices(case, case.rates(product_s)), strict=True)
        for phase in Phase
    ]


def stock_linear_s(linear: Linear, devices: int, rates: PartitionRates) -> float:
    """Seconds of one linear by Megatron, which overlaps two of a column-parallel linear's transfers.

    Its input is gathered again beside the product of B, and dI is reduced beside that of G.
    """
    price = price_linear(linear, partition_of("stock", linear, devices), rates)
    forward, inputs, weights = (price.phases[phase] for phase in Phase)
    if linear.role == "out":
        return price.time_s
    return (
        forward.time_s + max(inputs.product_s, weights.exposed_s) + max(weights.product_s, inputs.exposed_s)
    )


def cut_prices(case: Case, rates: PartitionRates) -> list[LinearPrice]:
    """The prices of a layer's linears under the case's partition."""
    tables = planned_layer(partition_of_case(case), LINEARS, case.num_processes)
    return [price_linear(linear, table, rates) for linear, table in zip(LINEARS, tables, strict=True)]


def partition_of_case(case: Case) -> TensorPartition:
    """The case's partition of both blocks."""
    partition = partition_from_label(case.partition)
    assert partition is not None
    return partition


def phase_key(sizes: tuple[int, int, int], case: Case, phase: Phase) -> str:
    """A linear's phase by the sizes of its products; as the ranks' records have it."""
    table = planned_layer(partition_of_case(case), LINEARS, case.num_processes)[_sizes().index(sizes)]
    pieces = [size // count for size, count in zip(sizes, table.pieces, strict=True)]
    return f"{table.name} {phase.name} {pieces}"


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each pair's steps, and of the partition's phases."""
    product_s = options.product_ms / 1e3
    rate = f"{case.rates(product_s).bytes_per_s[SCALE_UP] * 8e-3:.0f}kbit"
    generator = random.Random(case.name)
    names = (STOCK, case.partition)
    rates = [rate] * case.num_processes
    links = (
        joined_namespaces(rates, prefix=options.namespaces, burst=BURST)
        if options.plain_links
        else joined_namespaces(
            rates,
            prefix=options.namespaces,
            burst=BURST,
            frame_bytes=FRAME_BYTES,
            window_bytes=WINDOW_BYTES,
        )
    )
    with tempfile.TemporaryDirectory() as folder, links:
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            with listening(f"{folder}/turns") as server:
                for name in names:
                    ranks += started(case, name, Path(folder), options)
                jobs = connected(server, names, case.num_processes, ranks)
                for job in jobs.values():
                    last_step_s(job)
                pairs = [
                    {name: turn_s(jobs[name]) for name in generator.sample(names, 2)}
                    for _ in range(WARMUP_ROUNDS + options.pairs)
                ]
                for job in jobs.values():
                    let_through(job)
            codes = [rank.wait(timeout=LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
            logs = [path.read_text(errors="replace")[-2000:] for path in sorted(Path(folder).glob("log-*"))]
            if any(rank.returncode for rank in ranks):
                print("\n".join(logs), file=sys.stderr)
        if any(codes):
            raise SystemExit("a rank failed; its log is above")
        records = [
            json.loads((Path(folder) / f"phases-{rank}").read_text()) for rank in range(len(ranks) // 2)
        ]
    phases_s = {key: statistics.median(record[key] for record in records) for key in records[0]}
    return {"pairs": pairs[WARMUP_ROUNDS:], "phases_s": phases_s}


def started(
    case: Case, name: str, folder: Path, options: argparse.Namespace
) -> list[subprocess.Popen[bytes]]:
    """The ranks of one of the two jobs."""
    ranks = []
    for rank in range(case.num_processes):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(case.num_processes),
            "MASTER_PORT": str(PORTS[name == STOCK]),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        words = [
            *(sys.executable, "-m", "benchmarks.partition_links", case.name, "--pairs", str(options.pairs)),
            *("--product-ms", str(options.product_ms), "--namespaces", options.namespaces),
            *("--as-rank", f"{name}:{folder}:{folder}/turns"),
        ]
        with (folder / f"log-{name}-{rank}").open("wb") as log:
            ranks.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log))
    return ranks


def connected(
    server: Any, names: Sequence[str], num_processes: int, ranks: Sequence[subprocess.Popen[bytes]]
) -> dict[str, list[TextIO]]:
    """Both jobs, with a line to and from each of their processes."""
    jobs: dict[str, list[TextIO]] = {name: [] for name in names}
    while any(len(job) < num_processes for job in jobs.values()):
        if any(rank.poll() is not None for rank in ranks):
            raise SystemExit("a process ended before its time")
        with suppress(TimeoutError):
            connection = server.accept()[0]
            connection.settimeout(None)
            line = connection.makefile("rw")
            jobs[heard(line)].append(line)
    return jobs


def turn_s(job: Sequence[TextIO]) -> float:
    """Let a job do one step; its seconds, of the slowest rank."""
    let_through(job)
    return last_step_s(job)


def last_step_s(job: Sequence[TextIO]) -> float:
    """Once all ranks wait for a turn: the seconds of the last step, 0 before the first."""
    return max(float(sum(heard(line))) for line in job)


def run_rank(options: argparse.Namespace) -> None:
    """Train in this rank's namespace, with products that sleep."""
    name, folder, turns = options.as_rank.split(":")
    case = CASES[options.cases[0]]
    place = namespace(int(os.environ["RANK"]), prefix=options.namespaces)
    with Path("/run/netns", place).open("rb") as file:
        os.setns(file.fileno(), os.CLONE_NEWNET)
    os.environ |= {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": f"{place}-0"}
    from quartet_plugin.megatron import cpu_device

    cpu_device.ensure_environment()
    cpu_device.install()
    from megatron.core.tensor_parallel import layers, mappings
    from megatron.training import training

    phases_s: dict[str, list[float]] = {}
    for module in (layers, mappings):
        module.dist_reduce_scatter_func = reduce_scatter
        module.dist_all_gather_func = all_gather
    if name != STOCK:
        install_partition(case, phases_s)
    step = sleeping(training.train_step, flops_per_s=case.rates(options.product_ms / 1e3).flops_per_s)
    training.train_step = in_turns(step, address=turns, job=name, steps=1)
    flags = [
        *(*FLAGS, "--tensor-model-parallel-size", str(case.num_processes)),
        *("--train-iters", str(WARMUP_ROUNDS + options.pairs + 1)),
    ]
    sys.argv = [str(SCRIPT), *flags, *cpu_device.required_flags(set(flags))]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    if name != STOCK:
        medians = {key: statistics.median(seconds) for key, seconds in phases_s.items()}
        (Path(folder) / f"phases-{os.environ['RANK']}").write_text(json.dumps(medians))
    cpu_device.exit_now()


def install_partition(case: Case, phases_s: dict[str, list[float]]) -> None:
    """Put the partition into the model, and record how long each phase takes."""
    from quartet_plugin.megatron import seams
    from quartet_plugin.megatron.partition.install import PartitionedModels
    from quartet_plugin.runtime.partition.phases import HeldBlocks, PartitionExecutor

    seams.install(PartitionedModels(partition_of_case(case)).wrappers)
    run = PartitionExecutor.run

    def timed_run(self: Any, phase: Phase, held: HeldBlocks) -> Any:
        start_s = time.perf_counter()
        result = run(self, phase, held)
        pieces = [held.sizes[axis] for axis in range(3)]
        key = f"{self.steps.partition.name} {phase.name} {pieces}"
        phases_s.setdefault(key, []).append(time.perf_counter() - start_s)
        return result

    PartitionExecutor.run = timed_run  # type: ignore[method-assign]


def sleeping(train_step: Callable[..., Any], *, flops_per_s: float) -> Callable[..., Any]:
    """The step, in which products with weights take their time and give zeros.

    Raises SystemExit where the linears' products have not all been met.
    """
    import torch

    slept_s = [0.0]

    def sleep(left: Any, right: Any) -> None:
        seconds = 2 * left.numel() * right.shape[-1] / flops_per_s
        slept_s[0] += seconds
        time.sleep(seconds)

    def product_instead_of(original: Any) -> Any:
        def product(left: Any, right: Any, *, out: Any = None) -> Any:
            if right.dim() != 2:
                return original(left, right) if out is None else original(left, right, out=out)
            sleep(left, right)
            shape = (*left.shape[:-1], right.shape[-1])
            return left.new_zeros(shape) if out is None else out.zero_()

        return product

    def add_product(total: Any, left: Any, right: Any) -> Any:
        sleep(left, right)
        return total

    torch.matmul, torch.mm = product_instead_of(torch.matmul), product_instead_of(torch.mm)
    torch.Tensor.matmul = product_instead_of(torch.Tensor.matmul)
    torch.Tensor.addmm_ = add_product

    def sleeping_train_step(*args: Any, **kwargs: Any) -> Any:
        go_first()
        slept_s[0] = 0.0
        results = train_step(*args, **kwargs)
        of_layers = sum(m * n * k for m, n, k in _sizes()) * LAYERS
        of_head = TOKENS * SHAPE.hidden_size * SHAPE.vocab_size
        expected_s = 3 * 2 * (of_layers + of_head) / int(os.environ["WORLD_SIZE"]) / flops_per_s
        if abs(slept_s[0] / expected_s - 1) > 1e-6:
            raise SystemExit(f"products slept {slept_s[0]:.4f} s; expected {expected_s:.4f} s")
        return results

    return sleeping_train_step


def go_first() -> None:
    """Have all threads of this rank run before other work on the machine: they hardly compute."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))


@dataclass(slots=True)
class RunningCollective:
    """Messages under way, what they need until then, and what is to be done when they are there."""

    works: Sequence[Any]
    held: Sequence[Any]
    finish: Callable[[], None]

    def wait(self) -> None:
        """Wait for the result."""
        for work in self.works:
            work.wait()
        self.finish()


def exchanged(sends: Sequence[Any], receives: Sequence[Any], group: Any) -> Sequence[Any]:
    """The started messages of this rank with all others: each other's, in the order of the ranks after it."""
    import torch.distributed as dist

    peers = [dist.get_global_rank(group, other) for other in others_of(group)]
    # Receives first, as the partition's messages: so gloo uses both ways of a connection.
    works: Sequence[Any] = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, tensor, peer, group) for tensor, peer in zip(receives, peers, strict=True)]
        + [dist.P2POp(dist.isend, tensor, peer, group) for tensor, peer in zip(sends, peers, strict=True)]
    )
    return works


def others_of(group: Any) -> list[int]:
    """The other ranks of a group, from the next one on."""
    import torch.distributed as dist

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return [(rank + step) % size for step in range(1, size)]


def reduce_scatter(
    output: Any, source: Any, group: Any = None, async_op: bool = False
) -> RunningCollective | None:
    """`torch.distributed.reduce_scatter_tensor` of a sum, each shard straight to its rank."""
    import torch
    import torch.distributed as dist

    shards = source.chunk(dist.get_world_size(group))
    received = [torch.empty_like(output) for _ in shards[1:]]
    works = exchanged([shards[other] for other in others_of(group)], received, group)

    def add() -> None:
        output.copy_(shards[dist.get_rank(group)])
        for buffer in received:
            output.add_(buffer)

    return waited(RunningCollective(works, shards, add), async_op)


def all_gather(
    output: Any, source: Any, group: Any = None, async_op: bool = False
) -> RunningCollective | None:
    """`torch.distributed.all_gather_into_tensor`, each shard straight to every rank."""
    import torch.distributed as dist

    shards = output.chunk(dist.get_world_size(group))
    others = others_of(group)
    works = exchanged([source] * len(others), [shards[other] for other in others], group)

    def copy() -> None:
        shards[dist.get_rank(group)].copy_(source)

    return waited(RunningCollective(works, [source, output], copy), async_op)


def waited(running: RunningCollective, is_async: bool) -> RunningCollective | None:
    """The collective, which is over where it is not asynchronous."""
    if is_async:
        return running
    running.wait()
    return None


if __name__ == "__main__":
    main()
