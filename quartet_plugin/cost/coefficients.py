"""The coefficients of the iteration model, and the machine model that all plans of a run share."""

from dataclasses import dataclass
from enum import StrEnum

from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.run import HalfPrecision, UniformCluster
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.job_description import Experts, LatentAttention
from quartet_plugin.model.layout import Setting
from quartet_plugin.model.packed_lengths import PackedLengths
from quartet_plugin.model.plan import NodeInfo
from quartet_plugin.model.shape import LayerKinds


class Coefficient(StrEnum):
    """A multiplier of predicted seconds; those before `SPEED` are causes of a stage's compute."""

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
    EXPERTS = "expert_parallel"


COEFFICIENTS = tuple(Coefficient)
CAUSES = COEFFICIENTS[: COEFFICIENTS.index(Coefficient.SPEED)]
INDEX = {coefficient: index for index, coefficient in enumerate(COEFFICIENTS)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MachineModel:
    """The nodes, links and constants of a run before anything is measured, with the coefficients' priors.

    `intra_node` has every link inside a node, `inter_node` none. `spreads` [num_coefficients] are the prior
    standard deviations of the coefficients' logarithms: of the named ones, then of the slowdowns of slots or
    nodes. `slowdown_index_of_slot` [num_slots] is the index of a slot's slowdown among the coefficients, -1
    where slots are not distinguished. `is_known`: the library has the device. `memory_limit_bytes` is the
    least that a user gives a device. `settings` and `features`: the command's own. `experts`, `latent`,
    `mtp_kinds` (the layers of a depth of multi-token prediction) and `normalization` are the model's, which
    no plan changes, and `packed` the documents in its sequences. `domain_of_slot` [num_slots] is equal for
    slots that the links of `intra_node` join: those of a node, or of nodes that fast links join, without the
    ones in another network. Links between two domains are those of `inter_node`.
    """

    nodes: tuple[NodeInfo, ...]
    domain_of_slot: IntArray
    intra_node: UniformCluster
    inter_node: UniformCluster
    constants: Constants
    precision: HalfPrecision
    on_cpu: bool
    is_known: bool
    spreads: FloatArray
    slowdown_index_of_slot: IntArray
    memory_limit_bytes: int | None = None
    settings: tuple[Setting, ...] = ()
    features: tuple[str, ...] = ()
    experts: Experts | None = None
    latent: LatentAttention | None = None
    mtp_kinds: LayerKinds | None = None
    normalization: str | None = None
    packed: PackedLengths | None = None

    @property
    def num_coefficients(self) -> int:
        """The number of named coefficients and of slowdowns together."""
        return len(self.spreads)
