"""One process of a test: trains a small GPT with DeepSpeed and writes losses and gradient norms.

torchrun ... -m tests.deepspeed.train_rank OPTIONS.json OUTPUT.json
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import schedule as stock

import quartet_plugin.deepspeed
from examples import pretrain_deepspeed as example
from quartet_plugin.deepspeed import seams
from quartet_plugin.deepspeed.config import clips_by_first_stage
from quartet_plugin.errors import QuartetError

DEFAULTS: dict[str, Any] = {
    "stages": 2,
    "layers": 4,
    "steps": 3,
    "microbatches": 4,
    "micro_batch": 2,
    "zero": 0,
    "clipping": 0.0,
    "tied": False,
    "checkpointing": 0,
    "reentrant": True,
    "precision": None,
    "partition": "type:Block",
    "quartet": None,
    "evaluate": False,
    "pairs": False,
    "dynamic": False,
    "extra": {},
}


def main() -> None:
    """Train as each of the options in the first argument's list says, one after another."""
    preloaded = {"compiler": "torch._dynamo" in sys.modules, "seams": bool(seams.check.cache_info().currsize)}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    # DeepSpeed asks for instructions that few CPUs have; torch computes in fp16 on all of them.
    get_accelerator().is_fp16_supported = lambda: True
    results = []
    for given in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        try:
            results.append({**train({**DEFAULTS, **given}), "preloaded": preloaded})
        except QuartetError as error:
            # Every rank must have refused alike, or the next one would hang.
            results.append({"error": str(error), "exit_code": int(error.exit_code)})
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Losses and gradient norms of some steps."""
    args = arguments_of(options)
    torch.manual_seed(args.seed)
    specs = example.layers_of(args)
    if options["pairs"]:
        specs = [LayerSpec(Paired, spec) for spec in specs[:-1]] + [LayerSpec(Unpaired, specs[-1])]
    model = PipelineModule(
        layers=specs,
        num_stages=options["stages"],
        loss_fn=example.mean_cross_entropy,
        partition_method=options["partition"],
        activation_checkpoint_interval=options["checkpointing"],
        dynamic_shape=options["dynamic"],
    )
    engine, _, _, _ = quartet_plugin.deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        training_data=dataset(),
        config=config_of(options),
    )
    norms = watch_norms(
        engine, knows=engine.zero_optimization_stage() > 0 or options["precision"] is not None
    )
    losses = [float(engine.train_batch()) for _ in range(options["steps"])]
    result: dict[str, Any] = {
        "losses": losses,
        "norms": norms,
        "stage": engine.stage_id,
        "parts": [int(edge) for edge in model.parts],
        "schedule": type(engine._train_schedule()).__name__,
        "ranks": [engine.grid.stage_to_global(stage) for stage in range(engine.num_stages)],
        "micro_batch": engine.micro_batch_size,
        "zero": engine.zero_optimization_stage(),
        "skipped": engine.skipped_steps,
        "optimizer": type(engine.optimizer).__name__,
        "buckets": [engine.zero_reduce_bucket_size(), engine.zero_allgather_bucket_size()],
        "clips_by_first_stage": clips_by_first_stage(config_of(options), pipeline_parallel=engine.num_stages),
    }
    if options["evaluate"]:
        loader = torch.utils.data.DataLoader(dataset(), batch_size=options["micro_batch"])
        result["evaluation"] = float(engine.eval_batch(iter(loader)))
        losses.append(float(engine.train_batch()))
    return result


def arguments_of(options: dict[str, Any]) -> Any:
    """The example's own arguments for the small model."""
    words = f"--data-path none --num-layers {options['layers']} --hidden-size 32 --num-attention-heads 2"
    args = example.parse_arguments([*words.split(), "--seq-length", "16", "--vocab-size", "96"])
    args.tie_embeddings = options["tied"]
    args.deepspeed_config = None
    return args


class Paired(torch.nn.Module):  # type: ignore[misc]
    """A layer whose neighbours pass two tensors: the hidden state and a mask that needs no gradient."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.inner = spec.build()

    def forward(self, value: Any) -> Any:
        """The mask goes along untouched."""
        if isinstance(value, tuple):
            hidden, mask = value
            return self.inner(hidden), mask
        return self.inner(value), torch.ones(value.shape, dtype=torch.int32)


class Unpaired(Paired):
    """The last layer drops the mask."""

    def forward(self, value: Any) -> Any:
        """Logits alone."""
        return self.inner(value[0])


def config_of(options: dict[str, Any]) -> dict[str, Any]:
    """The ds_config."""
    world = torch.distributed.get_world_size()
    config: dict[str, Any] = {
        "train_batch_size": options["microbatches"] * options["micro_batch"] * world // options["stages"],
        "train_micro_batch_size_per_gpu": options["micro_batch"],
        "optimizer": {"type": "SGD", "params": {"lr": 0.2}},
        "gradient_clipping": options["clipping"],
        "zero_optimization": {"stage": options["zero"]},
        "pipeline": {"use_reentrant": options["reentrant"]},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if options["precision"] is not None:
        config[options["precision"]] = {"enabled": True}
    for name, value in options["extra"].items():
        config[name] = {**config.get(name, {}), **value} if isinstance(value, dict) else value
    if options["quartet"] is not None:
        config["quartet"] = options["quartet"]
    return config


def dataset() -> torch.utils.data.TensorDataset:
    """Random tokens and labels, the same everywhere."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 96, (256, 17), generator=generator)
    return torch.utils.data.TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def watch_norms(engine: Any, *, knows: bool) -> list[float]:
    """A list that gets every step's gradient norm, over all stages; `knows`: DeepSpeed has it itself."""
    norms: list[float] = []
    step = engine._INSTRUCTION_MAP[stock.OptimizerStep]

    def watched(self: Any, **kwargs: Any) -> None:
        own = [
            float(parameter.grad.double().square().sum())
            for parameter in self.module.parameters()
            if parameter.grad is not None and not parameter.ds_pipe_replicated
        ]
        step(self, **kwargs)
        if knows:
            norms.append(float(self.get_global_grad_norm()))
            return
        total = torch.tensor(sum(own), dtype=torch.float64)
        torch.distributed.all_reduce(total, group=self.grid.get_model_parallel_group())
        norms.append(float(total.sqrt()))

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, stock.OptimizerStep: watched}
    return norms


if __name__ == "__main__":
    main()
