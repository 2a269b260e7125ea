"""Puts a plan's tensor partition into the models that Megatron builds, through one seam.

The seam is `GPTModel.__init__`: every way to a GPT model passes through it with the layer's specification.
"""

import functools
from collections.abc import Callable
from typing import Any

from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.partition.refusals import config_refusal, size_refusal
from quartet_plugin.megatron.seams import Seam, Wrapper
from quartet_plugin.megatron.seams.declared import GPT_MODEL_INIT
from quartet_plugin.megatron.support import require_known_sources
from quartet_plugin.model.tensor_partition import TensorPartition


class PartitionedModels:
    """The partition that models get when they are built; `wrappers` put it in place.

    `gradients` are the queues of a schedule that splits backwards. Nothing of Megatron is imported before the
    first model.
    """

    def __init__(self, partition: TensorPartition, *, gradients: Any = None) -> None:
        require_known_sources((GPT_MODEL_INIT,))
        self._partition = partition
        self._gradients = gradients
        self._context: Any = None

    @property
    def wrappers(self) -> dict[Seam, Wrapper]:
        """The model's constructor with the plan's specification."""
        return {GPT_MODEL_INIT: self._wrap}

    def _wrap(self, initialise: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(initialise)
        def init_with_partition(
            model: Any, config: Any, transformer_layer_spec: Any, *args: Any, **kwargs: Any
        ) -> None:
            spec = self._replaced(config, transformer_layer_spec)
            initialise(model, config, spec, *args, **kwargs)

        return init_with_partition

    def _replaced(self, config: Any, spec: Any) -> Any:
        from quartet_plugin.megatron.partition.context import PartitionContext
        from quartet_plugin.megatron.partition.layer_spec import with_partition

        if self._context is None:
            self._context = PartitionContext(self._partition, self._gradients)
        # Groups first: every rank makes them, also one that goes on to refuse its model.
        self._context.open()
        reason = config_refusal(config) or size_refusal(config, self._context.num_devices)
        if reason is not None:
            raise PlanError(f"layout.tensor_partition: {self._partition.label}; {reason}")
        return with_partition(spec, self._context)
