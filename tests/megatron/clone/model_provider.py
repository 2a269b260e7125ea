"""The model provider of a Megatron-LM clone, for any release: builds a stage with the given builder."""

from collections.abc import Callable
from typing import Any


def model_provider(
    builder: Callable[..., Any],
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """A stage of the model, with or without embedding and head."""
    from megatron.training import get_args

    return builder(get_args(), pre_process, post_process, vp_stage, config, pg_collection)
