"""Where the adapter takes hold of Megatron: each place declared once, checked before any is touched.

A seam is a function or class of the framework, pinned by signature and by the hash of its source in every
release that it was tried with. A module global is rebound in its own module and in every loaded one that has
imported it by name; modules that are loaded later find the new one. All seams of an installation are resolved
and checked first; then all are applied, or none; then loaded modules are searched for what still holds an
original.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeGuard

from quartet_plugin.errors import SeamError
from quartet_plugin.megatron.leftovers import leftovers
from quartet_plugin.megatron.sources import source_hash

OLDEST = (0, 19, 2)
BEFORE = (0, 20, 0)
SUPPORTED = "megatron-core >= 0.19.2, < 0.20"

# Modules of decorators that the framework itself puts around some of its functions.
_DECORATORS = ("functools", "torch")

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """A function or class of the framework: `module.name`, where `name` may be `Class.method`.

    `parameters` in their order; a class has none, its methods have seams of their own. `sources` has the
    source's hash (see `sources`) by the release that it was tried with. `aliases` are the modules that import
    the name for good, `use_sites` (`module:function`) those that call it: a test holds both against the
    release, so that a new one is noticed. `num_decorators` stand around it.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    sources: Mapping[str, str] = field(hash=False)
    aliases: tuple[str, ...] = ()
    use_sites: tuple[str, ...] = ()
    num_decorators: int = 0

    @property
    def path(self) -> str:
        """The dotted path, for messages."""
        return f"{self.module}.{self.name}"


ARGUMENTS = Seam(
    module="megatron.training.arguments",
    name="add_megatron_arguments",
    parameters=("parser",),
    sources={"0.19.2": "2bb2becaea466370"},
    use_sites=("megatron.training.arguments:parse_args",),
)
TOKENIZER = Seam(
    module="megatron.training.global_vars",
    name="_build_tokenizer",
    parameters=("args",),
    sources={"0.19.2": "4f6360dccb69c04f"},
    use_sites=(
        "megatron.training.global_vars:rebuild_tokenizer",
        "megatron.training.global_vars:set_global_variables",
    ),
)
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
    sources={"0.19.2": "02a0757a48486714"},
    use_sites=("megatron.training.training:train",),
)


@dataclass(frozen=True, slots=True)
class _Applied:
    holder: Any
    name: str
    original: Any
    ours: Any

    @property
    def place(self) -> str:
        return f"{self.holder.__name__}.{self.name}"


class Installation:
    """Seams in place; `uninstall` puts back what was there."""

    def __init__(self, applied: list[_Applied]) -> None:
        self._applied = applied

    def uninstall(self) -> None:
        """Restore every original. Raises SeamError when somebody has wrapped one of ours since."""
        for one in self._applied:
            if vars(one.holder).get(one.name) is not one.ours:
                raise SeamError(f"{one.place}: changed since; the latest change must go first")
        while self._applied:
            one = self._applied.pop()
            setattr(one.holder, one.name, one.original)


def install(wrappers: Mapping[Seam, Wrapper]) -> Installation:
    """Replace every seam by what its wrapper makes of it.

    Raises SeamError, with nothing touched, if one is missing, changed or taken, or if a loaded module keeps
    an original where it cannot be replaced.
    """
    found = [(seam, *resolve(seam)) for seam in wrappers]
    for seam, _, original in found:
        _check_aliases(seam, original)
    pairs, attributes = [], []
    for seam, holder, original in found:
        ours = _replacement(original, wrappers[seam])
        if isinstance(holder, ModuleType):
            pairs.append((original, ours))
        else:
            attributes.append(_Applied(holder, seam.name.rpartition(".")[2], original, ours))
    installation = rebind(pairs)
    for one in attributes:
        setattr(one.holder, one.name, one.ours)
    installation._applied.extend(attributes)
    path_of = {id(_function(original)): seam.path for seam, _, original in found}
    for original, place in leftovers([_function(original) for _, _, original in found]):
        installation.uninstall()
        raise SeamError(
            f"{path_of[id(original)]}: {place} keeps Megatron's own ({_here()}); "
            "load quartet_plugin before what has put it there"
        )
    return installation


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
                applied.append(_Applied(module, name, original, ours))
    return Installation(applied)


def chain(*wrappers: Wrapper | None) -> Wrapper:
    """One wrapper out of several for one seam; the first is the outermost, None is left out."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        for wrapper in reversed(wrappers):
            if wrapper is not None:
                original = wrapper(original)
        return original

    return wrap


def resolve(seam: Seam) -> tuple[Any, Any]:
    """The module or class that holds the name, and what it holds: a function, a staticmethod, or a class.

    Raises SeamError, naming the release, if it is anything else than the framework's own as it is known.
    """
    module = _module(seam)
    holder: Any = module
    value: Any = vars(module).get(seam.name.partition(".")[0])
    for part in seam.name.split(".")[1:]:
        holder, value = value, vars(value).get(part) if isinstance(value, type) else None
    if value is None:
        raise SeamError(f"{seam.path}: not in {_here()}; {SUPPORTED} is needed")
    plain = _undecorated(seam, value)
    if isinstance(plain, FunctionType):
        parameters = tuple(inspect.signature(plain, follow_wrapped=False).parameters)
        if parameters != seam.parameters:
            raise SeamError(
                f"{seam.path}: takes ({', '.join(parameters)}) in {_here()}, "
                f"({', '.join(seam.parameters)}) is known; {SUPPORTED} is needed"
            )
    try:
        found = source_hash(plain)
    except (OSError, SyntaxError) as error:
        raise SeamError(f"{seam.path}: its source cannot be read ({error}); install {SUPPORTED}") from error
    if found not in seam.sources.values():
        known = ", ".join(f"{source} in {version}" for version, source in seam.sources.items())
        raise SeamError(
            f"{seam.path}: its source is another one in {_here()} ({found}; known: {known}); "
            f"{SUPPORTED} is needed, unchanged"
        )
    return holder, value


def _module(seam: Seam) -> ModuleType:
    # Not by attributes: a package may have a function of its submodule's name.
    try:
        return sys.modules.get(seam.module) or importlib.import_module(seam.module)
    except ImportError as error:
        raise SeamError(f"{seam.module}: cannot be imported ({error}); {SUPPORTED} is needed") from error


def _undecorated(seam: Seam, value: Any) -> Any:
    """The framework's own function or class behind its own decorators; SeamError for anybody else's."""
    plain = _function(value)
    for _ in range(seam.num_decorators):
        if not _owner(plain).startswith(_DECORATORS):
            break
        plain = getattr(plain, "__wrapped__", plain)
    is_known = isinstance(plain, FunctionType) or (isinstance(plain, type) and not seam.parameters)
    if not is_known or _owner(plain) != seam.module or hasattr(plain, "__wrapped__"):
        raise SeamError(
            f"{seam.path}: already replaced by {_owner(plain)} (here is {_here()}); "
            "load quartet_plugin without it, or before it"
        )
    return plain


def _check_aliases(seam: Seam, original: Any) -> None:
    """A plugin may have replaced a name only where it is used."""
    for name in seam.aliases:
        module = sys.modules.get(name)
        value = None if module is None else vars(module).get(seam.name)
        if value is not None and value is not original:
            raise SeamError(
                f"{name}.{seam.name}: already replaced by {_owner(value)} (here is {_here()}); "
                "load quartet_plugin without it, or before it"
            )


def _replacement(original: Any, wrapper: Wrapper) -> Any:
    if isinstance(original, staticmethod):
        return staticmethod(wrapper(original.__func__))
    return wrapper(original)


def _function(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod) else value


def _owner(function: Any) -> str:
    """The module whose source the function really comes from; decorators copy `__module__`, not globals."""
    names = getattr(function, "__globals__", None)
    if isinstance(names, dict):
        return str(names.get("__name__"))
    if isinstance(function, type):
        return function.__module__
    return type(function).__module__


def _here() -> str:
    """The release that is installed, for messages."""
    with suppress(SeamError):
        return f"megatron-core {installed_version()}"
    return "this Megatron"


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
