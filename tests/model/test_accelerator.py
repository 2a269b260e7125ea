"""One answer for launcher and ranks: whether a process would find an accelerator here."""

from pathlib import Path

import pytest

from quartet_plugin.launchers.local import resolve_device
from quartet_plugin.model import accelerator
from quartet_plugin.model.accelerator import shows_accelerator


@pytest.mark.parametrize("name", ["nvidia0", "nvidiactl", "dxg", "kfd", "nvgpu", "nvhost-gpu"])
def test_a_device_file_shows_one_unless_it_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(accelerator, "_FOLDER", tmp_path)
    (tmp_path / "null").touch()
    assert not shows_accelerator({})
    (tmp_path / name).touch()
    for environment in ({}, {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "GPU-1"}):
        assert shows_accelerator(environment)
        assert resolve_device("auto", environment=environment) == "cuda"
    for hidden in ("", " ", "-1", " -1 "):
        assert not shows_accelerator({"CUDA_VISIBLE_DEVICES": hidden})
        assert resolve_device("auto", environment={"CUDA_VISIBLE_DEVICES": hidden}) == "cpu"


def test_adapters_and_launcher_have_no_list_of_their_own() -> None:
    package = Path(accelerator.__file__).parents[1]
    for path in package.rglob("*.py"):
        is_own = path.name == "accelerator.py"
        assert ("nvidiactl" in path.read_text(encoding="utf-8")) == is_own, path
