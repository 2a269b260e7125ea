"""What a trial leaves out of a DeepSpeed run: everything that writes, loads, reports or evaluates."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from quartet_plugin.errors import ConfigError

# Sections that start services, profilers or writers.
_SECTIONS = (
    "tensorboard",
    "wandb",
    "comet",
    "csv_monitor",
    "flops_profiler",
    "comms_logger",
    "monitor_config",
)
_SWITCHES = ("wall_clock_breakdown", "memory_breakdown", "dump_state", "prescale_breakdown")
_REFUSED = {
    "autotuning": "DeepSpeed's own tuner would start processes of its own",
    "elasticity": "the number of processes would change",
}


def neutralise(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The ds_config of a trial, and the names of what it leaves out.

    Raises ConfigError for what no trial could run beside.
    """
    for name, reason in _REFUSED.items():
        section = config.get(name)
        if isinstance(section, Mapping) and section.get("enabled"):
            raise ConfigError(f"{name}: {reason}; leave it out")
    changed = copy.copy(dict(config))
    taken = [name for name in (*_SECTIONS, *_SWITCHES) if changed.pop(name, None)]
    changed["steps_per_print"] = 10**9
    return changed, taken


def silence(engine: Any) -> list[str]:
    """Let the engine neither write nor read checkpoints; returns what is left out."""
    engine.save_checkpoint = _nothing(True)
    engine.load_checkpoint = _nothing((None, {}))
    engine.save_16bit_model = _nothing(True)
    return ["save_checkpoint", "load_checkpoint", "save_16bit_model"]


def _nothing(result: Any) -> Callable[..., Any]:
    def left_out(*_: Any, **__: Any) -> Any:
        return result

    return left_out
