"""What the plans of a run stand on: machines and links before anything is measured, and their factors.

A study knows of its machine what it was told (a probed cluster, a calibration), else a device of the library
where the ranks name one, orders of magnitude of a processor core where they do not. Every cause of time has a
factor, whose prior says how far off that may be.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quartet_plugin.calibration.constants_fit import Calibration
from quartet_plugin.cost.cluster import ResolvedCluster, look_up, uniform_cluster_of, with_measured_hop
from quartet_plugin.cost.coefficients import COEFFICIENTS, Coefficient, MachineModel
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.devices import DeviceSpec, library
from quartet_plugin.cost.jobs import uniform_cluster_of_device
from quartet_plugin.cost.run import HalfPrecision
from quartet_plugin.errors import ConfigError
from quartet_plugin.mapping.orders import slots_of
from quartet_plugin.model.cluster import Cluster
from quartet_plugin.model.costs import IntArray
from quartet_plugin.model.plan import NodeInfo

# Slots up to which each has a pace of its own; beyond, a node's slots share one.
MAX_PACED_SLOTS = 16
MAX_PACED_NODES = 64


# One standard deviation of each factor's logarithm on a device that the library knows, and on another.
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
}
# Of a slot's pace: accelerators of one kind are alike, processes on shared cores are not.
_PACE_SPREADS = (0.04, 0.35)
# Of our runtime where processes share cores: what it does while it would wait, others could have done.
_CROWDED_RUNTIME = 0.3
# Of the links and the speed that a probe measured, and what a calibration leaves of every spread.
LINKS = (Coefficient.TRANSFER, Coefficient.NETWORK, Coefficient.LATENCY)
_PROBED_LINK, _PROBED_SPEED = 0.4, 0.5
_CALIBRATED, _LEAST_CALIBRATED = 0.5, 0.03

# A processor core with sockets between processes: orders of magnitude, which the first trial corrects.
_CORE = DeviceSpec(
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
    """What is known; None for what was not given."""

    cluster: Cluster | None = None
    calibration: Calibration | None = None


def machine_model_of(
    nodes: Sequence[NodeInfo], *, precision: HalfPrecision, machine: KnownMachine | None = None
) -> MachineModel:
    """The machine_model of a run on `nodes`; `machine` is what the run was told of it.

    Raises ConfigError where that is another machine.
    """
    told = machine or KnownMachine()
    name = nodes[0].node_class.rpartition(" x")[0]
    on_cpu = name.lower().startswith("cpu")
    device, is_known = (_CORE, False) if on_cpu else _device_named(name)
    num_devices = sum(node.num_slots for node in nodes)
    machines = uniform_cluster_of_device(
        device, num_devices=num_devices, devices_per_node=max(n.num_slots for n in nodes)
    )
    constants = fitted() if told.calibration is None else told.calibration.constants
    planned = None if told.cluster is None else _planned(told.cluster, nodes, precision=precision)
    if planned is not None:
        constants = constants if told.calibration else with_measured_hop(constants, planned.cluster)
        machines, is_known = uniform_cluster_of(planned, constants), is_known or not on_cpu
    paces = _paces(nodes)
    return MachineModel(
        nodes=tuple(nodes),
        intra_node=replace(machines, scale_up_devices=max(num_devices, 1)),
        inter_node=replace(machines, scale_up_devices=1),
        constants=constants,
        precision=precision,
        on_cpu=on_cpu,
        is_known=is_known,
        spreads=np.array(
            _factor_spreads(told, planned, is_known=is_known, is_crowded=any(node.crowds for node in nodes))
            + [_pace_spread(planned, on_cpu=on_cpu)] * (int(paces.max(initial=-1)) + 1)
        ),
        slowdown_index_of_slot=np.where(paces >= 0, paces + len(COEFFICIENTS), -1),
    )


def _planned(cluster: Cluster, nodes: Sequence[NodeInfo], *, precision: HalfPrecision) -> ResolvedCluster:
    sizes, found = [len(node.devices) for node in cluster.nodes], [node.num_slots for node in nodes]
    if sizes != found:
        raise ConfigError(
            f"machine.cluster: nodes of {sizes} devices; the run has nodes of {found}: name its own cluster"
        )
    return look_up(cluster, precision=precision)


def _factor_spreads(
    told: KnownMachine, planned: ResolvedCluster | None, *, is_known: bool, is_crowded: bool
) -> list[float]:
    """How far off every factor may be: less where it was measured before."""
    spreads = {one: known if is_known else unknown for one, (known, unknown) in _SPREADS.items()}
    if planned is not None:
        spreads[Coefficient.SPEED] = min(spreads[Coefficient.SPEED], _PROBED_SPEED)
        if planned.cluster.links.measured:
            spreads |= {one: min(spreads[one], _PROBED_LINK) for one in LINKS}
    if is_crowded:
        spreads[Coefficient.RUNTIME] = _CROWDED_RUNTIME
    if told.calibration is not None:
        least = max(_LEAST_CALIBRATED, told.calibration.iteration_error)
        spreads = {one: max(least, _CALIBRATED * spread) for one, spread in spreads.items()}
    return [spreads[one] for one in COEFFICIENTS]


def _pace_spread(planned: ResolvedCluster | None, *, on_cpu: bool) -> float:
    is_mixed = planned is not None and float(planned.slowdown.max()) > 1.0
    return _PACE_SPREADS[int(on_cpu or is_mixed)]


def _device_named(name: str) -> tuple[DeviceSpec, bool]:
    """The library's device of that name or model, and whether there is one."""
    known = library()
    if name.lower() in known:
        return known[name.lower()], True
    words = name.upper().replace("-", " ").split()
    for device in dict.fromkeys(one.name for one in known.values()):
        if device.upper().split("-")[0] in words:
            return known[device.lower()], True
    return known[_ACCELERATOR], False


def _paces(nodes: Sequence[NodeInfo]) -> IntArray:
    slots = slots_of(nodes)
    if len(slots) == 1 or (len(slots) > MAX_PACED_SLOTS and not 1 < len(nodes) <= MAX_PACED_NODES):
        return np.full(len(slots), -1, dtype=np.int64)
    if len(slots) <= MAX_PACED_SLOTS:
        return np.arange(len(slots), dtype=np.int64)
    return np.array([slot.node for slot in slots], dtype=np.int64)
