"""A cluster file as the cost model and the mapping solver take it.

`look_up` resolves a `Cluster`'s device names into a `ResolvedCluster`. Of it, `uniform_cluster_of` makes what
the cost model takes, equal devices on equal links, and `topology_of` what the mapping solver takes, every
slot and every link. The fastest device stands for all; every slot has a slowdown against it. Memory is the
smallest device's, since any rank may be there.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quartet_plugin.cost.constants import ClusterConstants, Constants, fitted
from quartet_plugin.cost.devices import DeviceSpec, device_named
from quartet_plugin.cost.run import UniformCluster, port_share
from quartet_plugin.errors import ConfigError
from quartet_plugin.mapping.orders import slots_of
from quartet_plugin.mapping.topology import GroupLink, Topology
from quartet_plugin.model.cluster import Cluster, DeviceValues, Precision
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.plan import NodeInfo, Slot

# Latencies are positive; this one no cluster can beat.
LEAST_LATENCY_S = 1e-9
# The generation of devices that are not in the library: no tiles to fill, no power limit.
PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResolvedCluster:
    """A cluster with its devices looked up.

    `slowdown` [num_slots] is each slot's against `reference`, the fastest device; `domain` [num_slots] its
    scale-up domain; `memory_bytes` is the smallest device's memory.
    """

    cluster: Cluster
    reference: DeviceSpec
    slowdown: FloatArray
    domain: IntArray
    memory_bytes: int

    @property
    def nodes(self) -> tuple[NodeInfo, ...]:
        """The nodes as a plan names them."""
        return tuple(
            NodeInfo(
                host=node.name,
                node_class=" + ".join(
                    f"{name} x{node.devices.count(name)}" for name in dict.fromkeys(node.devices)
                ),
                num_slots=len(node.devices),
            )
            for node in self.cluster.nodes
        )

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Every slot, node by node."""
        return slots_of(self.nodes)

    @property
    def has_equal_nodes(self) -> bool:
        """Whether all nodes have as many slots; else RANKs keep the launcher's order."""
        return len({len(node.devices) for node in self.cluster.nodes}) == 1

    @property
    def domain_of_node(self) -> IntArray:
        """A number for each node [num_nodes], from 0: equal for the nodes of one scale-up domain."""
        sizes = [len(node.devices) for node in self.cluster.nodes]
        firsts = self.domain[np.cumsum([0, *sizes[:-1]])]
        return np.unique(firsts, return_inverse=True)[1]

    @property
    def segment_of_node(self) -> IntArray | None:
        """The segment of each node [num_nodes], one of its own for a node that has none in the file.

        None where no segment of several nodes has another beside it: no order of ranks makes a difference.
        """
        nodes = self.cluster.nodes
        segments = _numbered([(node.segment is None, node.segment or node.name) for node in nodes])
        return segments if 1 < len(set(segments.tolist())) < len(nodes) else None

    @property
    def largest_block(self) -> int:
        """The slots that every node has in every domain of it: a tensor-parallel size must divide them."""
        cells: dict[tuple[int, int], int] = {}
        for slot, domain in zip(self.slots, self.domain.tolist(), strict=True):
            cells[slot.node, domain] = cells.get((slot.node, domain), 0) + 1
        return math.gcd(*cells.values())


def look_up(
    cluster: Cluster, *, precision: Precision, devices: Mapping[str, DeviceSpec] | None = None
) -> ResolvedCluster:
    """The cluster with its devices looked up; `devices` go before the library's.

    Raises ConfigError for a device that is in neither and that the cluster does not describe in full.
    """
    names = list(dict.fromkeys(name for node in cluster.nodes for name in node.devices))
    specs = {name: _device(name, cluster, devices) for name in names}
    rate = {name: device.ceiling_flops(precision) for name, device in specs.items()}
    fastest = max(names, key=lambda name: rate[name])
    slowdowns = [
        slowdown * rate[fastest] / rate[name]
        for node in cluster.nodes
        for name, slowdown in zip(node.devices, node.slowdowns, strict=True)
    ]
    return ResolvedCluster(
        cluster=cluster,
        reference=specs[fastest],
        slowdown=np.array(slowdowns),
        domain=_domains(cluster),
        memory_bytes=min(device.memory_bytes for device in specs.values()),
    )


def uniform_cluster_of(resolved: ResolvedCluster, constants: Constants) -> UniformCluster:
    """The cluster as equal devices on equal links: the fastest device and the slowest link."""
    topology = topology_of(resolved, constants)
    sizes = [len(node.devices) for node in resolved.cluster.nodes]
    links = resolved.cluster.links
    between = _off_diagonal(topology.between_bytes_per_s)
    slowest = float(between.min()) if len(between) else topology.inside_bytes_per_s
    return UniformCluster(
        device=resolved.reference,
        num_devices=resolved.cluster.num_slots,
        devices_per_node=max(sizes),
        scale_up_devices=links.scale_up_devices or int(np.bincount(resolved.domain).max()),
        scale_up_bytes_per_s=topology.inside_bytes_per_s / constants.scale_up,
        scale_out_bytes_per_s=slowest / constants.scale_out,
        memory_bytes=resolved.memory_bytes,
        port_share=None if links.measured else port_share(resolved.reference),
    )


def best_case_cluster(
    resolved: ResolvedCluster, constants: Constants, *, is_one_domain: bool = False
) -> tuple[UniformCluster, Constants]:
    """A uniform cluster and constants that no mapping can beat: every link the best of its kind.

    Groups are as dense in domains of the largest size as the cost model's ranks in Megatron's order. With
    `is_one_domain` also transfers, which any neighbours may have inside a domain, are all inside.
    """
    topology = topology_of(resolved, constants)
    between = _off_diagonal(topology.between_bytes_per_s)
    # A transfer reaches only the peer's share of a link in a domain, but all of a link between domains.
    as_peer = between * max(1.0, constants.scale_up / constants.peer)
    best = max([topology.inside_bytes_per_s, *as_peer.tolist()])
    outside = max(between.tolist(), default=topology.inside_bytes_per_s)
    cluster = uniform_cluster_of(resolved, constants)
    cluster = replace(
        cluster,
        device=replace(resolved.reference, scale_up_topology="switch"),
        scale_up_devices=resolved.cluster.num_slots if is_one_domain else cluster.scale_up_devices,
        scale_up_bytes_per_s=best / constants.scale_up,
        scale_out_bytes_per_s=outside / constants.scale_out,
    )
    return cluster, with_hop(constants, LEAST_LATENCY_S)


def topology_of(resolved: ResolvedCluster, constants: Constants) -> Topology:
    """The cluster slot by slot, with the bandwidths that collectives reach.

    A probe measures what collectives reach by the shared constants. What a calibration learned beyond them
    counts for measured links too: cores that compute carry messages slower than the idle cores of a probe.
    """
    links, shared = resolved.cluster.links, fitted()
    reach_up, reach_out = constants.scale_up, constants.scale_out
    if links.measured:
        reach_up, reach_out = reach_up / shared.scale_up, reach_out / shared.scale_out
    bandwidth, latency = _between(resolved)
    slots, segments = resolved.slots, resolved.segment_of_node
    return Topology(
        slots=slots,
        domain_of_slot=resolved.domain,
        segment_of_slot=None if segments is None else segments[[slot.node for slot in slots]],
        slowdown=resolved.slowdown,
        inside_bytes_per_s=links.scale_up.bandwidth_bytes_per_s * reach_up,
        inside_latency_s=max(LEAST_LATENCY_S, links.scale_up.latency_s),
        between_bytes_per_s=bandwidth * reach_out,
        between_latency_s=np.maximum(latency, LEAST_LATENCY_S),
    )


def uniform_topology_of(cluster: UniformCluster, constants: Constants) -> Topology:
    """The topology of a uniform cluster."""
    per_node, domain = cluster.devices_per_node, cluster.scale_up_devices
    slots = tuple(Slot(node=k // per_node, local=k % per_node) for k in range(cluster.num_devices))
    count = -(-cluster.num_devices // domain)
    return Topology(
        slots=slots,
        domain_of_slot=np.arange(cluster.num_devices, dtype=np.int64) // domain,
        slowdown=np.ones(cluster.num_devices),
        inside_bytes_per_s=cluster.scale_up_bytes_per_s * constants.scale_up,
        inside_latency_s=constants.hop_s / 4,
        between_bytes_per_s=np.full((count, count), cluster.scale_out_bytes_per_s * constants.scale_out),
        between_latency_s=np.full((count, count), constants.hop_s),
    )


def view_from(
    cluster: UniformCluster, constants: Constants, link: GroupLink, *, stride: int
) -> tuple[UniformCluster, Constants]:
    """The uniform cluster and constants by which a group of ranks `stride` apart gets `link`."""
    if link.num_domains == 1:
        view = replace(
            cluster,
            scale_up_devices=max(cluster.num_devices, link.size * stride),
            scale_up_bytes_per_s=link.bytes_per_s / constants.scale_up,
        )
        return view, with_hop(constants, 4 * link.inside_latency_s)
    view = replace(
        cluster,
        scale_up_devices=link.local * stride,
        scale_up_bytes_per_s=max(link.bytes_per_s, cluster.scale_up_bytes_per_s * constants.scale_up)
        / constants.scale_up,
        scale_out_bytes_per_s=link.port_bytes_per_s / constants.scale_out,
    )
    return view, with_hop(constants, link.latency_s)


def with_hop(constants: Constants, hop_s: float) -> Constants:
    """The constants with another latency, which may lie outside the bounds of shared constants."""
    return replace(ClusterConstants.of(constants), hop_s=hop_s)


def with_measured_hop(constants: Constants, cluster: Cluster) -> Constants:
    """The constants with the latency that a probe measured, unchanged where links were not measured."""
    links = cluster.links
    if not links.measured:
        return constants
    # Inside a scale-up domain the cost model takes a quarter of a hop's latency.
    slowest = links.network or links.scale_up
    hop_s = slowest.latency_s if links.network else 4 * slowest.latency_s
    return with_hop(constants, max(hop_s, LEAST_LATENCY_S))


def _device(name: str, cluster: Cluster, devices: Mapping[str, DeviceSpec] | None) -> DeviceSpec:
    values = cluster.devices.get(name, DeviceValues())
    try:
        spec = device_named(name, extra=devices)
    except ConfigError:
        return _described(name, cluster, values)
    return replace(
        spec,
        peak_flops={**spec.peak_flops, **values.peak_flops},
        memory_bytes=values.memory_bytes or spec.memory_bytes,
        memory_bandwidth_bytes_per_s=values.memory_bandwidth_bytes_per_s or spec.memory_bandwidth_bytes_per_s,
        compute_units=values.compute_units or spec.compute_units,
        host_link_bytes_per_s=values.host_link_bytes_per_s or spec.host_link_bytes_per_s,
        host_memory_bytes_per_s=values.host_memory_bytes_per_s or spec.host_memory_bytes_per_s,
    )


def _described(name: str, cluster: Cluster, values: DeviceValues) -> DeviceSpec:
    if not (values.peak_flops and values.memory_bytes and values.memory_bandwidth_bytes_per_s):
        raise ConfigError(
            f"nodes: device {name!r}: unknown; give its peak_flops, memory_bytes and "
            "memory_bandwidth_bytes_per_s under devices, or use a name of the library"
        )
    links = cluster.links
    per_node = max(len(node.devices) for node in cluster.nodes)
    return DeviceSpec(
        schema_version=1,
        name=name,
        generation=PLAIN,
        peak_flops=values.peak_flops,
        memory_bytes=values.memory_bytes,
        memory_bandwidth_bytes_per_s=values.memory_bandwidth_bytes_per_s,
        scale_up_bandwidth_bytes_per_s=links.scale_up.bandwidth_bytes_per_s,
        scale_up_topology="switch",
        scale_up_devices=links.scale_up_devices or per_node,
        scale_out_bandwidth_bytes_per_s=(links.network or links.scale_up).bandwidth_bytes_per_s,
        devices_per_node=per_node,
        compute_units=values.compute_units or 1,
        host_link_bytes_per_s=values.host_link_bytes_per_s,
        host_memory_bytes_per_s=values.host_memory_bytes_per_s,
        # Measured: the fastest product is the ceiling itself.
        matmul_ceiling=dict.fromkeys(values.peak_flops, 1.0) if links.measured else {},
        source=cluster.source or "cluster file",
    )


def _domains(cluster: Cluster) -> IntArray:
    """The domain of each slot: `scale_up_devices` consecutive ones, or those of the nodes of one fabric."""
    size = cluster.links.scale_up_devices
    sizes = [len(node.devices) for node in cluster.nodes]
    if size is None:
        fabrics = [(node.fabric is None, node.fabric or node.name) for node in cluster.nodes]
        return np.repeat(_numbered(fabrics), sizes)
    if size > max(sizes):
        return np.arange(sum(sizes), dtype=np.int64) // size
    domains, first = [], 0
    for count in sizes:
        domains += [first + local // size for local in range(count)]
        first += count // size
    return np.array(domains, dtype=np.int64)


def _between(resolved: ResolvedCluster) -> tuple[FloatArray, FloatArray]:
    """Nominal bandwidth and latency between domains [num_domains, num_domains]."""
    links, domain = resolved.cluster.links, resolved.domain
    node_of_slot = np.array([slot.node for slot in resolved.slots])
    node_of_domain = node_of_slot[np.unique(domain, return_index=True)[1]]
    same = node_of_domain[:, None] == node_of_domain[None, :]
    domains = np.ix_(node_of_domain, node_of_domain)
    shape = same.shape
    level = links.network or links.scale_up
    bandwidth, latency = np.full(shape, level.bandwidth_bytes_per_s), np.full(shape, level.latency_s)
    if links.segment is not None:
        names = np.array([node.segment or "" for node in resolved.cluster.nodes])[node_of_domain]
        is_joined = (names[:, None] == names[None, :]) & (names != "")
        bandwidth = np.where(is_joined, links.segment.bandwidth_bytes_per_s, bandwidth)
        latency = np.where(is_joined, links.segment.latency_s, latency)
    if links.matrix is not None:
        table = np.array(links.matrix.bandwidth_bytes_per_s, dtype=np.float64)
        bandwidth = table[domains]
        if links.matrix.latency_s is not None:
            latency = np.array(links.matrix.latency_s, dtype=np.float64)[domains]
    if links.node is not None:
        bandwidth = np.where(same, links.node.bandwidth_bytes_per_s, bandwidth)
        latency = np.where(same, links.node.latency_s, latency)
    return bandwidth, latency


def _numbered(keys: Sequence[Hashable]) -> IntArray:
    """A number for each key, equal for equal keys, in the order in which they first appear."""
    number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    return np.array([number[key] for key in keys], dtype=np.int64)


def _off_diagonal(table: FloatArray) -> FloatArray:
    elements: FloatArray = table[~np.eye(len(table), dtype=bool)]
    return elements
