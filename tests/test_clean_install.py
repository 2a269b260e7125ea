"""The two commands of the README that install the package, in an environment with nothing installed."""

import shlex
import subprocess
import venv
from pathlib import Path

import pytest

from tests.megatron.support import own_environment

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = {"megatron": "megatron-core", "deepspeed": "deepspeed"}


def commands(extra: str) -> list[list[str]]:
    """The README's lines that build the wheel and install it with an extra."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / "README.md").read_text("utf-8").splitlines()]
    build, install = (line for line in lines if line.startswith(("pip wheel ", "pip install ")))
    assert "[megatron]" in install
    return [shlex.split(build), shlex.split(install.replace("[megatron]", f"[{extra}]"))]


@pytest.mark.parametrize("extra", FRAMEWORKS)
def test_the_readme_installs_the_package_with_a_framework(extra: str, tmp_path: Path) -> None:
    clone, environment = tmp_path / "clone", tmp_path / "venv"
    run(["git", "clone", "--quiet", str(ROOT), str(clone)], folder=tmp_path)
    venv.create(environment, with_pip=True, symlinks=True)
    for words in commands(extra):
        run([str(environment / "bin" / words[0]), *words[1:]], folder=clone)
    quartet = str(environment / "bin" / "quartet")
    assert f"{FRAMEWORKS[extra]} " in run([quartet, "--version"], folder=tmp_path)
    assert run([quartet, "layout", "--model", "llama3-8b", "--pp", "8"], folder=tmp_path)


def run(words: list[str], *, folder: Path) -> str:
    """What a command prints; it runs in `folder`, without this environment's packages."""
    variables = {name: value for name, value in own_environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(
        words, cwd=folder, env=variables, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, f"{words[:3]}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout
