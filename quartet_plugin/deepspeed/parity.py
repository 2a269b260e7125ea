"""A rank's side of the parity gate: the weights both sides start from, and what every step gave.

Weights are written and read a layer at a time by the layer's number in the whole model, before DeepSpeed
makes its own copies of them, so that they fit any stages. Beside loss and gradient norm each rank leaves the
squared gradient norm of its share of every part of the model. Only trials that are asked for it pay for this.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule as stock
from deepspeed.utils import safe_get_full_grad
from torch import nn
from torch.nn import functional

from quartet_plugin.deepspeed.layers import LayerList, layer_list
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import as_number
from quartet_plugin.rank.files import RankFileWriter

# The gate looks for it before it runs anything from the folder: written last.
_COMPLETE = "latest_checkpointed_iteration.txt"
_DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)


class ParityMeter:
    """Looks at the gradients of one rank just before every optimizer step."""

    def __init__(self, files: RankFileWriter) -> None:
        self._files = files
        self._steps: list[dict[str, Any]] = []
        self._norm: float | None = None

    def watch(self, engine: Any) -> None:
        """From now on look before this engine's optimizer steps."""
        step = engine._INSTRUCTION_MAP[stock.OptimizerStep]
        part_of = dict(_parts(engine.module))

        def compared_step(running: Any, **kwargs: Any) -> None:
            squares = part_squares(running, part_of)
            own = squares if running.grid.get_data_parallel_id() == 0 else {}
            self._steps.append({"squares": {part: as_number(value) for part, value in own.items()}})
            self._norm = _norm_over_stages(running, squares) if _is_plain(running) else None
            step(running, **kwargs)

        engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, stock.OptimizerStep: compared_step}

    def step_done(self, norm: Any) -> Any:
        """The step's gradient norm over all stages: DeepSpeed's own (`norm`) where it knows it."""
        order, place = self._files.order, self._files.place
        content = {
            "schema_version": 1,
            "attempt_id": order.attempt_id,
            "launch_rank": place.launch_rank,
            "steps": self._steps,
        }
        write_json_atomic(Path(order.folder, f"rank-{place.launch_rank}.parity.json"), content)
        return norm if self._norm is None else self._norm


def part_squares(engine: Any, part_of: dict[int, str]) -> dict[str, float]:
    """The sum of squared gradients of this process's share of every part, averaged over the replicas.

    What a tied layer holds on several stages is counted on the first. Collective among replicas.
    """
    squares: defaultdict[str, float] = defaultdict(float)
    is_plain = _is_plain(engine)
    for parameter in engine.module.parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad if is_plain else safe_get_full_grad(parameter)
        if gradient is not None and not parameter.ds_pipe_replicated:
            squares[part_of.get(id(parameter), "head")] += float(gradient.detach().double().square().sum())
    return dict(squares)


def _is_plain(engine: Any) -> bool:
    """Whether DeepSpeed leaves gradients and optimizer alone: then it knows no norm over all stages."""
    return not (engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled())


def _norm_over_stages(engine: Any, squares: dict[str, float]) -> float:
    total = torch.tensor(sum(squares.values()), dtype=torch.float64, device=engine.device)
    torch.distributed.all_reduce(total, group=engine.grid.get_model_parallel_group())
    return math.sqrt(float(total))


def _parts(module: Any) -> Iterator[tuple[int, str]]:
    """Every parameter of this process by its id, with its part: `embedding`, `layer.N` or `head`."""
    layers = layer_list(module._layer_specs)
    for at, layer in _modules(module):
        for parameter in layer.parameters():
            yield id(parameter), part_name(layers, at)


def part_name(layers: LayerList, at: int) -> str:
    """What a layer specification is part of, as a plan's stages are told."""
    before = sum(block <= at for block in layers.blocks)
    if before == 0:
        return "embedding"
    is_after = at > layers.blocks[-1]
    return "head" if is_after else f"layer.{before - 1}"


def _modules(module: Any) -> Iterator[tuple[int, nn.Module]]:
    """The layers of this process that have weights, each once, with their number in the whole model.

    A tied module goes by the number of its first use.
    """
    numbers = getattr(module, "_numbers", None) or range(module._local_start, module._local_stop)
    tied = {id(one) for one in module.tied_modules.values()}
    for at, layer in zip(numbers, module.forward_funcs, strict=True):
        if isinstance(layer, nn.Module) and id(layer) not in tied:
            yield at, layer
    first: dict[str, int] = {}
    for at, spec in enumerate(module._layer_specs):
        if hasattr(spec, "tied_weight_attr"):
            first.setdefault(spec.key, at)
    for key, layer in module.tied_modules.items():
        yield first[key], layer


def save_weights(module: Any, folder: Path) -> None:
    """Write every layer's weights, once each, from the processes that hold them. Collective."""
    grid = module._grid
    if grid.get_data_parallel_id() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for at, layer in _modules(module):
            if module.stage_owner(at) == module.stage_id:
                torch.save(layer.state_dict(), _weights_file(folder, at))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (folder / _COMPLETE).write_text("0", encoding="ascii")
    torch.distributed.barrier()


def load_weights(module: Any, folder: Path) -> None:
    """Start from what `save_weights` wrote, whatever the stages were.

    Raises ConfigError for a layer that is missing or of another form.
    """
    for at, layer in _modules(module):
        path = _weights_file(folder, at)
        try:
            layer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        except (OSError, RuntimeError) as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{path}: layer {at} cannot start from it: {line}") from error


def _weights_file(folder: Path, at: int) -> Path:
    return folder / f"layer-{at}.pt"


def switch_dropout_off() -> None:
    """For the rest of this process: other stages draw other masks, and would be compared with them."""
    attend = functional.scaled_dot_product_attention

    def keep(layer_input: Any, *_: Any, **__: Any) -> Any:
        return layer_input

    def attend_to_all(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        # The mask is the fourth argument, the dropout the fifth.
        rest = (*args[:1], 0.0, *args[2:]) if len(args) > 1 else args
        return attend(query, key, value, *rest, **{**kwargs, **({} if len(args) > 1 else {"dropout_p": 0.0})})

    for name in _DROPOUTS:
        setattr(functional, name, keep)
    functional.scaled_dot_product_attention = attend_to_all
