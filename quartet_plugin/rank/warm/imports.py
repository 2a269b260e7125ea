"""What a trial server imports: the adapter's and framework's modules, and what the user's files import.

Only installed modules and the framework's are shared by trials. The user's own files are read for their
imports and never imported: each rank runs them from their first line.
"""

import ast
import functools
import importlib
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from quartet_plugin.protocol.trial_server import Preload
from quartet_plugin.rank.warm.import_checks import ImportChecks

PLUGIN = "quartet_plugin"
# Of the user's own files that are read.
_MAX_FILES = 500


class UnsafeImportError(Exception):
    """Imports that a fork cannot take over; the message names the module, and what it does.

    `module` can be left to the ranks; None where trials cannot do without.
    """

    def __init__(self, message: str, *, module: str | None = None) -> None:
        super().__init__(message)
        self.module = module


def make_imports(preload: Preload, checks: ImportChecks, *, left_out: Sequence[str] = ()) -> None:
    """Import what the ranks of a training import, but for the modules `left_out` and what is below them.

    Raises UnsafeImportError.
    """
    framework = preload.framework
    with checks.noting_rank_reads():
        try:
            importlib.import_module(f"{preload.entry}.preload").preload(on_cpu=preload.on_cpu)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise UnsafeImportError(f"the imports of {preload.entry} failed: {reason}") from error
        if fault := checks.fault(on_cpu=preload.on_cpu):
            raise UnsafeImportError(f"the import of {framework} {fault}")
        for name in imports_of_files(preload):
            if name in sys.modules or _is_below(name, left_out) or not _is_shared_name(name, framework):
                continue
            _import_if_there(name)
            if fault := checks.fault(on_cpu=preload.on_cpu):
                raise UnsafeImportError(f"the import of {name} {fault}", module=name.partition(".")[0])
    users = user_files(sys.modules.values(), framework=framework)
    if users:
        raise UnsafeImportError(f"the imports load {users[0]}, a file of the user")


def _import_if_there(name: str) -> None:
    """Import a module; one that is not there is a class or function of its package, or is optional."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UnsafeImportError(
            f"the import of {name} failed: {reason}", module=name.partition(".")[0]
        ) from error


def imports_of_files(preload: Preload) -> list[str]:
    """The modules that the user's script and the files beside it import when they are imported, in order.

    `from a import b` gives `a` and `a.b`, which need not be a module.
    """
    names: dict[str, None] = {}
    files = [_file_of(preload.target, is_module=preload.is_module)]
    seen: set[Path] = set()
    while files and len(seen) < _MAX_FILES:
        path = files.pop()
        if path is None or path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # the rank says it
        for name in _imported(tree.body):
            names[name] = None
            if name.partition(".")[0] == preload.framework:
                continue
            beside = path.parent / Path(*name.split("."))
            files += [file for file in (beside.with_suffix(".py"), beside / "__init__.py") if file.is_file()]
    return list(names)


def _file_of(target: str, *, is_module: bool) -> Path | None:
    if not is_module:
        return Path(target)
    spec = importlib.util.find_spec(target.partition(".")[0])
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent.joinpath(*target.split(".")[1:])
    return next((file for file in (path.with_suffix(".py"), path / "__main__.py") if file.is_file()), None)


def _imported(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """The modules that statements import when they run, also in `if` and `try`; not those in functions."""
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.If | ast.Try | ast.With):
            if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                continue
            for part in ("body", "orelse", "finalbody"):
                yield from _imported(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _imported(handler.body)


def _is_below(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _is_shared_name(name: str, framework: str) -> bool:
    """Whether an import of `name` loads the framework's files or installed ones."""
    first = name.partition(".")[0]
    if first in (framework, PLUGIN):
        return True
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError, AttributeError):
        return False
    if spec is None:
        return False
    locations = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or [])
    return all(location is None or is_installed(location) for location in locations)


@functools.cache
def is_installed(path: str) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    return os.path.realpath(path).startswith(_installed_folders())


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = [*map(sysconfig.get_path, names), *site.getsitepackages(), site.getusersitepackages()]
    folders = {os.path.realpath(path) for path in paths}
    return tuple(f"{folder}{os.sep}" for folder in sorted(folders))


def user_files(modules: object, *, framework: str) -> list[str]:
    """The files of loaded modules that are neither installed nor the framework's nor the plugin's."""
    files = []
    for module in list(modules):  # type: ignore[call-overload]
        path = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        # torch gives modules that it makes itself the name of a file without its folder.
        if not path or not Path(path).is_absolute() or module.__name__ == "__main__" or is_installed(path):
            continue
        if module.__name__.partition(".")[0] not in (framework, PLUGIN, "_virtualenv"):
            files.append(str(path))
    return files


class LoadedFiles:
    """The files of the loaded modules as they are now; `changed` names one that has changed since."""

    def __init__(self) -> None:
        paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        self._stamps = {path: _stamp(path) for path in paths if isinstance(path, str)}

    def changed(self) -> str | None:
        """A file that has changed, or is gone; None where there is none."""
        return next((path for path, stamp in self._stamps.items() if _stamp(path) != stamp), None)


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
