"""Settings that only a GPU can run: a search that asks for them on processors is refused before a launch."""

from collections.abc import Iterable, Mapping

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.local import resolve_device
from quartet_plugin.model.plan import STOCK
from quartet_plugin.space.knobs.knob import SettingKnob, Value
from quartet_plugin.space.knobs.offload_modules import OFFLOAD_MODULES, OFFLOAD_VARIABLE
from quartet_plugin.space.knobs.registry import SETTINGS
from quartet_plugin.tuner.config import TuneConfig, placement_of


def check_gpu_settings(config: TuneConfig, *, environment: Mapping[str, str]) -> None:
    """Raise ConfigError where trials run on processors and the search asks for a setting of GPUs.

    It also raises where the search names modules to offload and NVTE_CPU_OFFLOAD_V1 is not 1: Transformer
    Engine reads the variable when it is imported, before a rank has its plan. With a launcher the nodes
    decide `device: auto` and the variable; `auto` of a setting keeps the command's value.
    """
    is_local = placement_of(config).is_local
    device = resolve_device(config.device, environment=environment) if is_local else config.device
    search = config.search
    asked = [(knob, value) for knob in SETTINGS for value in _of_gpus(knob, search.requested(knob.name))]
    if device == "cpu" and asked:
        knob, value = asked[0]
        raise ConfigError(
            f"search.{knob.name}: {knob.request_text(value)}; needs a GPU, and trials run on the "
            "CPU device; leave it out, or tune where GPUs are (device: cuda)"
        )
    modules = next((value for knob, value in asked if knob is OFFLOAD_MODULES), None)
    if is_local and modules is not None and environment.get(OFFLOAD_VARIABLE) != "1":
        raise ConfigError(
            f"search.{OFFLOAD_MODULES.name}: {modules}; needs {OFFLOAD_VARIABLE}=1 in the environment, which "
            "Megatron asks for with Transformer Engine 2.10 and later: export it and start again"
        )


def _of_gpus(knob: SettingKnob, asked: Iterable[Value] | None) -> list[Value]:
    """The values that a search asks for and that run on GPUs only."""
    return [value for value in asked or () if value != STOCK and knob.is_for_gpus(value)]
