"""The coefficients of the iteration model, and the machines that it is computed for."""

from dataclasses import dataclass
from enum import StrEnum

from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.run import HalfPrecision, UniformCluster
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.plan import NodeInfo


class Coefficient(StrEnum):
    """What a correction multiplies; the first ones are causes of a stage's own compute."""

    PRODUCTS = "products"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    LAUNCH = "launch"
    RECOMPUTE = "recompute"
    EMBEDDING = "embedding"
    HEAD = "head"
    SPEED = "speed"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"
    TENSOR = "tensor_parallel"
    CONTEXT = "context_parallel"
    ACTION = "action"
    TRANSFER = "transfer"
    NETWORK = "network"
    LATENCY = "latency"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    STEP = "step"
    RUNTIME = "runtime"


COEFFICIENTS = tuple(Coefficient)


CAUSES = COEFFICIENTS[: COEFFICIENTS.index(Coefficient.SPEED)]


INDEX = {factor: at for at, factor in enumerate(COEFFICIENTS)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MachineModel:
    """What all plans of a run stand on: nodes, machines and constants.

    `near` are machines whose every link is inside a node, `far` those without such a link. `pace_of_slot`
    [num_slots] is the index of a slot's pace among the factors, -1 where paces are not told apart.
    `is_known`: the library has the device.
    """

    nodes: tuple[NodeInfo, ...]
    near: UniformCluster
    far: UniformCluster
    constants: Constants
    precision: HalfPrecision
    on_cpu: bool
    is_known: bool
    spreads: FloatArray
    pace_of_slot: IntArray

    @property
    def num_factors(self) -> int:
        """The named factors, and one pace a slot or node."""
        return len(self.spreads)


def coefficient_names(num_paces: int) -> tuple[str, ...]:
    """The factors' names in their order."""
    return (*(factor.value for factor in COEFFICIENTS), *(f"pace {at}" for at in range(num_paces)))
