"""The rooms and the directions between them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "quartet_plugin"
NAME = "quartet_plugin"

# The floors of docs/architecture.md from the lowest up. A room imports rooms of lower floors; inside a floor
# rooms before it on the same line.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("model", "protocol"),
    ("split", "scaling", "schedule", "partition", "mapping"),
    ("space", "launchers", "testing"),
    ("cost",),
    ("calibration", "rank", "probe"),
    ("planner", "runtime"),
    ("trial", "study"),
    ("tuner", "megatron", "deepspeed", "bridge"),
    ("report", "batch"),
    ("cli",),
)
# Rooms of training processes and rooms of the tuner never import each other; both import what is shared.
SHARED = {"model", "protocol", "split", "scaling", "schedule", "partition", "mapping", "space"}
TRAINING = {"rank", "runtime", "megatron", "deepspeed", "bridge", "probe"}
# Reports are made from files, by a laptop too; the adapters do not know each other.
NEVER = {
    ("report", "tuner"),
    ("report", "study"),
    ("report", "trial"),
    ("deepspeed", "megatron"),
    ("bridge", "deepspeed"),
}


def may_import(room: str) -> set[str]:
    """The rooms that `room` may import."""
    order = [name for floor in FLOORS for name in floor]
    before = set(order[: order.index(room)])
    kept = before & (SHARED | TRAINING) if room in TRAINING else before - TRAINING
    return {name for name in kept if (room, name) not in NEVER}


MAY_IMPORT: dict[str, set[str]] = {room: may_import(room) for floor in FLOORS for room in floor}
# No room holds more than this part of the package's lines.
MAX_SHARE = 0.16
# Files that only a user's command or another process names.
ENTRY_POINTS: tuple[str, ...] = ()
FRAMEWORKS = {"torch", "megatron", "deepspeed", "transformer_engine", "triton"}
MAY_IMPORT_FRAMEWORKS = TRAINING


def rooms() -> list[str]:
    return sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


@cache
def import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Those of a file, inside of functions too."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def imported(path: Path) -> Iterator[str]:
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names) if module == NAME else [module]


def test_every_room_is_known() -> None:
    assert set(rooms()) == set(MAY_IMPORT)


@pytest.mark.parametrize("room", rooms())
def test_imports_point_one_way(room: str) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == NAME and len(parts) > 2:
                assert parts[1] == room or parts[1] in MAY_IMPORT[room], (
                    f"{path}: {room} may not import {name}"
                )


def module_of(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of_modules() -> dict[str, set[str]]:
    """The modules of the package that each of its modules imports, inside of functions too."""
    paths = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for module, path in paths.items():
        names: set[str] = set()
        for node in import_statements(path):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                # A package is not meant where its files are imported from it.
                names |= inner if inner <= set(paths) else inner | {node.module}
        found[module] = (names & set(paths)) - {module}
    return found


def test_no_room_is_above_its_share() -> None:
    lines = {
        room: sum(len(path.read_text().splitlines()) for path in (PACKAGE / room).rglob("*.py"))
        for room in rooms()
    }
    total = sum(lines.values())
    too_large = {room: round(count / total, 3) for room, count in lines.items() if count > MAX_SHARE * total}
    assert not too_large


def test_every_file_is_connected() -> None:
    imports = imports_of_modules()
    imported_by_others = set().union(*imports.values())
    alone = {
        module
        for module, path in ((module_of(path), path) for path in PACKAGE.rglob("*.py"))
        if path.name != "__init__.py" and not imports[module] and module not in imported_by_others
    }
    assert alone == set(ENTRY_POINTS)


def test_no_imports_in_a_circle() -> None:
    """Taking away, again and again, modules that import nothing that is left leaves nothing."""
    left = imports_of_modules()
    while True:
        free = {module for module, names in left.items() if not names & set(left)}
        if not free:
            break
        left = {module: names for module, names in left.items() if module not in free}
    assert not left, sorted(left)


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
        "import sys, quartet_plugin.megatron, quartet_plugin.deepspeed, quartet_plugin.bridge\n"
        f"print(sorted({FRAMEWORKS!r} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


# Rooms that ask for seconds of an iteration, and what only the iteration model takes from below.
ASKING = ("cost", "calibration", "planner", "mapping", "study", "tuner")
REPLAYS = {f"{NAME}.schedule.kernel", f"{NAME}.schedule.simulate"}
MODEL = f"{NAME}.cost.iteration"


def test_only_the_iteration_model_replays_orders() -> None:
    """Makespans of orders, in seconds, come from one place; rooms beside it draw or search orders."""
    replaying = {
        module
        for module, names in imports_of_modules().items()
        if names & REPLAYS and module.split(".")[1] in ASKING
    }
    assert replaying == {f"{MODEL}.orders", f"{MODEL}.replay"}


def test_only_the_iteration_model_sums_terms() -> None:
    """Whoever wants an iteration's seconds calls `predict` or a model; nobody else puts terms together."""
    sums = {
        "pipeline_terms",
        "step_terms",
        "summed",
        "pipeline_time",
        "critical_path",
        "replayed_s",
        "makespan",
    }
    for path in PACKAGE.rglob("*.py"):
        module = module_of(path)
        if module.startswith(MODEL) or module == f"{NAME}.cost.predict":
            continue
        for node in import_statements(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{NAME}.cost"):
                assert not sums & {alias.name for alias in node.names}, path


@pytest.mark.parametrize("approximation", ["bounds", "closed_form"])
def test_approximations_take_their_coefficients_from_the_iteration_model(approximation: str) -> None:
    names = imports_of_modules()[f"{NAME}.planner.{approximation}"]
    assert any(name.startswith(f"{MODEL}.") for name in names)
    assert not names & REPLAYS
