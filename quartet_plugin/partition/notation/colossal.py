"""Writes a partition in Colossal-AI's words: its plugin for 1D, `tensor=dict(...)` for 2D and 3D."""

from quartet_plugin.errors import PlanError

_PLUGIN = "HybridParallelPlugin(tp_size={devices}, pp_size={stages}"
_SEQUENCE = ', enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather"'


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
