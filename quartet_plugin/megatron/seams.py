"""Where the adapter takes hold of Megatron: each place declared once, checked before any is touched.

A seam is a module global. It is rebound in its own module and in every loaded one that has imported it by
name; modules that are loaded later find the new one. All seams of an installation are resolved and checked
first; then all are applied, or none.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeGuard

from quartet_plugin.errors import SeamError

OLDEST = (0, 19, 2)
BEFORE = (0, 20, 0)
SUPPORTED = "megatron-core >= 0.19.2, < 0.20"

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """A function of the framework that is wrapped: `module.name`, with these parameters, in this order."""

    module: str
    name: str
    parameters: tuple[str, ...]

    @property
    def path(self) -> str:
        """The dotted path, for messages."""
        return f"{self.module}.{self.name}"


ARGUMENTS = Seam(module="megatron.training.arguments", name="add_megatron_arguments", parameters=("parser",))
TOKENIZER = Seam(module="megatron.training.global_vars", name="_build_tokenizer", parameters=("args",))
TRAIN_STEP = Seam(
    module="megatron.training.training",
    name="train_step",
    parameters=(
        "forward_step_func",
        "data_iterator",
        "model",
        "optimizer",
        "opt_param_scheduler",
        "config",
        "forward_backward_func",
        "iteration",
        "pg_collection",
        "p2p_communicator",
    ),
)


class Installation:
    """Seams in place; `uninstall` puts back what was there."""

    def __init__(self, applied: list[tuple[ModuleType, str, Any, Any]]) -> None:
        self._applied = applied

    def uninstall(self) -> None:
        """Restore every original. Raises SeamError when somebody has wrapped one of ours since."""
        for module, name, _, ours in self._applied:
            if getattr(module, name) is not ours:
                raise SeamError(f"{module.__name__}.{name}: changed since; the latest change must go first")
        while self._applied:
            module, name, original, _ = self._applied.pop()
            setattr(module, name, original)


def install(wrappers: Mapping[Seam, Wrapper]) -> Installation:
    """Wrap every seam. Raises SeamError, with nothing touched, if one is missing, changed or taken."""
    found = [(seam, resolve(seam)[1]) for seam in wrappers]
    return rebind([(original, wrappers[seam](original)) for seam, original in found])


def rebind(pairs: Sequence[tuple[Any, Any]]) -> Installation:
    """Put the second of each pair wherever a loaded module has the first as a global."""
    replacement = {id(original): (original, ours) for original, ours in pairs}
    applied = []
    for module in list(sys.modules.values()):
        # Anything may stand in sys.modules, None and lazy objects too.
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in replacement:
                original, ours = replacement[id(value)]
                setattr(module, name, ours)
                applied.append((module, name, original, ours))
    return Installation(applied)


def chain(*wrappers: Wrapper | None) -> Wrapper:
    """One wrapper out of several for one seam; the first is the outermost, None is left out."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        for wrapper in reversed(wrappers):
            if wrapper is not None:
                original = wrapper(original)
        return original

    return wrap


def resolve(seam: Seam) -> tuple[ModuleType, Callable[..., Any]]:
    """The module and the framework's own function there. Raises SeamError if it is anything else."""
    try:
        module = sys.modules.get(seam.module) or importlib.import_module(seam.module)
    except ImportError as error:
        raise SeamError(f"{seam.module}: cannot be imported ({error}); {SUPPORTED} is needed") from error
    function = getattr(module, seam.name, None)
    if function is None:
        raise SeamError(f"{seam.path}: not in this Megatron; {SUPPORTED} is needed")
    owner = _owner(function)
    if not isinstance(function, FunctionType) or owner != seam.module or hasattr(function, "__wrapped__"):
        raise SeamError(
            f"{seam.path}: already replaced by {owner}; load quartet_plugin without it, or before it"
        )
    parameters = tuple(inspect.signature(function).parameters)
    if parameters != seam.parameters:
        raise SeamError(
            f"{seam.path}: takes ({', '.join(parameters)}) here, ({', '.join(seam.parameters)}) is known; "
            f"{SUPPORTED} is needed"
        )
    return module, function


def _owner(function: Any) -> str:
    """The module whose source the function really comes from; decorators copy `__module__`, not globals."""
    names = getattr(function, "__globals__", None)
    if isinstance(names, dict):
        return str(names.get("__name__"))
    return str(getattr(function, "__module__", None) or type(function).__module__)


def check_version(version: str | None = None) -> str:
    """The installed Megatron's version, or `version`. Raises SeamError if it is absent or not supported."""
    version = version or installed_version()
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    parsed = tuple(int(number or 0) for number in numbers.groups()) if numbers else ()
    if not OLDEST <= parsed < BEFORE:
        raise SeamError(f"megatron-core {version}: not supported; install {SUPPORTED}")
    return version


def installed_version() -> str:
    """The version of the Megatron that would be imported, read from its source.

    Nothing is imported, because the CPU device must come first, and no package database is asked, because a
    source checkout on the path counts. Raises SeamError where there is no Megatron.
    """
    spec = importlib.util.find_spec("megatron")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    sources = [path for folder in folders if (path := Path(folder, "core", "package_info.py")).is_file()]
    if not sources:
        raise SeamError(
            f"Megatron is not installed; {SUPPORTED} is needed: pip install 'quartet-plugin[megatron]'"
        )
    found: dict[str, str] = {}
    for node in ast.parse(sources[0].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found.update({target.id: str(node.value.value) for target in node.targets if _is_name(target)})
    numbers = [found.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(numbers) + found.get("PRE_RELEASE", "")


def _is_name(node: ast.expr) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)
