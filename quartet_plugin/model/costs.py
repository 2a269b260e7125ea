"""The cost table of a pipeline's layers, and the costs of the stages of a split and placement.

Costs are one microbatch's. The device slowdown multiplies compute only. A transfer starts when its
producer ends, costs no compute, and needs `transfer_s[from, to]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.schema import Bounds, Length, record

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Seconds = Annotated[float, Bounds(ge=0, le=1e9)]
NumBytes = Annotated[float, Bounds(ge=0, le=1e18)]

EMBEDDING = "embedding"
HEAD = "head"


@record
class LayerCost:
    """One entry of a cost table: seconds a microbatch on a device of slowdown 1, and activation bytes."""

    name: Annotated[str, Length(least=1, most=200)]
    forward_s: Seconds
    input_grad_s: Seconds
    weight_grad_s: Seconds
    activation_bytes: NumBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A pipeline's cost table, as `COSTS.json` holds it.

    `device_slowdown` [num_devices]; `transfer_s` [num_devices, num_devices], diagonal 0;
    `memory_limit_bytes` [num_devices] or None, for activations only; `backward_fused_s` [len(layers)]
    or None, the full backward where it is cheaper than I + W. `exchange_s` [len(layers)] or None, the
    seconds of F and of the backward (I or B) that are the experts' all-to-all: an overlapped pair hides them.
    """

    num_devices: int
    num_microbatches: int
    layers: tuple[LayerCost, ...]
    device_slowdown: FloatArray
    transfer_s: FloatArray
    memory_limit_bytes: FloatArray | None
    weight_grad_held_fraction: float
    backward_fused_s: tuple[float, ...] | None
    exchange_s: tuple[tuple[float, ...], ...] | None = None

    @property
    def has_embedding(self) -> bool:
        """Whether the first entry is the embedding."""
        return self.layers[0].name == EMBEDDING

    @property
    def has_head(self) -> bool:
        """Whether the last entry is the head."""
        return self.layers[-1].name == HEAD

    @property
    def num_transformer_layers(self) -> int:
        """Entries that are neither the embedding nor the head."""
        return len(self.layers) - self.has_embedding - self.has_head


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """The costs of one microbatch on each stage, slowdowns applied: the simulator's whole input.

    All arrays are [num_stages]. `forward_transfer_s[s]` is from stage s to s+1 (last entry 0),
    `backward_transfer_s[s]` from stage s to s-1 (first entry 0); 0 where both are on one device.
    `held_fraction` of `activation_bytes` stays between I and W. `exchange_s` [2, num_stages], None for zeros,
    are the seconds of F and of the backward that an overlapped pair can hide.
    """

    device_of_stage: IntArray
    forward_s: FloatArray
    input_grad_s: FloatArray
    weight_grad_s: FloatArray
    backward_s: FloatArray
    activation_bytes: FloatArray
    forward_transfer_s: FloatArray
    backward_transfer_s: FloatArray
    held_fraction: float
    exchange_s: FloatArray | None = None

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.device_of_stage)


def stage_costs(costs: Costs, *, placement: Sequence[int], layers_per_stage: Sequence[int]) -> StageCosts:
    """Sum the layers of each stage on its device.

    `placement` is the device of each stage, `layers_per_stage` counts entries of `costs.layers`.
    Raises ConfigError when the counts do not cover the layers.
    """
    if len(placement) != len(layers_per_stage):
        raise ConfigError(
            f"layers_per_stage: {len(layers_per_stage)} counts for {len(placement)} stages; give one a stage"
        )
    if sum(layers_per_stage) != len(costs.layers) or min(layers_per_stage) < 0:
        raise ConfigError(
            f"layers_per_stage: {list(layers_per_stage)} sums to {sum(layers_per_stage)}; "
            f"the counts must be >= 0 and sum to the {len(costs.layers)} layers"
        )
    device = np.asarray(placement, dtype=np.int64)
    slowdown = costs.device_slowdown[device]
    ends = np.cumsum(np.asarray(layers_per_stage, dtype=np.int64))
    starts = ends - np.asarray(layers_per_stage, dtype=np.int64)

    def total(values: Sequence[float]) -> FloatArray:
        cumulated = np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))
        return cumulated[ends] - cumulated[starts]

    input_grad_s = total([layer.input_grad_s for layer in costs.layers]) * slowdown
    weight_grad_s = total([layer.weight_grad_s for layer in costs.layers]) * slowdown
    fused, exchange = costs.backward_fused_s, costs.exchange_s
    return StageCosts(
        device_of_stage=device,
        forward_s=total([layer.forward_s for layer in costs.layers]) * slowdown,
        input_grad_s=input_grad_s,
        weight_grad_s=weight_grad_s,
        backward_s=input_grad_s + weight_grad_s if fused is None else total(fused) * slowdown,
        activation_bytes=total([layer.activation_bytes for layer in costs.layers]),
        forward_transfer_s=np.append(costs.transfer_s[device[:-1], device[1:]], 0.0),
        backward_transfer_s=np.concatenate(([0.0], costs.transfer_s[device[1:], device[:-1]])),
        held_fraction=costs.weight_grad_held_fraction,
        exchange_s=None
        if exchange is None
        else np.stack([total([layer[way] for layer in exchange]) * slowdown for way in range(2)]),
    )


def without_exchanges(costs: Costs) -> Costs:
    """The costs as if every all-to-all took no time: no pair is shorter than its parts are then."""
    exchange, fused = costs.exchange_s, costs.backward_fused_s
    if exchange is None:
        return costs
    layers = tuple(
        replace(layer, forward_s=layer.forward_s - forward_s, input_grad_s=layer.input_grad_s - backward_s)
        for layer, (forward_s, backward_s) in zip(costs.layers, exchange, strict=True)
    )
    fused_s = None if fused is None else tuple(b - e for b, (_, e) in zip(fused, exchange, strict=True))
    return replace(costs, layers=layers, backward_fused_s=fused_s, exchange_s=None)
