"""One process of a test: trains the small GPT, saves and resumes it, and writes what every process saw.

torchrun ... -m tests.deepspeed.checkpoint_rank OPTIONS.json OUTPUT.json
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.pipe import PipelineModule

import quartet_plugin.deepspeed
from examples import pretrain_deepspeed as example
from quartet_plugin.deepspeed import entry
from quartet_plugin.errors import QuartetError
from quartet_plugin.protocol.ds_config import parse_settings
from quartet_plugin.rank.rendezvous import RankEnv
from tests.deepspeed import train_rank

ADAM = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}
DEFAULTS: dict[str, Any] = {
    **train_rank.DEFAULTS,
    "steps": 4,
    "extra": {"optimizer": ADAM},
    # The start of a script: `api`, `entry` (the module is built with the plan's stages), or the script's own.
    "start": "api",
    "load": None,
    "how": {},
    "first": None,
    "save": None,
    "save_after": 2,
}


def main() -> None:
    """Run each of the options in the first argument's list, one after another."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    results = []
    for given in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        try:
            result = run({**DEFAULTS, **given})
        except QuartetError as error:
            if given.get("start") == "script":
                raise
            result = {"error": str(error), "exit_code": int(error.exit_code)}
        every: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, result)
        results.append(every)
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Load where a checkpoint is named, train, and save on the way where a folder is named."""
    engine = engine_of(options)
    result: dict[str, Any] = {"stage": engine.stage_id, "client": None}
    if options["load"] is not None:
        path, client = engine.load_checkpoint(options["load"], **options["how"])
        assert path is not None
        result["client"] = sorted({"quartet_stages", "epoch"} & set(client))
        result["distances"] = distances(engine.module, Path(path).parent)
    first = engine.global_steps if options["first"] is None else options["first"]
    losses = []
    for number in range(options["steps"]):
        losses.append(float(engine.train_batch(batches(engine, step=first + number, options=options))))
        if options["save"] is not None and number + 1 == options["save_after"]:
            engine.save_checkpoint(options["save"], client_state={"epoch": 3})
    return {**result, "losses": losses, "parts": [int(edge) for edge in engine.module.parts]}


def engine_of(options: dict[str, Any]) -> Any:
    """A fresh engine."""
    args, config = train_rank.arguments_of(options), train_rank.config_of(options)
    torch.manual_seed(args.seed)
    construct, initialize = PipelineModule.__init__, quartet_plugin.deepspeed.initialize
    if options["start"] == "entry":
        session = entry.DeepSpeedSession(
            command=None,  # type: ignore[arg-type]
            rank_env=RankEnv.of(os.environ),
            settings=parse_settings(config),
            config=config,
        )
        construct = entry._planned_constructor(session, construct)
        initialize = entry._planned_initialize(session, deepspeed.initialize)
    elif options["start"] == "script":
        initialize = deepspeed.initialize
    model = PipelineModule.__new__(PipelineModule)
    construct(
        model,
        layers=example.layers_of(args),
        num_stages=options["stages"],
        loss_fn=example.mean_cross_entropy,
        partition_method=options["partition"],
    )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return initialize(args=args, model=model, model_parameters=parameters, config=config)[0]


def batches(engine: Any, *, step: int, options: dict[str, Any]) -> Iterator[Any]:
    """The microbatches of one step and this process's replica, the same whatever ran before."""
    generator = torch.Generator().manual_seed(1000 * step + engine.grid.get_data_parallel_id())
    for _ in range(options["microbatches"]):
        tokens = torch.randint(0, 96, (options["micro_batch"], 17), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def distances(module: Any, folder: Path) -> dict[str, float]:
    """How far this process's weights are from the checkpoint's file of their layer, by the file's name."""
    found = {}
    for index, layer in enumerate(module.forward_funcs):
        files = module.ckpt_layer_path_list(str(folder), index) if hasattr(layer, "state_dict") else []
        for file in files:
            saved = torch.load(file, weights_only=False)
            here = layer.state_dict()
            found[Path(file).name] = max(float((saved[name] - here[name]).abs().max()) for name in saved)
    return found


if __name__ == "__main__":
    main()
