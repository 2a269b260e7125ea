"""Wheel and sdist as they are built, and the doors beside them: OptunaHub's layout and SKILL.md."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import optuna
import pytest

from quartet_plugin.errors import ExitCode
from tests.study.test_plan_sampler import space_of, tpe

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "quartet_plugin"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HUB = ROOT / "integrations" / "optunahub" / "package"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both, built without network."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", folder],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=120,
    )
    return folder


def package_files() -> set[str]:
    """Every file of the package, modules and data."""
    return {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        (points,) = [name for name in names if name.endswith("entry_points.txt")]
        entries = ConfigParser()
        entries.read_string(wheel.read(points).decode())
        (metadata,) = [wheel.read(name).decode() for name in names if name.endswith("METADATA")]
    others = {name for name in names if ".dist-info/" not in name}
    assert others == package_files() | {"quartet_plugin_start.pth"}
    assert "quartet_plugin/py.typed" in names
    assert entries["console_scripts"]["quartet"] == "quartet_plugin.cli.main:entry"
    assert f"Version: {PROJECT['version']}" in metadata
    assert "License-Expression: Apache-2.0" in metadata


def test_the_sdist_has_what_a_wheel_is_built_of(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert package_files() <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "quartet_plugin_start.pth"} <= names
    assert not {name for name in names if name.startswith(("tests", "docs", "benchmarks"))}


def test_the_version_is_semantic_and_in_the_changelog() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"])
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_core_needs_no_framework() -> None:
    names = {re.split(r"[<>=\[]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names.isdisjoint({"torch", "megatron-core", "deepspeed", "matplotlib", "ray"})


def test_the_sampler_loads_as_optunahub_loads_it() -> None:
    import optunahub

    module = optunahub.load_local_module("samplers/quartet_plan", registry_root=str(HUB))
    space = space_of()
    study = optuna.create_study(sampler=module.PlanSampler(space, explorer=tpe()))
    study.optimize(lambda trial: float(module.suggest_plan(trial, space).layout.micro_batch_size), n_trials=2)
    assert len(study.trials) == 2


def test_optunahubs_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import optunahub

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        optunahub, "load_module", lambda name: optunahub.load_local_module(name, registry_root=str(HUB))
    )
    script = HUB / "samplers" / "quartet_plan" / "example.py"
    exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), {})
    assert capsys.readouterr().out.startswith("0.5")


def test_the_skill_has_every_exit_code() -> None:
    text = (ROOT / "SKILL.md").read_text(encoding="utf-8").partition("## Exit codes")[2].partition("##")[0]
    text = " ".join(text.split())
    assert [code for code in ExitCode if not re.search(rf"\b{int(code)} ", text)] == []
