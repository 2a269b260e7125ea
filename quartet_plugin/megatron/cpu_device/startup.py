"""A short start: what a CPU run imports and compiles without ever using it is put off or left out.

Megatron decorates its elementwise functions with `torch.compile` while it is imported, and torch's optimizers
mention the compiler in their first step. Either loads all of it, and the first would start a C++ compiler in
every rank's first step.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from quartet_plugin.rank.seams import Installation, Redirect, redirect


def defer_compilers(keep: Callable[[Installation], None]) -> None:
    """Put off or leave out imports of compilers; to be called before torch is imported, or it saves less.

    `keep` gets what is redirected while torch is imported.
    """
    _defer("triton")
    for entry in _WHILE_IMPORTED:
        after_import(entry.module, lambda _, entry=entry: keep(redirect([entry])))  # type: ignore[misc]


def import_megatron(*, training: bool = True) -> None:
    """Import what every training script imports; without `training` what those of other loops do."""
    with warnings.catch_warnings():
        # A dozen lines a rank say that Transformer Engine and Apex are missing, as they must be here.
        warnings.simplefilter("ignore", UserWarning)
        if training:
            import megatron.training.training
        else:
            import megatron.core.models.gpt
            import megatron.core.optimizer  # noqa: F401


def _defer(name: str) -> None:
    """Let `import name` cost nothing until something of it is used: Megatron looks whether it exists."""
    spec = importlib.util.find_spec(name)
    if name in sys.modules or spec is None or spec.loader is None:
        return
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _identity_decorator(function: Any = None, *_args: Any, **_kwargs: Any) -> Any:
    if function is None:
        return _identity_decorator
    return function


def _without_graph_break(_decorate: Any) -> Any:
    """The wrapper of an optimizer's step asks the compiler for a graph break around it; here is no graph."""

    def with_grad_as_asked(step: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        @functools.wraps(step)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                return step(self, *args, **kwargs)

        return wrapped

    return with_grad_as_asked


def _unless_installed(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    """The wheel has the compiled dataset helper, but not the Makefile that `compile_helpers` calls."""

    def compile_unless_installed() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()

    return compile_unless_installed


COMPILERS = (
    Redirect("torch", "compile", lambda _: _identity_decorator),
    Redirect("torch.compiler", "disable", lambda _: _identity_decorator),
)
# torch keeps the compiler away from its optimizers by a wrapper that imports the compiler to do so. Both
# names are decorators, used while torch is imported.
_WHILE_IMPORTED = (
    Redirect("torch._compile", "_disable_dynamo", lambda _: _identity_decorator),
    Redirect("torch.optim.optimizer", "_use_grad_for_differentiable", _without_graph_break),
)
COMPILE_HELPERS = Redirect("megatron.core.datasets.utils", "compile_helpers", _unless_installed)


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Apply `change` to the module `name` once, right after it is imported, or now when it already is."""
    if name in sys.modules:
        change(sys.modules[name])
        return
    sys.meta_path.insert(0, _AfterImport(name, change))


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module as the other finders do, and changes it after its own loader has loaded it."""

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
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._loader, spec.loader = spec.loader, self
                return spec
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        assert module.__spec__ is not None
        # The module must look as if its own loader alone had loaded it.
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._change(module)
