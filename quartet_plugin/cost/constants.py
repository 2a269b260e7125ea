"""The physical constants of the cost model: their meanings, their bounds and their fitted values.

The values in `constants.json` were fitted to published runs (`benchmarks/predict_published.py --fit`),
each pulled towards its physical default, so that hardware without measurements keeps a sane value.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import read_json

FILE = "constants.json"


def _constant(
    default: float, low: float, high: float, spread: float, meaning: str, *, is_fitted: bool = False
) -> float:
    """`spread`: one standard deviation of the prior, as a relative error (of the logarithm).

    Published runs move the constants that are `is_fitted` alone; the others keep their physical default.
    """
    value: float = field(
        default=default,
        metadata={"low": low, "high": high, "spread": spread, "meaning": meaning, "is_fitted": is_fitted},
    )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The constants that all devices and runs share; dimensionless unless the name has a unit."""

    gemm_rate: float = _constant(
        0.9, 0.7, 1.1, 0.06, "large half-precision products, over the ceiling", is_fitted=True
    )
    flops_per_joule: float = _constant(1.05e12, 6e11, 2e12, 0.1, "what power allows them on 4 nm devices")
    fp8_rate: float = _constant(0.95, 0.5, 1.2, 0.08, "large fp8 products, over the ceiling", is_fitted=True)
    gemm_traffic: float = _constant(
        0.7, 0.2, 2.5, 0.4, "operand bytes of a matrix product that add time", is_fitted=True
    )
    flash_rate: float = _constant(0.8, 0.4, 1.2, 0.12, "fused attention, over large products")
    elementwise: float = _constant(1.2, 0.5, 3.0, 0.3, "memory passes of norms, activations and residuals")
    softmax: float = _constant(
        1.2, 0.5, 3.0, 0.3, "memory passes of unfused attention scores", is_fitted=True
    )
    cast: float = _constant(1.0, 0.2, 3.0, 0.4, "memory passes of casts to fp8")
    logits: float = _constant(1.0, 0.2, 3.0, 0.4, "memory passes of logits and loss", is_fitted=True)
    launch_s: float = _constant(4e-6, 1e-6, 1.5e-5, 0.4, "a kernel's start and tail")
    host_operation_s: float = _constant(1e-5, 2e-6, 3e-5, 0.3, "the host's time to start an operation")
    scale_up: float = _constant(0.7, 0.3, 1.0, 0.2, "collectives over scale-up links, of nominal")
    scale_out: float = _constant(
        0.7, 0.3, 1.0, 0.2, "collectives over the network, of nominal", is_fitted=True
    )
    hop_s: float = _constant(1e-5, 2e-6, 6e-5, 0.5, "latency of one step of a collective")
    peer: float = _constant(0.25, 0.05, 1.0, 0.4, "one sender to one receiver, of nominal")
    tensor_exposed: float = _constant(0.4, 0.05, 1.0, 0.4, "tensor-parallel traffic left when overlapped")
    data_exposed: float = _constant(0.2, 0.02, 1.0, 0.5, "data-parallel traffic left when overlapped")
    optimizer: float = _constant(1.3, 0.6, 4.0, 0.4, "memory passes of the optimizer's step")
    step_s: float = _constant(0.02, 0.001, 0.2, 0.7, "fixed time of an iteration: data, logging, sync")
    straggler: float = _constant(0.004, 0.0005, 0.02, 0.5, "slowdown a doubling of the nodes", is_fitted=True)

    def __post_init__(self) -> None:
        for constant in fields(self):
            value = getattr(self, constant.name)
            low, high = constant.metadata["low"], constant.metadata["high"]
            if not (isinstance(value, float) and math.isfinite(value) and low <= value <= high):
                raise ConfigError(f"constants.{constant.name}: {value}; must be from {low} to {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConstants(Constants):
    """Constants that one cluster's measurements corrected; see `calibration`.

    `action_s`: seconds of a stage's forward or backward beside its layers (data, the loop around it, the
    loss). `residual`: measured over predicted time of iterations, for which no term accounts. `skew`: the
    wait of tensor-parallel ranks for the slowest before their collectives, as a share of the compute between
    them. `contention`: the additional compute time while a node's other ranks compute out of the same memory,
    as a share of the time alone. `runtime_s`: additional seconds of an action that the plugin's runtime
    executes. The others are ratios of a part's time to its time by the shared constants: of the products of
    weight gradients, of activations as wide as an FFN, of accumulating gradients, of starting the kernels of
    input and of weight gradients, of the elementwise part of a layer's and of the head's backward, of a
    transfer's latency to a collective's hop, of stepping one more weight tensor to a kernel's start, and of
    a state-space layer's scan and convolution. A measured constant may lie outside the bounds of the shared
    ones.
    """

    action_s: float = 0.0
    residual: float = 1.0
    weight_product: float = 1.0
    activation: float = 1.0
    accumulation: float = 1.0
    launch_input: float = 1.0
    launch_weight: float = 1.0
    elementwise_backward: float = 1.0
    logits_backward: float = 1.0
    peer_hop: float = 1.0
    optimizer_start: float = 1.0
    scan: float = 1.0
    skew: float = 0.0
    contention: float = 0.0
    runtime_s: float = 0.0

    def __post_init__(self) -> None:
        for constant in fields(self):
            value = getattr(self, constant.name)
            is_positive = value > 0 or (value == 0 and constant.name in ADDED)
            if not (isinstance(value, float) and math.isfinite(value) and is_positive):
                raise ConfigError(f"constants.{constant.name}: {value}; must be above 0")

    @classmethod
    def of(cls, constants: Constants) -> "ClusterConstants":
        """The constants as a cluster's; neutral where they have no such constant."""
        if isinstance(constants, cls):
            return constants
        return cls(**{name: getattr(constants, name) for name in names()})


# The constants that are 0 unless measured.
ADDED = ("action_s", "skew", "contention", "runtime_s")
# The constants of a cluster without measurements: every ratio is 1.
NEUTRAL = ClusterConstants()


def names() -> tuple[str, ...]:
    """The names of the shared constants in their order."""
    return tuple(constant.name for constant in fields(Constants))


def of_mapping(values: Mapping[str, float], *, where: str) -> Constants:
    """Constants from data; a missing one keeps its default. Raises ConfigError for an unknown name."""
    unknown = sorted(set(values) - set(names()))
    if unknown:
        raise ConfigError(f"{where}: {unknown[0]}: unknown constant; remove it")
    return Constants(**{name: float(value) for name, value in values.items()})


@functools.cache
def fitted() -> Constants:
    """The fitted constants that come with the package."""
    path = resources.files("quartet_plugin.cost") / FILE
    with resources.as_file(path) as file:
        return of_mapping(read_json(file)["values"], where=str(file))
