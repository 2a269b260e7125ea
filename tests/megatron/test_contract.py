"""What is declared about Megatron, held against the installed release and one that is not supported."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.megatron import seams
from quartet_plugin.megatron.recheck import declared
from quartet_plugin.megatron.seams import Seam
from quartet_plugin.model.plan import write_plan
from quartet_plugin.rank.seams import node_hash
from tests.definitions import find_definition
from tests.megatron.entry_launch import MEGATRON_FLAGS, SCRIPT, make_plan
from tests.megatron.support import REPOSITORY, rank_environment

SEAMS = list(declared(with_runtime=True))
_ROOT = Path(next(iter(importlib.util.find_spec("megatron").submodule_search_locations)))  # type: ignore
OTHER = (REPOSITORY / "tools" / "releases.txt").read_text().split("==")[1].split()[0]


@cache
def parsed(module: str) -> ast.Module:
    """The installed source of a module, not loaded."""
    path = _ROOT.parent.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def test_every_place_is_declared_once() -> None:
    paths = [seam.path for seam in SEAMS]
    assert len(paths) == len(set(paths))
    assert {"training", "core"} == {path.split(".")[1] for path in paths}


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.path)
def test_the_installed_source_is_the_one_that_was_tried(seam: Seam) -> None:
    definition = find_definition(parsed(seam.module), seam.name)
    assert definition is not None
    assert seam.sources[seams.installed_version().partition("+")[0]] == node_hash(definition)


@pytest.mark.parametrize(
    ("seam", "site"),
    [(seam, site) for seam in SEAMS for site in seam.use_sites],
    ids=lambda value: value.path if isinstance(value, Seam) else value,
)
def test_it_is_used_where_that_is_said(seam: Seam, site: str) -> None:
    module, function = site.split(":")
    definition = find_definition(parsed(module), function)
    assert definition is not None
    name = seam.name.rpartition(".")[2]
    used = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute)}
    assert name in used


@pytest.fixture(scope="module")
def release() -> Path:
    """A folder with the other release alone, as `make` puts it there."""
    folder = REPOSITORY / ".venv" / "releases" / f"megatron-core-{OTHER}"
    if not (folder / "megatron" / "core").is_dir():
        pytest.fail(f"{folder}: not there; run `bash tools/make_releases.sh .venv` (`make test` does)")
    return folder


def environment(release: Path) -> dict[str, str]:
    """That release in front of the installed one."""
    found = rank_environment()
    return {**found, "PYTHONPATH": os.pathsep.join([str(release), found["PYTHONPATH"]])}


def run(release: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *words],
        env=environment(release),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture(scope="module")
def report(release: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the recheck of a plan with a schedule of ours finds there."""
    target = tmp_path_factory.mktemp("contract") / "report.json"
    done = run(release, "-m", "quartet_plugin.megatron.recheck", str(target), "runtime")
    assert done.returncode == 0, done.stderr[-3000:]
    content: dict[str, Any] = json.loads(target.read_text())
    return content


def test_another_release_is_refused_seam_by_seam(report: dict[str, Any]) -> None:
    assert report["framework_version"] == OTHER
    assert report["fault"].startswith(f"megatron-core {OTHER}: not supported")
    faults = {seam["path"]: seam["fault"] for seam in report["seams"]}
    assert faults.keys() == {seam.path for seam in SEAMS}
    changed = {path: fault for path, fault in faults.items() if fault is not None}
    assert all(
        fault.startswith(path) and f"megatron-core {OTHER}" in fault for path, fault in changed.items()
    )
    # What that release does not have, has with other parameters, and has with another body.
    schedules = "megatron.core.pipeline_parallel.schedules"
    assert "not in" in changed[f"{schedules}._build_default_pg_collection"]
    assert "takes (" in changed[f"{seams.TRAIN_STEP.path}"]
    assert "source is another one" in changed["megatron.training.arguments.add_megatron_arguments"]
    assert faults[f"{schedules}.forward_step"] is None


def test_the_installed_release_has_no_fault(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    done = run(tmp_path, "-m", "quartet_plugin.megatron.recheck", str(target), "runtime")
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads(target.read_text())
    assert content["fault"] is None
    assert [seam for seam in content["seams"] if seam["fault"] is not None] == []
    assert len(content["seams"]) == len(SEAMS)


def test_recheck_and_the_entry_end_with_4_there(
    release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan.json"
    write_plan(make_plan(split=(6,)), path=plan)
    for name, value in environment(release).items():
        monkeypatch.setenv(name, value)
    assert main(["recheck", str(plan)]) == 4
    line = capsys.readouterr().err
    assert f"megatron-core {OTHER}: not supported" in line
    assert "seams differ, the first: megatron." in line
    words = ("-m", "quartet_plugin.megatron", str(SCRIPT), *MEGATRON_FLAGS, "--quartet-plan", str(plan))
    done = run(release, *words, "--quartet-device", "cpu")
    assert done.returncode == 4, done.stderr[-2000:]
    assert f"quartet: megatron-core {OTHER}: not supported" in done.stderr
    assert "iteration" not in done.stdout
