"""The reduced loss on the last global rank: Megatron prints and plots there, wherever the last stage is."""

from collections.abc import Callable
from typing import Any

from quartet_plugin.megatron.placement.state import Placed
from quartet_plugin.megatron.seams import TRAIN_STEP, Seam, Wrapper

EVALUATE = Seam(
    "megatron.training.training",
    "evaluate",
    "forward_step_func data_iterator model process_non_loss_data_func config verbose "
    "non_loss_data_func eval_iters pg_collection p2p_communicator",
    {"0.19.2": "a8cf24e3ae7bcd32"},
    use_sites=("megatron.training.training:evaluate_and_print_results",),
)


def wrappers(placed: Placed) -> dict[Seam, Wrapper]:
    """For a placement whose last stage is not on the last pipeline rank."""
    return {seam: _with_losses(Spread(placed)) for seam in (TRAIN_STEP, EVALUATE)}


def _with_losses(spread: "Spread") -> Wrapper:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def with_losses(*args: Any, **kwargs: Any) -> Any:
            losses, *rest = original(*args, **kwargs)
            # None: an evaluation that the clock ended, on all ranks alike.
            return (losses if losses is None else spread.over_pipeline(losses), *rest)

        return with_losses

    return wrap


class Spread:
    """Broadcasts a dictionary of scalars from the device of the last stage to its whole pipeline.

    The names go along only when they have changed, so that a step costs one small tensor.
    """

    def __init__(self, placed: Placed) -> None:
        self._placed = placed
        self._names: tuple[str, ...] | None = None

    def over_pipeline(self, losses: dict[str, Any]) -> dict[str, Any]:
        """The same dictionary on every rank of the pipeline."""
        import torch
        import torch.distributed as dist
        from megatron.core import parallel_state

        group = parallel_state.get_pipeline_model_parallel_group()
        source = dist.get_process_group_ranks(group)[self._placed.last_device]
        owner = dist.get_rank() == source
        names = tuple(losses) if owner else self._names
        changed = torch.tensor([float(names != self._names)], device="cuda")
        known = len(self._names or ())
        values = torch.zeros(known, device="cuda")
        if owner and names == self._names and known:
            values = torch.stack([_scalar(losses[name]) for name in self._names or ()])
        packed = torch.cat([changed, values])
        dist.broadcast(packed, src=source, group=group)
        if bool(packed[0]):
            box: list[Any] = [names]
            dist.broadcast_object_list(box, src=source, group=group)
            self._names = tuple(box[0])
            packed = torch.zeros(1 + len(self._names), device="cuda")
            if owner and self._names:
                packed[1:] = torch.stack([_scalar(losses[name]) for name in self._names])
            dist.broadcast(packed, src=source, group=group)
        if owner:
            return losses
        return {name: packed[1 + at] for at, name in enumerate(self._names or ())}


def _scalar(value: Any) -> Any:
    import torch

    return torch.as_tensor(value, device="cuda").detach().float().reshape(())
