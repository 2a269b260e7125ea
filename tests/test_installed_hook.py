"""The .pth file is a part of every installation, a wheel or an editable one, and cannot disturb Python."""

import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
HOOK = REPOSITORY / "quartet_plugin_start.pth"


def test_the_wheel_installs_the_hook_beside_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {HOOK.name: HOOK.name}


def test_it_comes_behind_the_file_that_names_the_source_tree_of_an_editable_installation() -> None:
    """The module `site` reads .pth files by name: the package must be importable before."""
    names = sorted([HOOK.name, "_editable_impl_quartet_plugin.pth"])
    assert names[-1] == HOOK.name


@pytest.mark.parametrize("value", [None, "/nonexistent/start.json"])
def test_its_one_line_raises_nothing(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = HOOK.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("import os;")
    if value is not None:
        monkeypatch.setenv("QUARTET_START", value)
        monkeypatch.setenv("QUARTET_STARTED", "here")
    exec(lines[0], {})
