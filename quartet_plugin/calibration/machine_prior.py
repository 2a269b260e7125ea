"""The machine model of a run before anything is measured, and the priors of the coefficients.

A study knows its machine by a probed cluster or a calibration, else by a device of the library that the ranks
name, else by orders of magnitude of a processor core. The prior of a coefficient is how far its cause of time
may be off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quartet_plugin.calibration.constants_fit import ASSUMED, Calibration
from quartet_plugin.cost.cluster import ResolvedCluster, look_up, uniform_cluster_of, with_measured_hop
from quartet_plugin.cost.coefficients import COEFFICIENTS, Coefficient, MachineModel
from quartet_plugin.cost.constants import ClusterConstants, Constants, fitted
from quartet_plugin.cost.devices import DeviceSpec, library, match_device
from quartet_plugin.cost.memory import PROCESS_BYTES, capacity_bytes_of
from quartet_plugin.cost.run import HalfPrecision, UniformCluster, uniform_cluster_of_device
from quartet_plugin.errors import ConfigError
from quartet_plugin.mapping.orders import slots_of
from quartet_plugin.model.cluster import Cluster
from quartet_plugin.model.costs import IntArray
from quartet_plugin.model.job_description import Experts, LatentAttention
from quartet_plugin.model.layout import Setting
from quartet_plugin.model.packed_lengths import PackedLengths
from quartet_plugin.model.plan import NodeInfo, Slot
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.space.plan_space import Space

# The number of slots up to which each slot has a slowdown; beyond, the slots of a node share one.
MAX_SLOWDOWN_SLOTS = 16
MAX_SLOWDOWN_NODES = 64

# One standard deviation of each coefficient's logarithm on a device that the library knows, and on another.
_SPREADS: dict[Coefficient, tuple[float, float]] = {
    Coefficient.PRODUCTS: (0.05, 0.1),
    Coefficient.ATTENTION: (0.2, 0.4),
    Coefficient.ELEMENTWISE: (0.3, 0.5),
    Coefficient.LAUNCH: (0.5, 0.8),
    Coefficient.RECOMPUTE: (0.1, 0.2),
    Coefficient.EMBEDDING: (0.5, 0.8),
    Coefficient.HEAD: (0.3, 0.6),
    Coefficient.SPEED: (0.3, 3.0),
    Coefficient.INPUT_GRAD: (0.1, 0.2),
    Coefficient.WEIGHT_GRAD: (0.1, 0.2),
    Coefficient.TENSOR: (0.6, 1.2),
    Coefficient.CONTEXT: (0.6, 1.2),
    Coefficient.ACTION: (1.0, 1.2),
    Coefficient.TRANSFER: (1.0, 1.5),
    Coefficient.NETWORK: (1.0, 1.5),
    Coefficient.LATENCY: (1.0, 1.5),
    Coefficient.GRADIENTS: (0.7, 1.2),
    Coefficient.OPTIMIZER: (0.4, 0.8),
    Coefficient.STEP: (1.0, 1.2),
    Coefficient.RUNTIME: (0.04, 0.06),
    Coefficient.EXPERTS: (0.6, 1.2),
}
# Of a slot's slowdown: accelerators of one kind are alike, processes on shared cores are not.
_SLOWDOWN_SPREADS = (0.04, 0.35)
# Of the plugin's runtime where processes share cores: its work while it waits takes time from the others.
_SHARED_CORES_RUNTIME = 0.3
# Of links and speed that a probe measured, and the share of every spread that a calibration leaves.
LINKS = (Coefficient.TRANSFER, Coefficient.NETWORK, Coefficient.LATENCY)
_PROBED_LINK, _PROBED_SPEED = 0.4, 0.5
_CALIBRATED, _LEAST_CALIBRATED = 0.5, 0.03

# A processor core with sockets between processes: orders of magnitude, which the first trial corrects.
PROCESSOR_CORE = DeviceSpec(
    schema_version=1,
    name="processor core",
    generation="plain",
    peak_flops={"fp32": 6e10},
    memory_bytes=2**34,
    memory_bandwidth_bytes_per_s=1e10,
    scale_up_bandwidth_bytes_per_s=8e9,
    scale_up_topology="switch",
    scale_up_devices=64,
    scale_out_bandwidth_bytes_per_s=1e9,
    devices_per_node=64,
    compute_units=1,
    source="assumed",
)
# An accelerator that the library does not know.
_ACCELERATOR = "a100-sxm-80gb"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownMachine:
    """The cluster and the calibration that a user gave of the machine; None where none was given."""

    cluster: Cluster | None = None
    calibration: Calibration | None = None

    @property
    def constants(self) -> Constants | None:
        """The calibration's constants."""
        return None if self.calibration is None else self.calibration.constants

    @property
    def scale_up_devices(self) -> int | None:
        """The consecutive devices that fast links join by the cluster file; None where it does not say it."""
        return None if self.cluster is None else self.cluster.links.scale_up_devices

    @property
    def memory_limit_bytes(self) -> int | None:
        """The least `memory_bytes` that the cluster file gives a device of its nodes; None without one."""
        if self.cluster is None:
            return None
        names = {name for node in self.cluster.nodes for name in node.devices}
        sizes = (values.memory_bytes for name, values in self.cluster.devices.items() if name in names)
        return min((size for size in sizes if size is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownDevices:
    """The devices of a run as equal ones, and its cluster where a user gave it.

    `is_known`: the library has the device that the ranks name.
    """

    machines: UniformCluster
    cluster: ResolvedCluster | None
    constants: Constants
    is_known: bool


def devices_of(nodes: Sequence[NodeInfo], *, precision: HalfPrecision, machine: KnownMachine) -> KnownDevices:
    """The devices that `nodes` name, or those of `machine`. Raises ConfigError where it has other nodes."""
    name = nodes[0].node_class.rpartition(" x")[0]
    on_cpu = nodes[0].has_no_accelerator
    device, is_known = (PROCESSOR_CORE, False) if on_cpu else library_device(name)
    sizes = [node.num_slots for node in nodes]
    machines = uniform_cluster_of_device(device, num_devices=sum(sizes), devices_per_node=max(sizes))
    resolved = None if machine.cluster is None else _resolved(machine.cluster, nodes, precision=precision)
    constants = machine.constants or fitted()
    if resolved is not None:
        constants = constants if machine.calibration else with_measured_hop(constants, resolved.cluster)
        machines = uniform_cluster_of(resolved, constants)
        if on_cpu:
            # The limit is the whole process's: what the process holds beside its tensors is no driver's.
            available = max(0.0, machines.memory_bytes - PROCESS_BYTES)
            machines = replace(machines, memory_bytes=int(capacity_bytes_of(available)))
    return KnownDevices(machines=machines, cluster=resolved, constants=constants, is_known=is_known)


def machine_model_of(
    nodes: Sequence[NodeInfo],
    *,
    precision: HalfPrecision,
    machine: KnownMachine | None = None,
    settings: tuple[Setting, ...] = (),
    features: tuple[str, ...] = (),
    experts: Experts | None = None,
    latent: LatentAttention | None = None,
    mtp_kinds: LayerKinds | None = None,
    normalization: str | None = None,
    packed: PackedLengths | None = None,
) -> MachineModel:
    """The machine model of a run on `nodes`; `machine` has what is known beyond the nodes.

    `settings` are those of the command, which plans change by name, `features` what it turns on beside them;
    `experts`, `latent`, `mtp_kinds` and `normalization` are the model's, `packed` the documents in its
    sequences.

    Raises ConfigError where `machine` has other nodes.
    """
    machine = machine or KnownMachine()
    known = devices_of(nodes, precision=precision, machine=machine)
    constants, resolved = known.constants, known.cluster
    if machine.calibration is None:
        constants = replace(ClusterConstants.of(constants), action_s=ASSUMED["action_s"])
    on_cpu = nodes[0].has_no_accelerator
    is_known = known.is_known or (resolved is not None and not on_cpu)
    machines, num_devices = known.machines, known.machines.num_devices
    slowdowns = _slowdown_numbers(nodes)
    return MachineModel(
        nodes=tuple(nodes),
        domain_of_slot=_domain_of_slot(nodes, resolved),
        intra_node=replace(machines, scale_up_devices=max(num_devices, 1)),
        inter_node=replace(machines, scale_up_devices=1),
        constants=constants,
        precision=precision,
        on_cpu=on_cpu,
        is_known=is_known,
        spreads=np.array(
            _coefficient_spreads(machine, resolved, nodes, is_known=is_known)
            + [_slowdown_spread(resolved, on_cpu=on_cpu)] * (int(slowdowns.max(initial=-1)) + 1)
        ),
        slowdown_index_of_slot=np.where(slowdowns >= 0, slowdowns + len(COEFFICIENTS), -1),
        memory_limit_bytes=machine.memory_limit_bytes,
        settings=settings,
        features=features,
        experts=experts,
        latent=latent,
        mtp_kinds=mtp_kinds,
        normalization=normalization,
        packed=packed,
    )


def machine_model_of_space(space: Space, machine: KnownMachine | None = None) -> MachineModel:
    """The machine model of the command that a space is around. Raises ConfigError as `machine_model_of`."""
    job = space.job
    return machine_model_of(
        space.nodes,
        precision=job.precision,
        machine=machine,
        settings=job.settings or (),
        features=job.features,
        experts=job.experts,
        latent=job.latent,
        mtp_kinds=job.mtp_kinds,
        normalization=job.normalization,
        packed=job.packed,
    )


def _resolved(cluster: Cluster, nodes: Sequence[NodeInfo], *, precision: HalfPrecision) -> ResolvedCluster:
    sizes, num_slots = [len(node.devices) for node in cluster.nodes], [node.num_slots for node in nodes]
    if sizes != num_slots:
        raise ConfigError(
            f"machine.cluster: nodes of {sizes} devices; the run has nodes of {num_slots}: name its own "
            "cluster"
        )
    return look_up(cluster, precision=precision)


def _coefficient_spreads(
    machine: KnownMachine, resolved: ResolvedCluster | None, nodes: Sequence[NodeInfo], *, is_known: bool
) -> list[float]:
    """The prior spread of every coefficient, smaller where it was measured before."""
    spreads = {name: known if is_known else unknown for name, (known, unknown) in _SPREADS.items()}
    if resolved is not None:
        spreads[Coefficient.SPEED] = min(spreads[Coefficient.SPEED], _PROBED_SPEED)
        # A probe measures links inside a node as of one kind, whichever namespaces they join.
        if resolved.cluster.links.measured and not any(node.network_namespaces for node in nodes):
            spreads |= {name: min(spreads[name], _PROBED_LINK) for name in LINKS}
    if any(node.crowds for node in nodes):
        spreads[Coefficient.RUNTIME] = _SHARED_CORES_RUNTIME
    if machine.calibration is not None:
        least = max(_LEAST_CALIBRATED, machine.calibration.iteration_error)
        spreads = {name: max(least, _CALIBRATED * spread) for name, spread in spreads.items()}
    return [spreads[name] for name in COEFFICIENTS]


def _domain_of_slot(nodes: Sequence[NodeInfo], resolved: ResolvedCluster | None) -> IntArray:
    """A number for each slot [num_slots], from 0: equal for slots that the links inside a node join."""
    of_node = np.arange(len(nodes)) if resolved is None else resolved.domain_of_node
    namespaces = [
        (index, group) for index, node in enumerate(nodes) for group in node.network_namespaces or ()
    ]
    namespace_of = {
        Slot(node=index, local=local): number
        for number, (index, group) in enumerate(namespaces, start=1)
        for local in group
    }
    slots = slots_of(nodes)
    keys = [(int(of_node[slot.node]), namespace_of.get(slot, 0)) for slot in slots]
    numbers = {key: number for number, key in enumerate(sorted(set(keys)))}
    return np.array([numbers[key] for key in keys], dtype=np.int64)


def _slowdown_spread(resolved: ResolvedCluster | None, *, on_cpu: bool) -> float:
    is_mixed = resolved is not None and float(resolved.slowdown.max()) > 1.0
    return _SLOWDOWN_SPREADS[int(on_cpu or is_mixed)]


def library_device(name: str) -> tuple[DeviceSpec, bool]:
    """The library's device of that name, and True; a usual one and False where there is none."""
    device = match_device(name)
    return (library()[_ACCELERATOR], False) if device is None else (device, True)


def _slowdown_numbers(nodes: Sequence[NodeInfo]) -> IntArray:
    """The number of each slot's slowdown [num_slots], -1 where slots are not told apart."""
    slots = slots_of(nodes)
    if len(slots) == 1 or (len(slots) > MAX_SLOWDOWN_SLOTS and not 1 < len(nodes) <= MAX_SLOWDOWN_NODES):
        return np.full(len(slots), -1, dtype=np.int64)
    if len(slots) <= MAX_SLOWDOWN_SLOTS:
        return np.arange(len(slots), dtype=np.int64)
    return np.array([slot.node for slot in slots], dtype=np.int64)
