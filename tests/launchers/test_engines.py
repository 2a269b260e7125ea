"""Engines of other packages, found by their entry points."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.launchers.engines import engine_named, engine_names
from quartet_plugin.launchers.site import Site, parse_site

MODULE = """
from quartet_plugin.errors import InfrastructureError

class Whole:
    def divide(self, *, num_nodes, at_once): ...
    def launcher(self, nodes, *, num_nodes): ...
    def adopt(self, attempt_id, *, stdout): ...

class Partial:
    def divide(self, *, num_nodes, at_once): ...
    adopt = None

def whole(site): return Whole()
def partial(site): return Partial()
def nothing(site): return None
def setting(site): return site.engines["flux-run"]
def unreachable(site): raise InfrastructureError("flux: no broker")
"""

type Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Have a distribution with the launcher `flux-run`, whose entry point is the argument."""
    folder = tmp_path / "flux_tools-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flux-tools\nVersion: 1.0\n")
    (tmp_path / "flux_engine.py").write_text(MODULE)
    (tmp_path / "flux_broken.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)

    def installed(point: str) -> None:
        (folder / "entry_points.txt").write_text(f"[quartet_plugin.engines]\nflux-run = {point}\n")

    return installed


def test_an_installed_launcher_is_found(install: Install) -> None:
    install("flux_engine:whole")
    assert "flux-run" in engine_names()
    assert type(engine_named("flux-run", site=Site())).__name__ == "Whole"


@pytest.mark.parametrize(
    ("point", "fault"),
    [
        ("flux_broken:engine", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("flux_engine:engin", "cannot be loaded: AttributeError: "),
        ("flux_engine:setting", "cannot be loaded: KeyError: 'flux-run'"),
        ("flux_engine:nothing", "returns a NoneType without divide, launcher, adopt; "),
        ("flux_engine:partial", "returns a Partial without launcher, adopt; "),
    ],
)
def test_a_faulty_launcher_of_another_package_is_named(install: Install, point: str, fault: str) -> None:
    install(point)
    expected = re.escape(f"launcher: flux-run (of distribution flux-tools): {point} {fault}")
    with pytest.raises(ConfigError, match=expected):
        engine_named("flux-run", site=Site())


def test_settings_beside_those_of_this_package_belong_under_engines(install: Install) -> None:
    with pytest.raises(ConfigError, match=r"flux-run: .*unknown key; remove it"):
        parse_site({"flux-run": {"queue": "batch"}}, where="s")
    install("flux_engine:whole")
    with pytest.raises(
        ConfigError, match=r"^s: flux-run: an installed launcher; .* engines: \{flux-run: ...\}$"
    ):
        parse_site({"flux-run": {"queue": "batch"}}, where="s")
    assert parse_site({"engines": {"flux-run": {"queue": "batch"}}}, where="s").engines


def test_what_a_launcher_says_itself_is_kept(install: Install) -> None:
    install("flux_engine:unreachable")
    with pytest.raises(InfrastructureError, match=r"^flux: no broker$"):
        engine_named("flux-run", site=Site())
