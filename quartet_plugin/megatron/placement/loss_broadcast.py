"""Sends scalars of a pipeline's last stage to all of its devices."""

from typing import Any

from quartet_plugin.megatron.placement.state import StagePlacement


class LossBroadcast:
    """Broadcasts a dictionary of scalars from the device of the last stage to its whole pipeline.

    The names are sent only when they have changed, so that a step costs one small tensor.
    """

    def __init__(self, placement: StagePlacement) -> None:
        self._placement = placement
        self._names: tuple[str, ...] = ()

    def over_pipeline(self, losses: dict[str, Any]) -> dict[str, Any]:
        """The same dictionary on every rank of the pipeline."""
        import torch
        import torch.distributed as dist
        from megatron.core import parallel_state

        group = parallel_state.get_pipeline_model_parallel_group()
        source = dist.get_process_group_ranks(group)[self._placement.last_device]
        owner = dist.get_rank() == source
        names = tuple(losses) if owner else self._names

        def send(*, is_changed: bool) -> Any:
            packed = torch.zeros(1 + len(self._names), device="cuda")
            packed[0] = float(is_changed)
            if owner and not is_changed:
                for index, name in enumerate(self._names, start=1):
                    packed[index] = torch.as_tensor(losses[name], device="cuda").detach().float().reshape(())
            dist.broadcast(packed, src=source, group=group)
            return packed

        packed = send(is_changed=names != self._names)
        if bool(packed[0]):
            box: list[Any] = [names]
            dist.broadcast_object_list(box, src=source, group=group)
            self._names = tuple(box[0])
            packed = send(is_changed=False)
        if owner:
            return losses
        return {name: packed[index] for index, name in enumerate(self._names, start=1)}
