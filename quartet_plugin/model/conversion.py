"""The order to the ranks to save a checkpoint again for other stages."""

from pathlib import Path
from typing import Literal

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.schema import record

FORMAT: Literal["torch_dist"] = "torch_dist"
# Megatron's own, in the folder that --load and --save name.
TRACKER = "latest_checkpointed_iteration.txt"
_MAX_STEP = 10_000_000


@record
class Conversion:
    """The checkpoint in `load` (of iteration `step`, None for the latest), to be saved in `save`/torch_dist.

    `is_weights_only`: without optimizer and random state. Raises ConfigError.
    """

    schema_version: Literal[1] = 1
    load: str
    save: str
    step: int | None = None
    is_weights_only: bool = False

    def __post_init__(self) -> None:
        for name in ("load", "save"):
            path = getattr(self, name)
            if not Path(path).is_absolute():
                raise ConfigError(f"{name}: {path[:200]!r}; must be an absolute path")
        if self.step is not None and not 0 <= self.step <= _MAX_STEP:
            raise ConfigError(f"step: {self.step}; must be from 0 to {_MAX_STEP}")
