"""Refuses to load a checkpoint where it would silently give layers each other's optimizer state.

DeepSpeed writes weights by layer, so they fit any stages. It writes optimizer state by device, as flat
buffers or numbered tensors, and compares sizes alone when it loads them. The stages of a run are therefore
kept in the client state of every checkpoint, and compared before anything is loaded. A checkpoint without
them was saved by DeepSpeed without the plugin: sharded state (ZeRO 1) has the names of its parameters beside
it, other state is taken for that of DeepSpeed's own stages.
"""

import inspect
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from quartet_plugin.deepspeed.planning import GroupRendezvous
from quartet_plugin.errors import PlanError
from quartet_plugin.rank.rendezvous import RankEnv
from quartet_plugin.schedule.placement import linear, stages_of_device

KEY = "quartet_stages"
_SCHEMA_VERSION = 1
_WEIGHTS_ALONE = "or load the weights alone with load_module_only=True"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStages:
    """Stage s holds layer specifications `bounds[s]` to `bounds[s + 1] - 1`, on device `placement[s]`."""

    bounds: tuple[int, ...]
    placement: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return max(self.placement) + 1

    @property
    def entries(self) -> tuple[tuple[int, ...], ...]:
        """The layer specifications of every device, in the order in which its optimizer has them."""
        return tuple(
            tuple(entry for stage in stages for entry in range(*self.bounds[stage : stage + 2]))
            for stages in stages_of_device(self.placement, self.num_devices)
        )

    @property
    def text(self) -> str:
        """Degree and entries for messages, as `PP2 entries 3+3`; the placement where it is not linear."""
        counts = "+".join(str(stop - start) for start, stop in pairwise(self.bounds))
        text = f"PP{self.num_devices} entries {counts}"
        if self.placement != linear(self.num_devices):
            text += f" placed on {','.join(map(str, self.placement))}"
        return text

    def to_json(self) -> dict[str, Any]:
        """The JSON object that is kept with a checkpoint."""
        return {"schema_version": _SCHEMA_VERSION, **asdict(self)}


def stages_of(module: Any) -> DeviceStages:
    """The stages of a PipelineModule, DeepSpeed's own or a plan's."""
    pipeline = getattr(module, "quartet_pipeline", None)
    if pipeline is not None:
        return DeviceStages(bounds=tuple(pipeline.bounds), placement=tuple(pipeline.placement))
    return _linear_stages(module.parts)


def stages_kept(checkpoint: Mapping[str, Any]) -> DeviceStages | None:
    """The stages that a checkpoint records; None where it records none that can be read."""
    kept: Any = checkpoint.get(KEY)
    try:
        if kept["schema_version"] != _SCHEMA_VERSION:
            return None
        bounds, placement = (tuple(int(number) for number in kept[name]) for name in ("bounds", "placement"))
    except (KeyError, TypeError, ValueError):
        return None
    return DeviceStages(bounds=bounds, placement=placement) if len(bounds) == len(placement) + 1 > 1 else None


class GuardedEngine(PipelineEngine):  # type: ignore[misc]
    """Mixed in front of an engine's class by `guard_checkpoints`: it keeps and compares the stages."""

    _quartet_has_plan: bool
    _quartet_loads_optimizer = False

    def save_checkpoint(
        self, save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """DeepSpeed's, with the stages in the client state."""
        kept = {**(client_state or {}), KEY: stages_of(self.module).to_json()}
        return super().save_checkpoint(save_dir, tag, kept, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's. Raises PlanError, on every rank and with nothing loaded, for other stages' state."""
        load = super().load_checkpoint
        call = inspect.signature(load).bind(*args, **kwargs)
        call.apply_defaults()
        loads_optimizer = call.arguments["load_optimizer_states"] and not call.arguments["load_module_only"]
        self._quartet_loads_optimizer = bool(loads_optimizer) and self.optimizer is not None
        try:
            path, client_state = load(*args, **kwargs)
        finally:
            self._quartet_loads_optimizer = False
        if client_state:
            client_state.pop(KEY, None)
        return path, client_state

    def load_module_state_dict(self, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        """Compare the stages, then load as DeepSpeed does, which calls this before it loads anything else."""
        if self._quartet_loads_optimizer:
            fault = _fault(self, checkpoint)
            refusal = None if fault is None else PlanError(f"checkpoint {self._curr_ckpt_path}: {fault}")
            GroupRendezvous(RankEnv.of(os.environ)).agree_or_raise("checkpoint", refusal)
        super().load_module_state_dict(checkpoint, *args, **kwargs)


def guard_checkpoints(engine: Any, *, has_plan: bool) -> None:
    """Let an engine keep its stages with checkpoints, and compare them where it loads optimizer state.

    Without a plan, a checkpoint that does not record its stages loads as under DeepSpeed.
    """
    cls = type(engine)
    engine.__class__ = type(cls.__name__, (GuardedEngine, cls), {"__module__": cls.__module__})
    engine._quartet_has_plan = has_plan


def _fault(engine: Any, checkpoint: Mapping[str, Any]) -> str | None:
    """Why the checkpoint's optimizer state would go to other layers, and the fix; None if it would not."""
    now = stages_of(engine.module)
    bound = "its optimizer state can be loaded only with the stages it was saved with"
    if KEY in checkpoint:
        then = stages_kept(checkpoint)
        if then is not None and then.entries == now.entries:
            return None
        text = "which cannot be read" if then is None else then.text
        return f"{bound} ({text}), this run has {now.text}; resume with those stages, {_WEIGHTS_ALONE}"
    if not engine._quartet_has_plan or _is_of_stock_stages(engine, checkpoint, now):
        return None
    return (
        f"{bound}; it does not record them, and they are not this run's ({now.text}); resume without the "
        f"plan, {_WEIGHTS_ALONE}"
    )


def _is_of_stock_stages(engine: Any, checkpoint: Mapping[str, Any], now: DeviceStages) -> bool:
    """Whether a checkpoint of DeepSpeed without the plugin has this run's stages."""
    if checkpoint["mp_world_size"] != now.num_devices:
        return False
    saved = checkpoint.get("param_shapes")
    if saved is not None and engine.zero_optimization():
        return _names(saved) == _names(engine._get_zero_param_shapes())
    bounds = getattr(engine.module, "quartet_stock_bounds", engine.module.parts)
    return bounds is not None and _linear_stages(bounds).entries == now.entries


def _names(groups: list[Mapping[str, Any]]) -> list[list[str]]:
    return [list(group) for group in groups]


def _linear_stages(bounds: Any) -> DeviceStages:
    return DeviceStages(bounds=tuple(int(edge) for edge in bounds), placement=linear(len(bounds) - 1))
