"""A short start: what a CPU run imports and compiles without ever using it is put off or left out."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

# Imported at the top of modules that only look whether it exists: loaded when an attribute is first read.
_DEFERRED = ("triton",)


def defer_imports() -> None:
    """Put off imports of torch and Megatron that a run may never use; called before torch is imported."""
    # torch wraps its optimizers so that their first use imports the compiler, to keep it away from them.
    after_import("torch._compile", _never_compile)
    for name in _DEFERRED:
        if name in sys.modules:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            continue
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def _never_compile(torch_compile: ModuleType) -> None:
    torch_compile._disable_dynamo = _identity_decorator  # type: ignore[attr-defined]


def skip_compilers() -> None:
    """Leave functions as they are written, and the compiled dataset helper as it was installed.

    Megatron decorates its elementwise functions with `torch.compile` while it is imported. That loads the
    whole compiler, and on a CPU it would start a C++ compiler in the first step.
    """
    import torch

    torch.compile = _identity_decorator
    torch.compiler.disable = _identity_decorator
    after_import("megatron.core.datasets.utils", _use_installed_dataset_helper)


def _identity_decorator(function: Any = None, *_args: Any, **_kwargs: Any) -> Any:
    if function is None:
        return _identity_decorator
    return function


def _use_installed_dataset_helper(utils: ModuleType) -> None:
    """Megatron's wheel holds the compiled helper but not the Makefile that `compile_helpers` calls."""
    compile_helpers = utils.compile_helpers

    def compile_unless_installed() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()

    utils.compile_helpers = compile_unless_installed  # type: ignore[attr-defined]


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Apply `change` to the module `name` once, right after it is imported, or now when it already is."""
    if name in sys.modules:
        change(sys.modules[name])
        return
    sys.meta_path.insert(0, _AfterImport(name, change))


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change
        self._loader: importlib.abc.Loader | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname) if path is None else _find(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        # The module must look as if its own loader had loaded it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._change(module)


def _find(
    fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(fullname, path, target)
        if spec is not None:
            return spec
    return None
