"""The patches for vendored Megatron: they apply to the release, hold our lines only, and train with it."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from quartet_plugin.megatron.vendored import PARSE_ARGS
from quartet_plugin.model.plan import write_plan
from quartet_plugin.rank.source_tree import SourceTree
from tests.megatron.entry_launch import MEGATRON_FLAGS, SCRIPT, make_plan
from tests.megatron.support import rank_environment, run_processes, torchrun
from tests.megatron.test_contract import INSTALLED, OTHERS, tree_of

PATCHES = Path(__file__).resolve().parents[2] / "patches"
SECOND_STAGE = re.compile(r"number of parameters on .* model parallel rank \([0, ]*1\)")
RANK = Path(__file__).with_name("vendored_rank.py")
ON_CPU = ("--quartet-device", "cpu")


def test_patches_have_no_context_and_only_our_lines() -> None:
    files = sorted(PATCHES.glob("*.patch"))
    assert files
    for path in files:
        lines = path.read_text().splitlines()
        body = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
        assert body
        assert all(line.startswith("+") for line in body), path
        assert sum("import" in line for line in body) == 1


@pytest.mark.parametrize("release", [INSTALLED, *OTHERS])
def test_a_patch_puts_its_lines_first_into_parse_args(release: str, tmp_path: Path) -> None:
    module, name = PARSE_ARGS
    source = tree_of(release).file(module)
    assert source is not None
    copy = tmp_path / Path(*module.split(".")).with_suffix(".py")
    copy.parent.mkdir(parents=True)
    shutil.copy(source, copy)
    apply(release, tmp_path)
    definition = SourceTree((tmp_path,)).definition(module, name)
    assert isinstance(definition, ast.FunctionDef)
    docstring, imported, called = definition.body[:3]
    assert isinstance(docstring, ast.Expr)
    assert ast.unparse(imported) == "from quartet_plugin.megatron.vendored import start as start_quartet"
    assert ast.unparse(called) == "start_quartet()"


def apply(release: str, root: Path) -> None:
    """Apply the patch of a release to a tree."""
    with (PATCHES / f"megatron-core-{release}.patch").open("rb") as stream:
        subprocess.run(["patch", "-p1", "--fuzz=0"], cwd=root, stdin=stream, check=True, capture_output=True)


@pytest.fixture(scope="module")
def vendored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the installed Megatron with the patch of its release."""
    root = tmp_path_factory.mktemp("vendored")
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        # With what is compiled: each rank would compile hundreds of modules.
        shutil.copytree(folder, root / "megatron", dirs_exist_ok=True)
    apply(INSTALLED, root)
    return root


def run(vendored: Path, folder: Path, *flags: str) -> tuple[int, str]:
    environment = rank_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(vendored), environment["PYTHONPATH"]])
    command = torchrun(2, str(RANK), str(SCRIPT), *MEGATRON_FLAGS, "--train-iters", "2", *flags)
    return run_processes(command, timeout_s=240, log=folder / "log", environment=environment)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_patched_megatron_trains_with_a_plan_and_without(vendored: Path, tmp_path: Path) -> None:
    write_plan(make_plan(split=(4, 2), pipeline=2), path=tmp_path / "plan.json")
    code, output = run(vendored, tmp_path, "--quartet-plan", str(tmp_path / "plan.json"), *ON_CPU)
    assert code == 0, output[-3000:]
    assert SECOND_STAGE.search(output), output[-3000:]
    assert "iteration        2/" in output
    code, output = run(vendored, tmp_path)
    assert code == 0, output[-3000:]
    assert not SECOND_STAGE.search(output)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_refusal_is_one_line(vendored: Path, tmp_path: Path) -> None:
    write_plan(make_plan(split=(5, 1), pipeline=2, global_batch_size=64), path=tmp_path / "plan.json")
    code, output = run(vendored, tmp_path, "--quartet-plan", str(tmp_path / "plan.json"), *ON_CPU)
    assert code != 0
    told = [line for line in output.splitlines() if line.startswith("quartet: ")]
    assert len(told) == 1, output[-3000:]
    assert "global_batch_size 8 (plan: 64)" in told[0]
