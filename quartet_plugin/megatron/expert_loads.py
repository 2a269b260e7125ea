"""The tokens that every expert gets in a step, counted at the routers of a built model."""

from collections.abc import Iterator
from functools import partial
from typing import Any


class ExpertLoads:
    """Counts the tokens of every expert, by layer, from `begin` to `end`; a rank counts its own tokens.

    A forward that is made again for its backward counts once: the first one of the two has no gradient. Only
    routers that return the map of tokens to experts are counted.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Any] = {}
        self._handles: list[Any] = []

    def begin(self, model: Any) -> None:
        """Count from now on."""
        for name, router in _routers(model):
            self._handles.append(router.register_forward_hook(partial(self._count, name)))

    def end(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._counts.clear()

    def take(self) -> dict[str, tuple[int, ...]]:
        """The counts since they were last taken, by part of the model: `layer.N`, `mtp.N`."""
        counts = {name: tuple(map(int, count.tolist())) for name, count in self._counts.items()}
        self._counts.clear()
        return counts

    def _count(self, name: str, router: Any, _inputs: Any, output: Any) -> None:
        import torch

        if not (router.training and torch.is_grad_enabled()):
            return
        routing = output[1] if isinstance(output, tuple) and len(output) == 2 else None
        if not isinstance(routing, torch.Tensor) or routing.dtype != torch.bool or routing.dim() != 2:
            return
        tokens = routing.detach().sum(dim=0)
        self._counts[name] = self._counts[name] + tokens if name in self._counts else tokens


def _routers(model: Any) -> Iterator[tuple[str, Any]]:
    """The routers of this rank's layers, those of multi-token prediction too, each with its part's name."""
    from megatron.core.transformer.moe.router import Router
    from megatron.core.utils import unwrap_model

    for chunk in unwrap_model(model):
        for part, block in (("layer", "decoder"), ("mtp", "mtp")):
            for layer in getattr(getattr(chunk, block, None), "layers", None) or ():
                for module in layer.modules():
                    if isinstance(module, Router):
                        yield f"{part}.{layer.layer_number - 1}", module
