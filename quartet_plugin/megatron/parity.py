"""A rank's side of the parity gate: weights written before the first step, and gradient norms of every step.

Beside loss and gradient norm each rank leaves the squared gradient norm of its share of every part of the
model, by global layer number, so that two layouts can be compared stage by stage, and the tokens that it has
routed to each expert. Only trials that are asked for it pay for this.
"""

import contextlib
import inspect
import queue
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from quartet_plugin.megatron.expert_loads import ExpertLoads
from quartet_plugin.megatron.measure import step_result
from quartet_plugin.megatron.train_step import around_train_step
from quartet_plugin.rank.files import RankFileWriter
from quartet_plugin.rank.squares import sum_of_squares

# Megatron takes 0 for "no checkpoint"; a run that starts from weights alone counts from 0 whatever they say.
_ITERATION = 1


class ParityMeter:
    """Wraps `train_step` for one rank of a trial of the parity gate."""

    def __init__(self, files: RankFileWriter) -> None:
        self._files = files
        self._steps: list[dict[str, float]] = []
        self._loads = ExpertLoads()
        self._tokens: list[dict[str, tuple[int, ...]]] = []

    def wrap(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """`train_step` as Megatron calls it, with `rank-K.parity.json` written after every step."""
        return around_train_step(train_step, before=self._begin, after=self._note)

    def _begin(self, model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
        if self._steps:
            return
        if self._files.spec.save_weights is not None:
            start_from_saved_weights(model, optimizer, opt_param_scheduler)
        self._loads.begin(model)

    def _note(self, model: Any, optimizer: Any, results: Any) -> None:
        self._steps.append(part_squares(model, optimizer, step_result(results).grad_norm))
        self._tokens.append(self._loads.take())
        self._files.write_gradients(self._steps, expert_tokens=self._tokens)


def start_from_saved_weights(model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
    """Write the weights where `--save` points, and load them as the runs do that are compared with this one.

    Stored weights can differ from those in memory: the optimizer holds quantized parameters unrounded until
    they are loaded, and of a parameter that several ranks hold, one copy is written.
    """
    from megatron.training.global_vars import get_args

    # The name by which Megatron loads at a start: a script may have replaced it.
    from megatron.training.training import load_checkpoint

    args = get_args()
    save_weights(model, optimizer, opt_param_scheduler)
    # Megatron would save over them where the number of microbatches changes, and after the last iteration.
    args.load, args.save = args.save, None
    # FSDP2 reads into the sharded parameters themselves.
    options = {"skip_load_to_model_and_opt": True} if getattr(args, "use_torch_fsdp2", False) else {}
    load_checkpoint(model, optimizer, opt_param_scheduler, **options)


def save_weights(model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
    """Write the model as it is, in the form that loads under any layout, where `--save` points."""
    from megatron.training.checkpointing import save_checkpoint

    with _local_results():
        save_checkpoint(_ITERATION, model, optimizer, opt_param_scheduler, 0)


@contextlib.contextmanager
def _local_results() -> Iterator[None]:
    """Let Megatron's writer hand its results over inside of this process, which waits for them anyway.

    Its own queue is a process that is started anew and makes the training's imports, for seconds.
    """
    writer = sys.modules.get("megatron.core.dist_checkpointing.strategies.filesystem_async")
    if writer is None or getattr(writer, "_results_queue", ...) is not None:
        yield
        return
    writer._results_queue = queue.Queue()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        writer._results_queue = None  # type: ignore[attr-defined]


def can_save_weights() -> bool:
    """Whether this Megatron has the function that `save_weights` calls, as it calls it."""
    try:
        from megatron.training.checkpointing import save_checkpoint

        inspect.signature(save_checkpoint).bind(_ITERATION, None, None, None, 0)
    except (ImportError, TypeError, ValueError):
        return False
    return True


def part_squares(model: Any, optimizer: Any, grad_norm: Any) -> dict[str, float]:
    """The sum of squared gradients of this rank's share of every part, before clipping.

    What several ranks hold alike is counted on one of them, as Megatron's own gradient norm does. After a
    step the optimizer still holds the gradients it used.
    """
    from megatron.core import mpu
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared
    from megatron.training.global_vars import get_args

    args = get_args()
    is_sharded = bool(args.use_distributed_optimizer)
    is_first_replica = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    is_first_of_experts = mpu.get_expert_data_parallel_rank() == 0
    undo = _clip_factor(grad_norm, float(args.clip_grad or 0.0))
    squares: defaultdict[str, Any] = defaultdict(float)
    for part, param in _named_parts(model):
        # Megatron marks the parameters of experts, whose replicas are fewer.
        is_first = is_first_replica if getattr(param, "allreduce", True) else is_first_of_experts
        if not (is_sharded or is_first):
            continue
        gradient = _gradient(param, optimizer)
        if gradient is None or not (
            param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param)
        ):
            continue
        squares[part] = squares[part] + sum_of_squares(gradient)
    return {part: float(value) / undo**2 for part, value in squares.items()}


def _clip_factor(grad_norm: Any, clip: float) -> float:
    """The factor of gradient clipping (core/optimizer/clip_grads.py)."""
    if grad_norm is None or clip <= 0.0:
        return 1.0
    factor = clip / (float(grad_norm) + 1.0e-6)
    return min(1.0, factor) if factor > 0 else 1.0


def _named_parts(model: Any) -> Iterator[tuple[str, Any]]:
    """Every parameter of this rank, with the name of its part: `embedding`, `layer.N`, `head`."""
    from megatron.core.utils import unwrap_model

    for chunk in unwrap_model(model):
        layers = getattr(getattr(chunk, "decoder", None), "layers", ())
        numbers = {id(p): layer.layer_number - 1 for layer in layers for p in layer.parameters()}
        for name, param in chunk.named_parameters():
            if id(param) in numbers:
                yield f"layer.{numbers[id(param)]}", param
            else:
                yield ("embedding" if name.startswith("embedding.") else "head"), param


def _gradient(param: Any, optimizer: Any) -> Any:
    """The gradient that the optimizer used for a parameter or this rank's shard of it; None without."""
    holder = param
    for single in getattr(optimizer, "chained_optimizers", None) or (optimizer,):
        index_of = getattr(single, "model_param_group_index_map", None)
        if index_of is None:
            main = getattr(param, "main_param", None)
            holder = param if main is None else main
        elif param in index_of:
            group, index = index_of[param]
            holder = single.optimizer.param_groups[group]["params"][index]
    decoupled = getattr(holder, "decoupled_grad", None)
    return holder.grad if decoupled is None else decoupled
