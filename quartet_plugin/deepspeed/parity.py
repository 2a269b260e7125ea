"""A rank's side of the parity gate: the weights that both runs start from, and the gradients of every step.

Weights are written and read a layer at a time by the layer's number in the whole model, before DeepSpeed
copies them, so that they fit any stages. Beside loss and gradient norm each rank writes the squared gradient
norm of its share of every part of the model. Only the trials of the gate pay for this.
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

from quartet_plugin.deepspeed.layers import LayerList, layer_list
from quartet_plugin.errors import ConfigError, first_line
from quartet_plugin.rank.files import RankFileWriter
from quartet_plugin.rank.seams import Installation, Redirect, redirect
from quartet_plugin.rank.squares import sum_of_squares

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class ParityMeter:
    """Measures the gradients of one rank just before every optimizer step."""

    def __init__(self, files: RankFileWriter) -> None:
        self._files = files
        self._steps: list[dict[str, float]] = []
        self._norm: float | None = None

    def watch(self, engine: Any) -> None:
        """Measure before each optimizer step of this engine from now on."""
        step = engine._INSTRUCTION_MAP[stock.OptimizerStep]
        part_of = dict(_parts(engine.module))

        def compared_step(running: Any, **kwargs: Any) -> None:
            squares = part_squares(running, part_of)
            counted = squares if running.grid.get_data_parallel_id() == 0 else {}
            self._steps.append(counted)
            self._norm = _norm_over_stages(running, squares) if _is_plain(running) else None
            step(running, **kwargs)

        engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, stock.OptimizerStep: compared_step}

    def step_done(self, norm: Any) -> Any:
        """Write the measurements; returns the gradient norm over all stages, DeepSpeed's if known."""
        self._files.write_gradients(self._steps)
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
            squares[part_of.get(id(parameter), "head")] += float(sum_of_squares(gradient))
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
    for index, layer in _modules(module):
        for parameter in layer.parameters():
            yield id(parameter), part_name(layers, index)


def part_name(layers: LayerList, index: int) -> str:
    """The part of the model that a layer specification belongs to: `embedding`, `layer.N` or `head`."""
    before = sum(block <= index for block in layers.blocks)
    if before == 0:
        return "embedding"
    return "head" if index > layers.blocks[-1] else f"layer.{before - 1}"


def _modules(module: Any) -> Iterator[tuple[int, nn.Module]]:
    """The layers of this process that have weights, each once, with their number in the whole model.

    A tied module goes by the number of its first use.
    """
    numbers = getattr(module, "_numbers", None) or range(module._local_start, module._local_stop)
    tied = {id(layer) for layer in module.tied_modules.values()}
    for index, layer in zip(numbers, module.forward_funcs, strict=True):
        if isinstance(layer, nn.Module) and id(layer) not in tied:
            yield index, layer
    first: dict[str, int] = {}
    for index, spec in enumerate(module._layer_specs):
        if hasattr(spec, "tied_weight_attr"):
            first.setdefault(spec.key, index)
    for key, layer in module.tied_modules.items():
        yield first[key], layer


def save_weights(module: Any, folder: Path) -> None:
    """Write every layer's weights, once each, from the processes that hold them. Collective."""
    grid = module._grid
    if grid.get_data_parallel_id() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for index, layer in _modules(module):
            if module.stage_owner(index) == module.stage_id:
                torch.save(layer.state_dict(), _weights_file(folder, index))
    torch.distributed.barrier()


def load_weights(module: Any, folder: Path) -> None:
    """Start from what `save_weights` wrote, whatever the stages were.

    Raises ConfigError for a layer that is missing or of another form.
    """
    for index, layer in _modules(module):
        path = _weights_file(folder, index)
        try:
            layer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"{path}: layer {index} cannot start from it: {first_line(error)}") from error


def _weights_file(folder: Path, index: int) -> Path:
    return folder / f"layer-{index}.pt"


def switch_dropout_off() -> Installation:
    """No dropout from now on: other stages would draw other masks, and the losses would differ."""

    def without_dropout(attend: Any) -> Any:
        def attend_to_all(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            # The mask is the fourth argument, the dropout the fifth.
            if len(args) > 1:
                return attend(query, key, value, args[0], 0.0, *args[2:], **kwargs)
            return attend(query, key, value, *args, **{**kwargs, "dropout_p": 0.0})

        return attend_to_all

    def keep(_dropout: Any) -> Any:
        return lambda layer_input, *_, **__: layer_input

    wrappers = {**dict.fromkeys(_DROPOUTS, keep), "scaled_dot_product_attention": without_dropout}
    return redirect(Redirect("torch.nn.functional", name, wrap) for name, wrap in wrappers.items())
