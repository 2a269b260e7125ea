"""Whether this machine shows an accelerator, by its device files: nothing is opened, nor torch imported."""

from collections.abc import Mapping
from pathlib import Path

_FOLDER = Path("/dev")
# NVIDIA's on Linux, under WSL and on Tegra, and AMD's.
_FILES = ("nvidia0", "nvidiactl", "dxg", "nvhost-gpu", "nvgpu", "kfd")


def shows_accelerator(environment: Mapping[str, str]) -> bool:
    """Whether a process with this environment would find an accelerator here."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    is_hidden = visible is not None and visible.strip() in ("", "-1")
    return not is_hidden and any((_FOLDER / name).exists() for name in _FILES)
