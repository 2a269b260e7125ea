"""The custom schedule runtime against stock: `python benchmarks/runtime_overhead.py [SCENARIO ...]`.

Two pinned processes, one thread each, train a small GPT (PP2, m = 2p, CPU device). A pair is two adjacent
blocks of steps in these same processes, the tested thing switched between the blocks, in random order; its
ratio is the time of the first of the two names over that of the second, of the slower rank. Printed are the
median of the ratios and its 95 % bootstrap interval over pairs; where orders are the same also the peak of
saved tensors.

  1f1b, interleaved   stock / custom with the same order: the lower end should be 0.99 or more
  zb-h1, searched     stock 1F1B / ZB-H1, or what the search finds with half as much memory again:
                      above 1 is faster
  recording           without / with a record per action: the lower end should be 0.995 or more
"""

import argparse
import gc
import json
import os
import random
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "pretrain_gpt.py"
# Short iterations: the runtime weighs more in them, and many short pairs say more than few long ones.
FLAGS = shlex.split(
    "--hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--pipeline-model-parallel-size 2 --micro-batch-size 2 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --train-iters 100000 "
    "--lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --clip-grad 1.0 "
    "--attention-dropout 0 --hidden-dropout 0 --log-interval 100000 --eval-interval 1000000 --eval-iters 0"
)
WARMUP_STEPS = 6
TRACKED_STEPS = 2
# What the head weighs against a layer, and how much more than 1F1B the searched order may hold.
HEAD_LAYERS = 0.6
MORE_MEMORY = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is compared: `order` is the custom one; `against` is `stock`, or the runtime without records."""

    order: str
    placement: tuple[int, ...] = (0, 1)
    split: tuple[int, ...] = (1, 1)
    num_microbatches: int = 4
    against: str = "stock"
    goal: float | None = 0.99

    @property
    def layout(self) -> str:
        """Megatron's word for the split."""
        return f"E{'|'.join('t' * count for count in self.split)}L"


SCENARIOS = {
    "1f1b": Scenario(order="1f1b"),
    "interleaved": Scenario(order="interleaved", placement=(0, 1, 0, 1), split=(0, 1, 1, 0)),
    "zb-h1": Scenario(order="zb-h1", goal=None),
    "searched": Scenario(order="searched", split=(2, 1), goal=None),
    "recording": Scenario(order="1f1b", against="unrecorded", goal=0.995),
}


def main() -> int:
    """Start the two processes of every scenario, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--pairs", type=int, default=800)
    parser.add_argument("--steps", type=int, default=10, help="steps a block")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write every block's time there, as JSON")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [name for name in options.scenarios if name not in SCENARIOS]
    if unknown:
        parser.error(f"{unknown[0]}: expected some of {', '.join(SCENARIOS)}")
    if options.folder is not None:
        run_rank(options, SCENARIOS[options.scenarios[0]])
        return 0
    results = {name: measure(options, name) for name in options.scenarios}
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    goals = {name: SCENARIOS[name].goal for name in results}
    met = [goal is None or results[name]["ratio"]["low"] >= goal for name, goal in goals.items()]
    return 0 if all(met) else 1


def measure(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Run one scenario and print its line."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", __file__, name),
                *("--folder", folder, "--pairs", str(options.pairs), "--steps", str(options.steps)),
                *("--seed", str(options.seed)),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
        )
        ranks = [json.loads((Path(folder) / f"blocks-{rank}.json").read_text()) for rank in range(2)]
    result = summary(ranks, seed=options.seed, steps=options.steps)
    scenario, ratio = SCENARIOS[name], result["ratio"]
    what = f"{scenario.against} / {'recorded' if scenario.against != 'stock' else scenario.order}"
    goal = "" if scenario.goal is None else f", lower end >= {scenario.goal}: {ratio['low'] >= scenario.goal}"
    print(
        f"{name}: {what}: {ratio['median']:.4f} [{ratio['low']:.4f}, {ratio['high']:.4f}], "
        f"{options.pairs} pairs of {options.steps} steps, {result['iteration_s'] * 1e3:.1f} ms a step{goal}; "
        f"peak of saved tensors {result['ours_bytes']} of {result['other_bytes']} bytes",
        flush=True,
    )
    return result


def summary(ranks: Sequence[Any], *, seed: int, steps: int) -> dict[str, Any]:
    """Median ratio, its interval, and the peaks by rank."""
    seconds = np.max([rank["seconds"] for rank in ranks], axis=0).reshape(-1, 2)
    is_custom = np.array(ranks[0]["is_custom"]).reshape(-1, 2)
    custom_s, other_s = seconds[is_custom], seconds[~is_custom]
    ratios = other_s / custom_s
    draws = np.random.default_rng(seed).choice(ratios, size=(20_000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return {
        "ratio": {"median": float(np.median(ratios)), "low": float(low), "high": float(high)},
        "iteration_s": float(np.median(other_s)) / steps,
        "custom_s": custom_s.tolist(),
        "other_s": other_s.tolist(),
        "ours_bytes": [rank["peak_bytes"]["true"] for rank in ranks],
        "other_bytes": [rank["peak_bytes"]["false"] for rank in ranks],
    }


def run_rank(options: argparse.Namespace, scenario: Scenario) -> None:
    """Train with schedules that are switched between blocks."""
    from quartet_plugin.megatron import cpu_device

    cpu_device.ensure_environment()
    cpu_device.install()
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    from quartet_plugin.megatron import seams
    from quartet_plugin.megatron.runtime.install import prepare
    from quartet_plugin.megatron.seams.declared import SCHEDULES
    from quartet_plugin.runtime.records import NullRecorder, Recorder

    prepared = prepare(spec_of(scenario), num_microbatches=scenario.num_microbatches)
    blocks = Blocks(options, stock_step=training.train_step)
    runtime = prepared.runtime

    def switching(stock: Callable[..., Any]) -> Callable[..., Any]:
        def forward_backward(**call: Any) -> Any:
            if scenario.against == "stock":
                return (runtime.forward_backward if blocks.is_custom else stock)(**call)
            runtime.recorder = Recorder() if blocks.is_custom else NullRecorder()
            return runtime.forward_backward(**call)

        return forward_backward

    wrappers = {**prepared.wrappers, **dict.fromkeys(SCHEDULES, switching)}
    seams.install(wrappers)
    assert schedules is sys.modules[SCHEDULES[0].module]
    training.train_step = blocks.train_step
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    flags = [
        *FLAGS, "--pipeline-model-parallel-layout", scenario.layout, "--num-layers", str(sum(scenario.split)),
        "--global-batch-size", str(2 * scenario.num_microbatches),
    ]  # fmt: skip
    sys.argv = [str(SCRIPT), *flags, *cpu_device.required_flags(set(flags))]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def spec_of(scenario: Scenario) -> Any:
    """What makes the order: of a named one all stages count alike."""
    from quartet_plugin.runtime.programs import ScheduleSpec

    if scenario.order == "searched":
        return searched(scenario)
    return ScheduleSpec(costs=stage_costs(scenario, np.ones(len(scenario.placement))), name=scenario.order)


def stage_costs(scenario: Scenario, cost: Any) -> Any:
    """Stages whose forward and gradients take `cost` [num_stages] each."""
    from quartet_plugin.model.costs import StageCosts

    return StageCosts(
        device_of_stage=np.array(scenario.placement),
        forward_s=cost,
        input_grad_s=cost,
        weight_grad_s=cost,
        backward_s=2 * cost,
        activation_bytes=cost,
        forward_transfer_s=0 * cost,
        backward_transfer_s=0 * cost,
        held_fraction=0.5,
    )


def searched(scenario: Scenario) -> Any:
    """The best order that the search finds where 1.5 times 1F1B's activations fit."""
    from quartet_plugin.model.shape import ModelShape
    from quartet_plugin.runtime.programs import ScheduleSpec
    from quartet_plugin.schedule.search import search
    from quartet_plugin.space.schedules import cost_table, memory_limit
    from quartet_plugin.split.layers import entries_of, flops_end_loads

    shape = ModelShape(
        num_layers=sum(scenario.split),
        hidden_size=128,
        ffn_hidden_size=512,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=32,
        seq_length=64,
        vocab_size=1024,
        max_position_embeddings=64,
        gated_ffn=False,
        tied_embeddings=True,
        position_embedding="learned_absolute",
    )
    costs = cost_table(
        shape,
        end_loads=flops_end_loads(shape).rounded(),
        placement=scenario.placement,
        num_devices=2,
        num_microbatches=scenario.num_microbatches,
    )
    limit = MORE_MEMORY * memory_limit(costs, scenario.placement)
    entries = entries_of(scenario.split)
    result = search(
        replace(costs, memory_limit_bytes=limit),
        placement=scenario.placement,
        split=entries,
        evaluations=3000,
        seed=0,
    )
    cost = np.array(scenario.split, dtype=np.float64)
    cost[-1] += HEAD_LAYERS
    return ScheduleSpec(costs=stage_costs(scenario, cost), written=result.schedule)


class Blocks:
    """Counts steps and says which of the two runs, block by block, alike on every rank."""

    def __init__(self, options: argparse.Namespace, *, stock_step: Callable[..., Any]) -> None:
        generator = random.Random(options.seed)
        pairs = [generator.sample([True, False], 2) for _ in range(options.pairs)]
        self._order = [is_custom for pair in pairs for is_custom in pair]
        self._train_step = stock_step
        self._steps, self._folder = options.steps, options.folder
        self._done = -WARMUP_STEPS - TRACKED_STEPS
        self._block_start = 0.0
        self._seconds: list[float] = []
        self._peak_bytes: dict[bool, int] = {}
        self.is_custom = False

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """One step; both kinds run during the warm-up, and once each under the tracker."""
        in_block = self._done >= 0
        self.is_custom = self._order[self._done // self._steps] if in_block else self._done % 2 == 0
        with ExitStack() as stack:
            tracker = stack.enter_context(SavedTensorBytes()) if -TRACKED_STEPS <= self._done < 0 else None
            results = self._train_step(*args, **kwargs)
        if tracker is not None:
            self._peak_bytes[self.is_custom] = tracker.peak_bytes
        self._done += 1
        if self._done >= 0 and self._done % self._steps == 0:
            now = time.perf_counter()
            if self._done > 0:
                self._seconds.append(now - self._block_start)
            self._block_start = now
        if len(self._seconds) == len(self._order):
            self._finish()
        return results

    def _finish(self) -> None:
        import torch.distributed as dist

        from quartet_plugin.rank.session import exit_now

        content = {"seconds": self._seconds, "is_custom": self._order, "peak_bytes": self._peak_bytes}
        (self._folder / f"blocks-{os.environ['RANK']}.json").write_text(json.dumps(content))
        dist.barrier()
        exit_now(0)


class SavedTensorBytes:
    """The peak of bytes that autograd keeps between forward and backward, each storage once."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._bytes = 0
        self._users: dict[int, int] = {}

    def __enter__(self) -> "SavedTensorBytes":
        import torch

        gc.collect()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Any) -> "Kept":
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), 0 if tensor.is_leaf and tensor.requires_grad else storage.nbytes()
        self._users[key] = self._users.get(key, 0) + 1
        if self._users[key] == 1:
            self._bytes += size
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        return Kept(tensor, lambda: self._drop(key, size))

    def _drop(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if self._users[key] == 0:
            self._bytes -= size


class Kept:
    """A saved tensor that tells when it is given up."""

    def __init__(self, tensor: Any, gone: Callable[[], None]) -> None:
        self.tensor = tensor
        self._gone = gone

    def __del__(self) -> None:
        self._gone()


if __name__ == "__main__":
    sys.exit(main())
