"""Studies of real trainings on processors: `quartet tune` in the process of the test, to its end."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from quartet_plugin.cli.main import main


@pytest.fixture
def launch_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands find this environment's torchrun, and ranks that share the machine have a thread each."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def tune(folder: Path, config: str, command: Sequence[str]) -> Path:
    """The folder of the run that `config`, the text of a q.yaml, makes of a training command in `folder`."""
    path = folder / "q.yaml"
    path.write_text(config)
    assert main(["tune", "--config", str(path), "--run-dir", str(folder), "--", *command]) == 0
    return folder / str(yaml.safe_load(config)["run"])
