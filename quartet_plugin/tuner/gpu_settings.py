"""Settings that only a GPU can run: a search that asks for them on processors is refused before a launch."""

from collections.abc import Mapping

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.local import resolve_device
from quartet_plugin.model.plan import STOCK
from quartet_plugin.space.knobs.registry import SETTINGS
from quartet_plugin.tuner.config import TuneConfig, placement_of


def check_gpu_settings(config: TuneConfig, *, environment: Mapping[str, str]) -> None:
    """Raise ConfigError where trials run on processors and the search asks for a setting of GPUs.

    With a launcher `device: auto` is a question for its nodes; `auto` of a setting keeps the command's value.
    """
    is_local = placement_of(config).is_local
    device = resolve_device(config.device, environment=environment) if is_local else config.device
    if device != "cpu":
        return
    for knob in SETTINGS:
        asked = [
            value
            for value in config.search.requested(knob.name) or ()
            if value != STOCK and knob.is_for_gpus(value)
        ]
        if asked:
            raise ConfigError(
                f"search.{knob.name}: {knob.request_text(asked[0])}; needs a GPU, and trials run on the "
                "CPU device; leave it out, or tune where GPUs are (device: cuda)"
            )
