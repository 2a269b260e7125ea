"""Seams: the functions and classes of a framework that an adapter replaces or relies on, each declared once.

A seam knows its parameters and the hash of its source in every release that was read. A module global is
rebound in its own module and in every loaded one that has imported it by name; modules that are loaded later
find the replacement. All seams of an installation are located first; then all are applied, or none; then
loaded modules are searched for references to an original. `uninstall` restores all.
"""

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, ClassVar

from quartet_plugin.errors import SeamError
from quartet_plugin.rank.source_tree import KnownFunction, node_hash

# Packages whose decorators frameworks put around their functions, beside those of their own.
_DECORATORS = ("contextlib", "functools", "nvtx", "opentelemetry", "torch")
# Large modules, none of which imports a framework: they are not searched for stale references.
_LEFT_OUT = frozenset(
    {*sys.stdlib_module_names, "torch", "numpy", "triton", "numba", "scipy", "quartet_plugin", "transformers"}
) - {"__main__"}
_ABSENT = object()

Wrapper = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework by its `name` in messages and its `package`; `needed` says which releases, for messages.

    `installed_version` reads the release that would be imported; it raises SeamError where there is none.
    """

    name: str
    package: str
    needed: str
    installed_version: Callable[[], str]

    @property
    def release(self) -> str:
        """The installed release, for messages."""
        with suppress(SeamError):
            return f"{self.package} {self.installed_version()}"
        return f"this {self.name}"


@dataclass(frozen=True, slots=True)
class FrameworkSeam:
    """A function or class of the framework: `module.name`, where `name` may be `Class.method`.

    `known` are the function's parameters and source by release, None in a release without it. `aliases` are
    the modules that import the name for good: a test compares them with the release. Each adapter has a
    subclass with its `framework`.
    """

    framework: ClassVar[Framework]
    module: str
    name: str
    known: Mapping[str, KnownFunction | None] = field(hash=False, compare=False)
    aliases: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The dotted path, for messages."""
        return f"{self.module}.{self.name}"

    @property
    def may_be_absent(self) -> bool:
        """Whether some release that was read has no such function."""
        return None in self.known.values()

    def parameters_fault(self, function: KnownFunction | None) -> str | None:
        """How a function's parameters differ from those of all known releases; None where they do not.

        `function` is None where the framework has none.
        """
        if function is None:
            return None if self.may_be_absent else self._line(f"not in {self.framework.release}")
        known = {item.parameters for item in self.known.values() if item is not None}
        if function.parameters in known:
            return None
        return self._line(
            f"takes ({_listed(function.parameters)}) in {self.framework.release}, "
            f"({') or ('.join(map(_listed, sorted(known)))}) in supported releases"
        )

    def source_fault(self, function: KnownFunction | None) -> str | None:
        """How a function differs from those that were tried; None where it does not."""
        fault = self.parameters_fault(function)
        if fault is not None or function is None:
            return fault
        if any(item.source == function.source for item in self.known.values() if item and item.is_tried):
            return None
        return self._line(f"source differs in {self.framework.release} ({function.source})")

    def _line(self, text: str) -> str:
        return f"{self.path}: {text}; supported: {self.framework.needed}"


def _listed(parameters: str) -> str:
    return parameters.replace(" ", ", ")


@dataclass(frozen=True, slots=True)
class Redirect:
    """A replacement that holds for any source: of `module.name`, where `name` may be `Class.method`.

    `wrap` makes the replacement from the original, also for the `aliases`, modules with the same original.
    """

    module: str
    name: str
    wrap: Wrapper
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Change:
    """A name to replace; `original` is _ABSENT where the holder, a class, inherits the name."""

    holder: Any
    name: str
    original: Any
    replacement: Any


class Installation:
    """Replacements in place; `uninstall` restores every original."""

    def __init__(self, changes: Sequence[_Change]) -> None:
        self._applied: list[_Change] = []
        try:
            for change in changes:
                setattr(change.holder, change.name, change.replacement)
                self._applied.append(change)
        except BaseException:
            self.uninstall()
            raise

    def uninstall(self) -> None:
        """Restore every original. Raises SeamError, with nothing restored, when a replacement is gone."""
        for change in self._applied:
            if vars(change.holder).get(change.name) is not change.replacement:
                raise SeamError(
                    f"{change.holder.__name__}.{change.name}: was changed after quartet replaced it; "
                    "undo the latest change first"
                )
        while self._applied:
            change = self._applied.pop()
            if change.original is _ABSENT:
                delattr(change.holder, change.name)
            else:
                setattr(change.holder, change.name, change.original)


def install[S: FrameworkSeam](wrappers: Mapping[S, Wrapper]) -> Installation:
    """Replace every seam by the result of its wrapper, whatever source it has.

    Raises SeamError, with nothing touched, if a seam is missing or taken, or if a loaded module keeps an
    original where it cannot be replaced.
    """
    resolved = {seam: locate(seam) for seam in wrappers}
    for seam, (_, original) in resolved.items():
        _check_aliases(seam, original)
    changes, of_module = [], {}
    for seam, (holder, original) in resolved.items():
        replacement = wrappers[seam](_function(original))
        if isinstance(holder, ModuleType):
            of_module[id(original)] = (original, replacement)
        else:
            if isinstance(original, (staticmethod, classmethod)):
                replacement = type(original)(replacement)
            changes.append(_Change(holder, seam.name.rpartition(".")[2], original, replacement))
    installation = Installation([*_global_changes(of_module), *changes])
    seam_of = {id(_function(original)): seam for seam, (_, original) in resolved.items()}
    for original, place in stale_refs(_function(original) for _, original in resolved.values()):
        installation.uninstall()
        seam = seam_of[id(original)]
        raise SeamError(
            f"{seam.path}: {place} still refers to {seam.framework.name}'s original function "
            f"({seam.framework.release}); import quartet_plugin before the module that imported it"
        )
    return installation


def redirect(redirects: Iterable[Redirect]) -> Installation:
    """Put every replacement in place. Raises SeamError, with nothing touched, where a name is missing."""
    changes = []
    for entry in redirects:
        replacement = _ABSENT
        *classes, name = entry.name.split(".")
        for module in (entry.module, *entry.aliases):
            holder = functools.reduce(
                lambda outer, inner: getattr(outer, inner, None), classes, _loaded(module)
            )
            original = getattr(holder, name, _ABSENT)
            if original is _ABSENT:
                package = module.partition(".")[0]
                version = getattr(sys.modules[package], "__version__", "here")
                raise SeamError(f"{module}.{entry.name}: not in {package} {version}; install another release")
            if replacement is _ABSENT:
                replacement = entry.wrap(original)
            changes.append(_Change(holder, name, vars(holder).get(name, _ABSENT), replacement))
    return Installation(changes)


def _global_changes(pair_of: Mapping[int, tuple[Any, Any]]) -> Iterator[_Change]:
    """A change of every global of a loaded module that is an original, by id with its replacement."""
    for module in list(sys.modules.values()):
        # Anything may stand in sys.modules, None and lazy objects too.
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in pair_of:
                yield _Change(module, name, *pair_of[id(value)])


def chain(*wrappers: Wrapper | None) -> Wrapper:
    """Several wrappers of a seam as a single wrapper; the first is the outermost, None is left out."""
    present = [wrapper for wrapper in reversed(wrappers) if wrapper is not None]
    return lambda original: functools.reduce(lambda inner, wrapper: wrapper(inner), present, original)


def locate(seam: FrameworkSeam) -> tuple[Any, Any]:
    """The module or class that holds the name, and its value: a function, a staticmethod, or a class.

    Raises SeamError, naming the release, if there is none or if it is not the framework's own.
    """
    holder, value = _find(seam)
    if value is None:
        framework = seam.framework
        raise SeamError(f"{seam.path}: not in {framework.release}; {framework.needed} is needed")
    _undecorated(seam, value)
    return holder, value


def resolve(seam: FrameworkSeam) -> tuple[Any, Any]:
    """What `locate` finds. Raises SeamError, naming the release, if its source is not a known one too."""
    holder, value = locate(seam)
    fault = seam.source_fault(known_function(seam))
    if fault is not None:
        raise SeamError(fault)
    return holder, value


def known_function(seam: FrameworkSeam) -> KnownFunction | None:
    """Parameters and source of the loaded function behind its decorators; None where there is none.

    Raises SeamError if it is not the framework's own or its source cannot be read.
    """
    _, value = _find(seam)
    if value is None:
        return None
    plain = _undecorated(seam, value)
    parameters = ""
    if isinstance(plain, FunctionType):
        parameters = " ".join(inspect.signature(plain, follow_wrapped=False).parameters)
    try:
        return KnownFunction(parameters=parameters, source=source_hash(plain))
    except (OSError, SyntaxError) as error:
        raise SeamError(
            f"{seam.path}: its source cannot be read ({error}); install {seam.framework.needed}"
        ) from error


def _find(seam: FrameworkSeam) -> tuple[Any, Any]:
    """The holder of the name and its value, None where there is none. Raises SeamError for no module."""
    try:
        holder: Any = _loaded(seam.module)
    except ImportError as error:
        raise SeamError(
            f"{seam.module}: cannot be imported ({error}); {seam.framework.needed} is needed"
        ) from error
    first, *rest = seam.name.split(".")
    value: Any = vars(holder).get(first)
    for part in rest:
        holder, value = value, vars(value).get(part) if isinstance(value, type) else None
    return holder, value


def _loaded(name: str) -> Any:
    # Not by attributes: a package may have a function of its submodule's name.
    return sys.modules.get(name) or importlib.import_module(name)


def _undecorated(seam: FrameworkSeam, value: Any) -> Any:
    """The framework's function or class behind its decorators; SeamError for anybody else's."""
    plain = _function(value)
    packages = (*_DECORATORS, seam.module.partition(".")[0])
    while hasattr(plain, "__wrapped__") and _owner(plain).partition(".")[0] in packages:
        plain = plain.__wrapped__
    is_known = isinstance(plain, FunctionType | type)
    if not is_known or _owner(plain) != seam.module or hasattr(plain, "__wrapped__"):
        raise _taken(seam, seam.path, plain)
    return plain


def _check_aliases(seam: FrameworkSeam, original: Any) -> None:
    """Raise SeamError where another plugin has replaced the name in a module that uses it."""
    for name in seam.aliases:
        module = sys.modules.get(name)
        value = None if module is None else vars(module).get(seam.name)
        if value is not None and value is not original:
            raise _taken(seam, f"{name}.{seam.name}", value)


def _taken(seam: FrameworkSeam, path: str, value: Any) -> SeamError:
    return SeamError(
        f"{path}: already replaced by {_owner(value)} (installed: {seam.framework.release}); "
        "remove that plugin, or import quartet_plugin first"
    )


def _function(value: Any) -> Any:
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _owner(function: Any) -> str:
    """The module whose source the function comes from; decorators copy `__module__`, not globals."""
    names = getattr(function, "__globals__", None)
    if isinstance(names, dict):
        return str(names.get("__name__"))
    return function.__module__ if isinstance(function, type) else type(function).__module__


def stale_refs(originals: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Every original that a loaded module still refers to, with the place of the reference.

    Rebinding replaces module globals. References inside of containers, classes, default arguments and partial
    calls would go on calling the original: an installation refuses them.
    """
    wanted = {id(original): original for original in originals}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] in _LEFT_OUT:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and id(value) not in wanted:
                members = list(vars(value).items()) if value.__module__ == name else []
                values = [(f"{name}.{key}.{inner}", member) for inner, member in members]
            else:
                values = [(f"{name}.{key}", value)]
            for place, held in values:
                yield from ((wanted[id(ref)], place) for ref in _refs(held) if id(ref) in wanted)


def _refs(value: Any) -> list[Any]:
    """The value, or what a container of values, a partial call or a function's defaults hold."""
    value = _function(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        return [value, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return [value]


def source_hash(definition: Any) -> str:
    """`node_hash` of the source of a loaded function or class. Raises OSError where there is none to read."""
    return node_hash(_parsed(inspect.getsource(definition)))


def _parsed(source: str) -> ast.AST:
    # A method stands indented; taking the indentation away would change the strings in it.
    if source[:1].isspace():
        outer = ast.parse(f"if True:\n{source}").body[0]
        assert isinstance(outer, ast.If)
        return outer.body[0]
    return ast.parse(source).body[0]
