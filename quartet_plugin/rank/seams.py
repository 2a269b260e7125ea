"""Seams: the functions and classes of a framework that an adapter replaces or relies on, each declared once.

A seam is pinned by signature and by the hash of its source in every release that it was tried with. A module
global is rebound in its own module and in every loaded one that has imported it by name; modules that are
loaded later find the replacement. All seams of an installation are resolved and checked first; then all are
applied, or none; then loaded modules are searched for references to an original. `uninstall` restores all.
"""

import ast
import functools
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, ClassVar

from quartet_plugin.errors import SeamError

# Modules whose decorators a framework puts around some of its functions.
_DECORATORS = ("functools", "torch")
# Large modules, none of which imports a framework: they are not searched for stale references.
_LEFT_OUT = frozenset(
    {*sys.stdlib_module_names, "torch", "numpy", "triton", "numba", "scipy", "quartet_plugin", "transformers"}
) - {"__main__"}
_ABSENT = object()
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

Wrapper = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework by its `name` in messages and its `package`; releases from `oldest` to below `before`.

    `installed_version` reads the release that would be imported; it raises SeamError where there is none.
    """

    name: str
    package: str
    oldest: tuple[int, int, int]
    before: tuple[int, int, int]
    installed_version: Callable[[], str]

    @property
    def supported(self) -> str:
        """The supported releases, as a requirement."""
        oldest, before = (".".join(map(str, release)) for release in (self.oldest, self.before[:2]))
        return f"{self.package} >= {oldest}, < {before}"

    @property
    def release(self) -> str:
        """The installed release, for messages."""
        with suppress(SeamError):
            return f"{self.package} {self.installed_version()}"
        return f"this {self.name}"

    def check_version(self, version: str | None = None) -> str:
        """The installed version, or `version`. Raises SeamError if it is absent or not supported."""
        version = version or self.installed_version()
        numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
        parsed = tuple(int(number or 0) for number in numbers.groups()) if numbers else ()
        if not self.oldest <= parsed < self.before:
            raise SeamError(f"{self.package} {version}: not supported; install {self.supported}")
        return version


@dataclass(frozen=True, slots=True)
class FrameworkSeam:
    """A function or class of the framework: `module.name`, where `name` may be `Class.method`.

    `parameters` are names with spaces between; a class has none. `sources` maps each release that the adapter
    was tried with to the hash of the source. `aliases` are the modules that import the name for good,
    `use_sites` (`module:function`) the callers: a test compares both with the release, to notice new callers.
    `num_decorators` stand around the function. Each adapter has a subclass with its `framework`.
    """

    framework: ClassVar[Framework]
    module: str
    name: str
    parameters: str
    sources: Mapping[str, str] = field(hash=False)
    aliases: tuple[str, ...] = ()
    use_sites: tuple[str, ...] = ()
    num_decorators: int = 0

    @property
    def path(self) -> str:
        """The dotted path, for messages."""
        return f"{self.module}.{self.name}"


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
                    f"{change.holder.__name__}.{change.name}: changed since; the latest change must go first"
                )
        while self._applied:
            change = self._applied.pop()
            if change.original is _ABSENT:
                delattr(change.holder, change.name)
            else:
                setattr(change.holder, change.name, change.original)


def install[S: FrameworkSeam](wrappers: Mapping[S, Wrapper]) -> Installation:
    """Replace every seam by the result of its wrapper.

    Raises SeamError, with nothing touched, if a seam is missing, changed or taken, or if a loaded module
    keeps an original where it cannot be replaced.
    """
    resolved = {seam: resolve(seam) for seam in wrappers}
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
            f"{seam.path}: {place} keeps {seam.framework.name}'s own ({seam.framework.release}); "
            "load quartet_plugin before what has put it there"
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


def resolve(seam: FrameworkSeam) -> tuple[Any, Any]:
    """The module or class that holds the name, and its value: a function, a staticmethod, or a class.

    Raises SeamError, naming the release, if the value is not the framework's function of a known release.
    """
    framework = seam.framework
    try:
        holder: Any = _loaded(seam.module)
    except ImportError as error:
        raise SeamError(
            f"{seam.module}: cannot be imported ({error}); {framework.supported} is needed"
        ) from error
    first, *rest = seam.name.split(".")
    value: Any = vars(holder).get(first)
    for part in rest:
        holder, value = value, vars(value).get(part) if isinstance(value, type) else None
    if value is None:
        raise SeamError(f"{seam.path}: not in {framework.release}; {framework.supported} is needed")
    plain = _undecorated(seam, value)
    if isinstance(plain, FunctionType):
        parameters = " ".join(inspect.signature(plain, follow_wrapped=False).parameters)
        if parameters != seam.parameters:
            raise SeamError(
                f"{seam.path}: takes ({parameters.replace(' ', ', ')}) in {framework.release}, "
                f"({seam.parameters.replace(' ', ', ')}) is known; {framework.supported} is needed"
            )
    try:
        digest = source_hash(plain)
    except (OSError, SyntaxError) as error:
        raise SeamError(
            f"{seam.path}: its source cannot be read ({error}); install {framework.supported}"
        ) from error
    if digest not in seam.sources.values():
        known = ", ".join(f"{source} in {version}" for version, source in seam.sources.items())
        raise SeamError(
            f"{seam.path}: its source is another one in {framework.release} ({digest}; known: {known}); "
            f"{framework.supported} is needed, unchanged"
        )
    return holder, value


def _loaded(name: str) -> Any:
    # Not by attributes: a package may have a function of its submodule's name.
    return sys.modules.get(name) or importlib.import_module(name)


def _undecorated(seam: FrameworkSeam, value: Any) -> Any:
    """The framework's function or class behind its decorators; SeamError for anybody else's."""
    plain = _function(value)
    for _ in range(seam.num_decorators):
        if not _owner(plain).startswith(_DECORATORS):
            break
        plain = getattr(plain, "__wrapped__", plain)
    is_known = isinstance(plain, FunctionType) or (isinstance(plain, type) and not seam.parameters)
    if not is_known or _owner(plain) != seam.module or hasattr(plain, "__wrapped__"):
        raise _taken(seam, seam.path, plain)
    return plain


def _check_aliases(seam: FrameworkSeam, original: Any) -> None:
    """A plugin may have replaced a name only where it is used."""
    for name in seam.aliases:
        module = sys.modules.get(name)
        value = None if module is None else vars(module).get(seam.name)
        if value is not None and value is not original:
            raise _taken(seam, f"{name}.{seam.name}", value)


def _taken(seam: FrameworkSeam, path: str, value: Any) -> SeamError:
    return SeamError(
        f"{path}: already replaced by {_owner(value)} (here is {seam.framework.release}); "
        "load quartet_plugin without it, or before it"
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
    """The source of a loaded function or class as sixteen hex digits, its decorators included.

    Comments, layout and docstrings do not count. Raises OSError where there is no source to read.
    """
    return node_hash(_parsed(inspect.getsource(definition)))


def node_hash(node: ast.AST) -> str:
    """`source_hash` of a definition in a parsed file; `node` loses its docstrings."""
    for inner in ast.walk(node):
        if isinstance(inner, _DEFINITIONS) and ast.get_docstring(inner, clean=False) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(node).encode()).hexdigest()[:16]


def _parsed(source: str) -> ast.AST:
    # A method stands indented; taking the indentation away would change the strings in it.
    if source[:1].isspace():
        outer = ast.parse(f"if True:\n{source}").body[0]
        assert isinstance(outer, ast.If)
        return outer.body[0]
    return ast.parse(source).body[0]
