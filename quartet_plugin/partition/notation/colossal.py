"""Writes a partition in Colossal-AI's words: its plugin for 1D, `tensor=dict(...)` for 2D and 3D."""

import re

from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.model.files import shown

_PLUGIN = "HybridParallelPlugin(tp_size={devices}, pp_size={stages}"
_SEQUENCE = ', enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather"'
_PLUGIN_TEXT = re.compile(
    rf"HybridParallelPlugin\(tp_size=([0-9]+), pp_size=([0-9]+)({re.escape(_SEQUENCE)})?\)", re.ASCII
)
_LEGACY_TEXT = re.compile(
    r"parallel = dict\(pipeline=([0-9]+), tensor=dict\(size=([0-9]+), mode='(2d|3d)'\)\)", re.ASCII
)


def to_colossal(form: str, devices: int, *, stages: int) -> str:
    """The configuration for a form of `layer.LAYER_FORMS` on `devices` and `stages` pipeline stages.

    Raises PlanError for a form that Colossal-AI has no mode for.
    """
    if form in ("stock", "stock-replicated"):
        sequence = _SEQUENCE if form == "stock" else ""
        return f"{_PLUGIN.format(devices=devices, stages=stages)}{sequence})"
    if form in ("2d", "3d"):
        return f"parallel = dict(pipeline={stages}, tensor=dict(size={devices}, mode='{form}'))"
    raise PlanError(f"partition {form}: Colossal-AI has no mode for it; it has 1D, 2D, 2.5D and 3D")


def from_colossal(text: str) -> tuple[str, int, int]:
    """Form, devices and stages of the text of `to_colossal`. Raises ConfigError for another text."""
    match = _PLUGIN_TEXT.fullmatch(text)
    if match is not None:
        return ("stock" if match[3] else "stock-replicated"), int(match[1]), int(match[2])
    match = _LEGACY_TEXT.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"configuration {shown(text)}: must be a HybridParallelPlugin or a legacy parallel dict"
        )
    return match[3], int(match[2]), int(match[1])
