"""What our runtime costs under DeepSpeed: stock's own order through it against stock's schedule.

    torchrun --nproc-per-node 2 benchmarks/deepspeed_overhead.py [--blocks N] [--steps N] [--json FILE]

Both run in the same processes, on one engine, in adjacent blocks of steps whose order alternates. Printed
is stock's time over ours, the median of the pairs, with a 95 % bootstrap interval: above 1 ours is faster.
Short blocks and many pairs: a machine's speed drifts by more than the difference that is looked for.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine

import quartet_plugin.deepspeed
from examples import pretrain_deepspeed as example
from quartet_plugin.deepspeed.engine import PlannedEngine
from quartet_plugin.schedule.files import schedule_to_json
from quartet_plugin.schedule.named import named


def main() -> None:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=300, help="pairs of blocks (300)")
    parser.add_argument("--steps", type=int, default=2, help="steps a block (2)")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    engine = make_engine(options)
    times: dict[str, list[float]] = {"stock": [], "ours": []}

    def block(side: str) -> None:
        engine.__class__ = PlannedEngine if side == "ours" else PipelineEngine
        torch.distributed.barrier()
        start = time.perf_counter()
        for _ in range(options.steps):
            engine.train_batch()
        torch.distributed.barrier()
        times[side].append(time.perf_counter() - start)

    for number in range(-2, options.blocks):
        for side in ("stock", "ours") if number % 2 else ("ours", "stock"):
            block(side)
    if engine.global_rank == 0:
        report(np.array(times["stock"][2:]) / np.array(times["ours"][2:]), times, options)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def make_engine(options: argparse.Namespace) -> Any:
    """One engine that runs either: our module with stock's stages."""
    stages = torch.distributed.get_world_size()
    words = ["--data-path", "none", "--num-layers", str(options.num_layers), "--seq-length", "64"]
    words += ["--hidden-size", str(options.hidden_size), "--vocab-size", "1024"]
    args = example.parse_arguments(words)
    order = named("1f1b", num_devices=stages, num_microbatches=options.microbatches)
    layers = example.layers_of(args)
    counts = [options.num_layers // stages] * stages
    counts[0] += 1
    counts[-1] += 1 + options.num_layers % stages
    path = Path(tempfile.mkdtemp(), "schedule.json")
    content = schedule_to_json(replace(order, layers_per_stage=tuple(counts)))
    path.write_text(json.dumps(content), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 1024, (512, 65), generator=generator)
    data = torch.utils.data.TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    engine, _, _, _ = quartet_plugin.deepspeed.initialize(
        model=PipelineModule(layers=layers, num_stages=stages, loss_fn=example.mean_cross_entropy),
        training_data=data,
        config={
            "train_batch_size": 2 * options.microbatches,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
            "gradient_clipping": 0,
            "steps_per_print": 10**9,
            "quartet": {"schedule": str(path)},
        },
    )
    shutil.rmtree(path.parent)
    return engine


def report(ratios: np.ndarray, times: dict[str, list[float]], options: argparse.Namespace) -> None:
    """The median of the pairs' ratios and its bootstrap interval."""
    generator = np.random.default_rng(0)
    draws = generator.choice(ratios, size=(10_000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    found = {
        "ratio": float(np.median(ratios)),
        "low": float(low),
        "high": float(high),
        "num_pairs": len(ratios),
        "stock_step_s": statistics.median(times["stock"]) / options.steps,
        "ours_step_s": statistics.median(times["ours"]) / options.steps,
    }
    print(
        f"stock / ours {found['ratio']:.3f} ({low:.3f} to {high:.3f}, {len(ratios)} pairs); "
        f"a step {found['stock_step_s'] * 1e3:.1f} ms and {found['ours_step_s'] * 1e3:.1f} ms"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
