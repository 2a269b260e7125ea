"""Megatron's releases and its seams; `declared` lists them, `rank.seams` defines a seam.

What is known of a release's functions is data: `RELEASE.json` beside this file, which
`tools/learn_release.py` writes from a wheel or a source tree.
"""

import importlib.util
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from quartet_plugin.errors import SeamError
from quartet_plugin.rank import seams
from quartet_plugin.rank.seams import Framework, Wrapper, chain, install, known_function, locate, resolve
from quartet_plugin.rank.source_tree import KnownFunction

__all__ = [
    "FOLDER",
    "MEGATRON",
    "Seam",
    "Wrapper",
    "chain",
    "declare",
    "install",
    "installed_version",
    "known_function",
    "locate",
    "package_roots",
    "release_of",
    "resolve",
]

FOLDER = Path(__file__).parent


@cache
def known_releases() -> dict[str, tuple[bool, dict[str, KnownFunction | None]]]:
    """Of each release that was read: whether custom schedules have trained with it, and its functions."""
    releases = {}
    for path in sorted(FOLDER.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        is_tried = content["custom_schedules"]
        releases[path.stem] = (
            is_tried,
            {
                name: None if function is None else KnownFunction(**function, is_tried=is_tried)
                for name, function in content["functions"].items()
            },
        )
    return releases


def package_roots() -> tuple[Path, ...]:
    """The folders with the package `megatron` that would be imported, the first one's `core` before others.

    The package has no file of its own, so its parts may lie in several folders. Nothing is imported, because
    the CPU device must come first, and no package database is asked, because a source checkout on the path
    counts. Raises SeamError where there is no Megatron.
    """
    spec = importlib.util.find_spec("megatron")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    roots = tuple(Path(folder).parent for folder in folders)
    if not any(_package_info(root).is_file() for root in roots):
        raise SeamError(
            f"Megatron is not installed; {MEGATRON.needed} is needed: pip install 'quartet-plugin[megatron]'"
        )
    return roots


def installed_version() -> str:
    """The version of the Megatron that would be imported. Raises SeamError where there is none."""
    return release_of(next(root for root in package_roots() if _package_info(root).is_file()))


def release_of(root: Path) -> str:
    """The version that a tree states in its source."""
    assignment = r"""^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *['"]?([^'"\s]*)"""
    values: dict[str, str] = dict(
        re.findall(assignment, _package_info(root).read_text(encoding="utf-8"), re.MULTILINE)
    )
    numbers = [values.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(numbers) + values.get("PRE_RELEASE", "")


def _package_info(root: Path) -> Path:
    return root / "megatron" / "core" / "package_info.py"


def _tried_releases() -> str:
    return " or ".join(name for name, (is_tried, _) in known_releases().items() if is_tried)


MEGATRON = Framework(
    name="Megatron",
    package="megatron-core",
    needed=f"megatron-core {_tried_releases()}",
    installed_version=installed_version,
)


class Seam(seams.FrameworkSeam):
    """A function or class of Megatron."""

    framework = MEGATRON


def declare(module: str, name: str, *, aliases: tuple[str, ...] = ()) -> Seam:
    """The seam of `module.name` with what the releases' files know of it."""
    path = f"{module}.{name}"
    known: Mapping[str, KnownFunction | None] = {
        release: functions[path] for release, (_, functions) in known_releases().items() if path in functions
    }
    return Seam(module, name, known, aliases)
