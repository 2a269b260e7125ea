"""Packages that Megatron-Bridge imports and a training on the CPU never runs, as empty modules.

They come into being after Megatron-Core was imported, which looks for Transformer Engine and must not see it.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PACKAGES = frozenset(
    (
        *("transformer_engine", "transformer_engine_torch", "nvidia_resiliency_ext"),
        *("mamba_ssm", "causal_conv1d", "fla", "timm", "open_clip", "qwen_vl_utils"),
        *("datasets", "wandb", "mlflow", "hydra", "pulp", "torchprofile"),
    )
)
# Modules of Megatron-Core that look for Transformer Engine.
_BEFORE = (
    "megatron.core.extensions.transformer_engine",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.transformer.attention",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.optimizer",
)
_TENSORBOARD = "torch.utils.tensorboard"


class _Named(type):
    """A class whose missing attributes, where they are named like classes, are classes too."""

    def __getattr__(cls, name: str) -> Any:
        if not name[0].isupper():
            raise AttributeError(name)
        return _class_named(name, cls.__module__)


def _class_named(name: str, module: str) -> type:
    import torch

    return _Named(name, (torch.nn.Module,), {"__module__": module})


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _class_named(name, self.__name__)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES and not fullname.startswith(_TENSORBOARD):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _Stub(spec.name)
        module.__version__ = "2.10.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


def install_stubs() -> None:
    """From now on, imports of these packages find stubs; Megatron-Core's layers are imported before."""
    for name in _BEFORE:
        importlib.import_module(name)
    sys.meta_path.insert(0, _Finder())
