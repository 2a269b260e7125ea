"""What a user installs: the built wheel in an environment that never sees the repository."""

import importlib.metadata as metadata
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.megatron.entry_launch import MEGATRON_FLAGS, SCRIPT
from tests.megatron.support import own_environment
from tests.test_packaging import built as built

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel.

    Its dependencies are those installed here: a line of a .pth file adds their folder to the path, and such a
    folder's own .pth files, by which the repository is found, are not read.
    """
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    (path,) = built.glob("*.whl")
    python = folder / "bin" / "python"
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", path
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return folder


def run(*words: str | Path, folder: Path | None = None) -> str:
    """What a command prints; it begins in `folder`, without this process's PYTHONPATH."""
    variables = {name: value for name, value in own_environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_package_is_the_wheels(environment: Path, tmp_path: Path) -> None:
    line = "import quartet_plugin; print(quartet_plugin.__file__)"
    shown = Path(run(environment / "bin" / "python", "-c", line, folder=tmp_path).strip())
    assert shown.is_relative_to(environment)
    assert "megatron-core 0.19.2" in run(environment / "bin" / "quartet", "--version", folder=tmp_path)


def test_what_the_extra_asks_for_is_what_is_tested(built: Path) -> None:
    """Every requirement of quartet-plugin[megatron] is met by the versions that the tests run with."""
    (path,) = built.glob("*.whl")
    (found,) = metadata.distributions(name="quartet_plugin", path=[str(path)])
    asked = [Requirement(text) for text in found.requires or ()]
    asked = [each for each in asked if each.marker is None or each.marker.evaluate({"extra": "megatron"})]
    assert {"torch", "megatron-core", "optuna"} <= {canonicalize_name(each.name) for each in asked}
    unmet = [
        each for each in asked if not each.specifier.contains(metadata.version(each.name), prereleases=True)
    ]
    assert not unmet


@pytest.mark.parametrize("words", [
    ("plan", "--model", "llama3-8b", "--cluster", "H100", "--devices", "64", "--global-batch", "512",
     "--named-only"),
    ("knobs",),
], ids=lambda words: words[0])  # fmt: skip
def test_a_command_answers_from_the_wheels_own_data(
    words: tuple[str, ...], environment: Path, tmp_path: Path
) -> None:
    assert run(environment / "bin" / "quartet", *words, folder=tmp_path)


def test_two_processes_train_on_the_real_framework(environment: Path, tmp_path: Path) -> None:
    """The drop-in entry, with a pipeline, on the CPU device."""
    script = tmp_path / SCRIPT.name
    script.write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    shown = run(
        *(str(environment / "bin" / "python"), "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        *("-m", "quartet_plugin.megatron", str(script), *MEGATRON_FLAGS, "--quartet-device", "cpu"),
        *("--pipeline-model-parallel-size", "2", "--exit-interval", "2"),
        folder=tmp_path,
    )
    assert re.search(r"iteration +2/ +20 .* lm loss", shown)
