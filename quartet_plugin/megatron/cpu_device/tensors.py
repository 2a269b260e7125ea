"""Tensors that ask for CUDA are made on the CPU: factories, moves and the type names Megatron compares."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from quartet_plugin.rank.seams import Redirect

_FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like",
    "linspace", "logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
    "zeros_like",
)  # fmt: skip
_TENSOR_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


def is_cuda(device: object) -> bool:
    """Whether `device`, in any of the forms torch takes, means a CUDA device."""
    if isinstance(device, torch.device):
        return bool(device.type == "cuda")
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, int) and not isinstance(device, bool)


def redirects() -> list[Redirect]:
    """torch's factories, and the methods that make or move a tensor."""
    from torch.utils._device import _device_constructors

    # `with torch.device("meta")` finds the factories in this cached set: fill it with the originals, which
    # are what arrives there.
    _device_constructors()
    methods = {
        **dict.fromkeys(_TENSOR_FACTORIES, _on_cpu),
        "to": _to_cpu,
        "type": _cuda_type,
        "cuda": _unmoved,
        "pin_memory": _unmoved,
        "record_stream": lambda _: lambda *_tensor_and_stream: None,
    }
    return [
        *(Redirect("torch", name, _on_cpu) for name in _FACTORIES),
        *(Redirect("torch", f"Tensor.{name}", wrap) for name, wrap in methods.items()),
    ]


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            # Pinning needs a CUDA driver, and is for copies that do not happen here.
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _to_cpu(tensor_to: Any) -> Any:
    @functools.wraps(tensor_to)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and is_cuda(args[0]):
            args = ("cpu", *args[1:])
        if kwargs and is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return tensor_to(self, *args, **kwargs)

    return to


def _cuda_type(tensor_type: Any) -> Any:
    @functools.wraps(tensor_type)
    def type_(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            # Megatron's optimizers sort parameters by names such as "torch.cuda.FloatTensor".
            return tensor_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return tensor_type(self, dtype, *args, **kwargs)

    return type_


def _unmoved(_move: Any) -> Any:
    return lambda self, *_args, **_kwargs: self
