"""What is declared about Megatron, held against every release whose functions are known."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.megatron.seams import FOLDER, Seam, installed_version, known_releases
from quartet_plugin.megatron.seams.declared import ALL, CUSTOM_SCHEDULE
from quartet_plugin.megatron.vendored import patch_of
from quartet_plugin.model.plan import write_plan
from quartet_plugin.rank.source_tree import SourceTree
from tests.megatron.callers import CALLERS
from tests.megatron.entry_launch import MEGATRON_FLAGS, SCRIPT, make_plan
from tests.megatron.support import REPOSITORY, rank_environment

_ROOT = Path(next(iter(importlib.util.find_spec("megatron").submodule_search_locations))).parent  # type: ignore
PATCHES = REPOSITORY / "patches"
# Releases beside the installed one, as `make` puts them into folders of their own.
OTHERS = re.findall(
    r"^megatron-core==(\S+)", (REPOSITORY / "tools" / "releases.txt").read_text(), re.MULTILINE
)
INSTALLED = installed_version().partition("+")[0]
# Not among the wheels: their functions are known by their hashes alone.
HASHES_ALONE = {"core_v0.19.0", "main"}


@cache
def tree_of(release: str) -> SourceTree:
    """The files of a release: the installed one, or one in a folder of its own."""
    if release == INSTALLED:
        return SourceTree((_ROOT,))
    folder = REPOSITORY / ".venv" / "releases" / f"megatron-core-{release}"
    if not (folder / "megatron" / "core").is_dir():
        pytest.fail(f"{folder}: not there; run `bash tools/make_releases.sh .venv` (`make test` does)")
    return SourceTree((folder,))


def test_every_place_is_declared_once() -> None:
    paths = [seam.path for seam in ALL]
    assert len(paths) == len(set(paths))
    assert CALLERS.keys() <= set(paths)
    assert {"training", "core"} == {path.split(".")[1] for path in paths}


def test_every_known_release_is_here_or_is_known_by_hashes_alone() -> None:
    assert set(known_releases()) == {INSTALLED, *OTHERS} | HASHES_ALONE
    assert {seam.path for seam in ALL} == set.intersection(*(set(f) for _, f in known_releases().values()))


@pytest.mark.parametrize("release", [INSTALLED, *OTHERS])
def test_the_file_of_a_release_holds_its_functions_and_its_patch_applies(release: str) -> None:
    tree = tree_of(release)
    content = json.loads((FOLDER / f"{release}.json").read_text())
    assert content["release"] == release
    for seam in ALL:
        here = tree.function(seam.module, seam.name)
        known = content["functions"][seam.path]
        assert known == (None if here is None else {"parameters": here.parameters, "source": here.source})
    assert (PATCHES / f"megatron-core-{release}.patch").read_text() == patch_of(tree)


@pytest.mark.parametrize(
    ("seam", "site"),
    [(seam, site) for seam in ALL for site in CALLERS.get(seam.path, ())],
    ids=lambda value: value.path if isinstance(value, Seam) else value,
)
def test_it_is_used_where_that_is_said(seam: Seam, site: str) -> None:
    module, function = site.split(":")
    definition = tree_of(INSTALLED).definition(module, function)
    assert definition is not None
    name = seam.name.rpartition(".")[2]
    used = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute)}
    assert name in used


def environment(folder: Path) -> dict[str, str]:
    """The release in `folder` in front of the installed one."""
    found = rank_environment()
    return {**found, "PYTHONPATH": os.pathsep.join([str(folder), found["PYTHONPATH"]])}


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *words],
        env=environment(folder),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def report(folder: Path, target: Path) -> dict[str, Any]:
    """What the doctor finds with that release."""
    done = run(folder, "-m", "quartet_plugin.megatron.doctor", str(target))
    assert done.returncode == 0, done.stderr[-3000:]
    content: dict[str, Any] = json.loads(target.read_text())
    return content


def states(content: dict[str, Any]) -> dict[str, str]:
    """The state of every axis."""
    return {row["axis"]: row["state"] for row in content["axes"]}


@pytest.mark.parametrize("release", [INSTALLED, *OTHERS])
def test_custom_schedules_are_off_where_they_were_not_tried_and_no_other_axis(
    release: str, tmp_path: Path
) -> None:
    content = report(tree_of(release).roots[0], tmp_path / "report.json")
    assert (content["framework_version"], content["fault"]) == (release, None)
    faults = {item["path"] for item in content["functions"] if item["fault"] is not None}
    is_tried, _ = known_releases()[release]
    assert bool(faults) is not is_tried
    assert faults <= {seam.path for seam in CUSTOM_SCHEDULE}
    off = {axis for axis, state in states(content).items() if state != "works"}
    assert off == (set() if is_tried else {"custom_schedules"})


def test_a_plan_of_native_flags_needs_no_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan.json"
    write_plan(make_plan(split=(6,), framework_version="0.17.1"), path=plan)
    for name, value in environment(tree_of("0.17.1").roots[0]).items():
        monkeypatch.setenv(name, value)
    assert main(["recheck", str(plan)]) == 0
    assert "the plan needs native flags" in capsys.readouterr().out


def test_a_plan_of_another_release_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    write_plan(make_plan(split=(6,)), path=plan)
    words = ("-m", "quartet_plugin.megatron", str(SCRIPT), *MEGATRON_FLAGS, "--quartet-plan", str(plan))
    done = run(tree_of("0.17.1").roots[0], *words, "--quartet-device", "cpu")
    assert done.returncode == 2, done.stderr[-2000:]
    assert "framework_version 0.17.1 (plan: 0.19.2)" in done.stderr
    assert "iteration" not in done.stdout
