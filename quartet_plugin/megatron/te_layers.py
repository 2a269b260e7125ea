"""Weight gradients later in Transformer Engine's layers, through their own delayed weight gradients.

Such a layer keeps what a weight's gradient needs in a store of its own, first in, first out, and works one
off at each `backward_dw`. Megatron opens this door only together with expert overlap; here it is opened on
the layers themselves, once they are built and before DDP looks at them. A W action calls every layer of its
stage once. Should orders of I and W differ, a W works off another microbatch's share: the sum is the same.
"""

import importlib.metadata
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The first in which DDP's overlapped reductions go with delayed weight gradients (Megatron's own condition).
_OLDEST = (2, 8)
_MARK = "_quartet_is_delayed"
_NEEDED = ("wgrad_store", "backward_dw", "register_wgrad_accumulation_and_reduce_hooks", "weight_names")
_WHOLE = "backwards are not split"
_NOT_SPLIT = {
    "fp8": f"--fp8-format: {_WHOLE}, because delayed gradients of quantized layers were not tried",
    "fp4": f"--fp4-format: {_WHOLE}, because delayed gradients of quantized layers were not tried",
    "tp_comm_overlap": f"--tp-comm-overlap: {_WHOLE}, because it computes weight gradients by itself",
    "use_transformer_engine_op_fuser": (
        f"--use-transformer-engine-op-fuser: {_WHOLE}, because fused layers have no such door"
    ),
}


@dataclass(frozen=True, slots=True)
class DelayedLayer:
    """One layer whose weight gradient waits in its own store."""

    layer: Any

    def run(self) -> None:
        """Compute the oldest one; DDP's hooks are called by the layer."""
        # Megatron's own method asks the configuration first, which does not know.
        own_method = _own_method(self.layer)
        assert own_method is not None
        own_method(self.layer)


def obstacle(args: Namespace, *, version: str | None = None) -> str | None:
    """Why Transformer Engine's layers keep whole backwards, in one line; None where they need not.

    `version` is Transformer Engine's, None for the installed one.
    """
    for dest, line in _NOT_SPLIT.items():
        if getattr(args, dest, None):
            return line
    version = version or _installed()
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _OLDEST:
        return (
            f"--transformer-impl transformer_engine: {_WHOLE}; that needs Transformer Engine "
            f"{'.'.join(map(str, _OLDEST))}, here is {version or 'none'}"
        )
    return None


def delay(model: Any) -> None:
    """Let the layers of a model that is built keep their weight gradients, as if built so.

    Layers without that door are left alone: they compute theirs in I.
    """
    for layer in model.modules():
        store = getattr(layer, "wgrad_store", None)
        if store is None or _own_method(layer) is None or not all(hasattr(layer, name) for name in _NEEDED):
            continue
        if not any(p.requires_grad for name, p in layer.named_parameters(recurse=False)):
            continue
        layer.wgrad_store = type(store)(True, False)
        names = {*layer.weight_names, *getattr(layer, "bias_names", ())}
        for name, parameter in layer.named_parameters():
            if name in names:
                parameter.skip_backward_post_hook = True
        setattr(layer, _MARK, True)


def delayed_layers(model: Any) -> list[DelayedLayer]:
    """The layers of a chunk that `delay` has changed."""
    return [DelayedLayer(layer) for layer in model.modules() if getattr(layer, _MARK, False)]


def _own_method(layer: Any) -> Callable[[Any], None] | None:
    """Transformer Engine's own `backward_dw`, behind Megatron's."""
    for base in type(layer).__mro__:
        if base.__module__.partition(".")[0] == "transformer_engine" and "backward_dw" in vars(base):
            method: Callable[[Any], None] = vars(base)["backward_dw"]
            return method
    return None


def _installed() -> str | None:
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return None
