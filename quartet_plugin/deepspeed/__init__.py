"""The adapter that runs inside DeepSpeed's processes. Importing it imports and patches nothing of theirs."""

from typing import Any

__all__ = ["initialize"]


def initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize`, with the plan that the `quartet` section of the ds_config names.

    Takes and returns what `deepspeed.initialize` does. Without the section it is DeepSpeed's own. Raises
    ConfigError for a wrong section and PlanError for a plan that does not fit, the same on every rank.
    """
    from quartet_plugin.deepspeed.api import initialize as planned_initialize

    return planned_initialize(*args, **kwargs)
