"""Whether the layers of a DeepSpeed command can be made for other shapes, before anything is launched."""

from pathlib import Path

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import DEEPSPEED_MODULE, Command
from quartet_plugin.protocol.ds_config import (
    SECTION,
    config_argument,
    config_label,
    load_config,
    parse_settings,
)
from quartet_plugin.space.config import SearchConfig


def check_layer_builder(search: SearchConfig, *, command: Command, cwd: Path) -> None:
    """Raise ConfigError where shapes are searched and the ds_config names no function that makes layers."""
    if search.scaling is None or command.entry != DEEPSPEED_MODULE:
        return
    argument = config_argument(command.arguments)
    if argument is None:
        raise ConfigError(
            "search.scaling: the command names no ds_config file (--deepspeed_config), whose "
            f"{SECTION}.layer_builder would make the layers of other shapes; name one, or remove scaling"
        )
    label, config = config_label(argument), load_config(argument, folder=cwd)
    if config is None:
        raise ConfigError(
            f"search.scaling: --deepspeed_config {label} is no file, and no JSON object in base64; name a "
            f"ds_config with {SECTION}.layer_builder, or remove scaling"
        )
    if parse_settings(config, where=label).layer_builder is None:
        raise ConfigError(
            f"search.scaling: {label} names no {SECTION}.layer_builder, the function of the script that "
            "makes the layers of a depth and width (docs/deepspeed.md); name it, or remove scaling"
        )
