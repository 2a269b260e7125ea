"""Rows 24, 26 and 40: nothing that is read can become a program, and nothing is loaded that nobody named."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "quartet_plugin"
PICKLERS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
PROGRAMS = {"eval", "exec", "compile", "__import__"}
# Where modules are loaded by a name that no file of a run gives: our commands, a driver, a framework's seams
# and modules, the function that the user's ds_config names, what the user's script imports, a recipe of an
# installed framework, the function that a site names for an executor of NeMo-Run, and the engine under
# test.
MAY_LOAD_BY_NAME = {
    "bridge/recipe.py",
    "cli/main.py",
    "deepspeed/layer_builder.py",
    "deepspeed/preload.py",
    "launchers/nemo_run_driver.py",
    "megatron/execution.py",
    "megatron/preload.py",
    "probe/devices.py",
    "rank/seams.py",
    "rank/warm/imports.py",
    "testing/launchers.py",
}
# Where installed packages may add something: an engine, loaded when the user names it.
MAY_LOOK_FOR_PLUGINS = {"launchers/engine_points.py"}


@cache
def nodes() -> tuple[tuple[str, ast.AST], ...]:
    """The imports and calls of the package's source, each with its file."""
    return tuple(
        (path.relative_to(PACKAGE).as_posix(), node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)
    )


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Every call: the file, what is called, the call."""
    for path, node in nodes():
        if isinstance(node, ast.Call):
            yield path, ast.unparse(node.func), node


def keyword(call: ast.Call, name: str) -> str:
    """A keyword's value in source form; empty where it is not given."""
    return next((ast.unparse(one.value) for one in call.keywords if one.arg == name), "")


def test_row_26_nothing_pickles() -> None:
    for path, node in nodes():
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] not in PICKLERS, f"{path} imports {name}"


def test_row_26_weights_are_loaded_without_code() -> None:
    found = [(path, call) for path, name, call in calls() if name == "torch.load"]
    assert found
    for path, call in found:
        assert keyword(call, "weights_only") == "True", path


def test_row_26_yaml_is_read_by_a_safe_loader() -> None:
    found = [
        (path, name, call) for path, name, call in calls() if name.startswith("yaml.") and "load" in name
    ]
    assert found
    for path, name, call in found:
        assert name == "yaml.safe_load" or keyword(call, "Loader") == "_unique_loader()", path


def test_row_24_text_never_becomes_a_program() -> None:
    for path, name, call in calls():
        assert name not in PROGRAMS, f"{path} calls {name}"
        assert name not in ("os.system", "os.popen"), f"{path} calls {name}"
        assert keyword(call, "shell") in ("", "False"), f"{path} starts a shell"


def test_row_40_nothing_is_loaded_that_was_not_named() -> None:
    for path, name, _ in calls():
        last = name.rpartition(".")[2]
        if last in ("entry_points", "iter_entry_points"):
            assert path in MAY_LOOK_FOR_PLUGINS, f"{path} looks for plugins"
        if last in ("import_module", "spec_from_file_location"):
            assert path in MAY_LOAD_BY_NAME, f"{path} loads a module by its name"
