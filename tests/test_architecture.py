"""The rooms and the directions between them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "quartet_plugin"
NAME = "quartet_plugin"

AXES = {"scaling", "split", "schedule", "mapping"}
MAY_IMPORT: dict[str, set[str]] = {
    "model": set(),
    "split": {"model"},
    "scaling": {"model"},
    "mapping": {"model"},
    "schedule": {"model", "split"},
    "cost": {"model", *AXES},
    "launchers": {"model"},
    "trial": {"model", "launchers"},
    "search": {"model", "cost", "trial", "launchers", *AXES},
    "report": {"model", "cost", *AXES},
    "cli": {"model", "cost", "trial", "launchers", "search", "report", *AXES},
    "worker": {"model"},
    "runtime": {"model", "schedule"},
    "megatron": {"model", "schedule", "mapping", "worker", "runtime"},
    "deepspeed": {"model", "schedule", "mapping", "worker", "runtime"},
    "probe": {"model"},
}
FRAMEWORKS = {"torch", "megatron", "deepspeed", "transformer_engine", "triton"}
MAY_IMPORT_FRAMEWORKS = {"megatron", "deepspeed", "probe", "worker", "runtime"}


def rooms() -> list[str]:
    return sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names) if module == NAME else [module]


def test_every_room_is_known() -> None:
    assert set(rooms()) <= set(MAY_IMPORT)


@pytest.mark.parametrize("room", rooms())
def test_imports_point_one_way(room: str) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == NAME and len(parts) > 1 and parts[1] in MAY_IMPORT:
                assert parts[1] == room or parts[1] in MAY_IMPORT[room], (
                    f"{path}: {room} may not import {name}"
                )


@pytest.mark.parametrize("room", [room for room in rooms() if room not in MAY_IMPORT_FRAMEWORKS])
def test_the_core_names_no_framework(room: str) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        for name in imported(path):
            assert name.split(".")[0] not in FRAMEWORKS, f"{path} imports {name}"


def test_the_core_loads_without_frameworks() -> None:
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for room in rooms()
        if room not in MAY_IMPORT_FRAMEWORKS
        for path in sorted((PACKAGE / room).rglob("*.py"))
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name.removesuffix('.__init__'))\n"
        f"print(sorted({FRAMEWORKS!r} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_importing_the_adapter_patches_nothing() -> None:
    code = (
        "import sys, quartet_plugin, quartet_plugin.megatron, quartet_plugin.deepspeed\n"
        f"print(sorted({FRAMEWORKS!r} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
