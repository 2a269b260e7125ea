"""A cluster as a file: devices, nodes and the links between them, equal or not.

Bandwidths are bytes/s that one device sends in one direction while all devices of its node use the link; a
latency is that of one message, in seconds. A slot is one device's place; slots are numbered node by node.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.model.schema import ADDED, Bounds, Length, dump, parse, record

MAX_NODES = 65_536
MAX_MATRIX_NODES = 1024
MAX_SLOTS = 65_536

Precision = Literal["fp32", "fp16", "bf16", "fp8", "fp4"]
Name = Annotated[str, Length(least=1, most=200)]
Positive = Annotated[float, Bounds(gt=0, lt=1e20)]
Latency = Annotated[float, Bounds(ge=0, le=60)]
Slowdown = Annotated[float, Bounds(ge=1, le=1000)]


@record
class DeviceValues:
    """The rates and sizes of the devices of one name; for a device of the library only those that differ.

    A name the library does not have needs `peak_flops` (dense FLOP/s by precision), `memory_bytes` and
    `memory_bandwidth_bytes_per_s`. `compute_units` is how many tiles of a matrix product it works on at once.
    `host_link_bytes_per_s` is that of its copies to and from the host, `host_memory_bytes_per_s` its share of
    the host's memory bandwidth.
    """

    peak_flops: Mapping[Precision, Positive] = field(default_factory=dict)
    memory_bytes: Annotated[int, Bounds(ge=1, le=2**50)] | None = None
    memory_bandwidth_bytes_per_s: Positive | None = None
    compute_units: Annotated[int, Bounds(ge=1, le=2**20)] | None = None
    host_link_bytes_per_s: Positive | None = field(default=None, metadata=ADDED)
    host_memory_bytes_per_s: Positive | None = field(default=None, metadata=ADDED)


@record
class ClusterNode:
    """One node: the device's name of each slot, and how many times slower each is than its name says.

    `fabric` names the fabric and the clique that the links of its devices belong to, `topology` its place
    among the switches as Slurm writes it, part by part as `topology_pattern` says. Nodes of one fabric and
    clique are a scale-up domain, nodes below one lowest switch or in one block a segment.
    """

    name: Name
    devices: Annotated[tuple[Name, ...], Length(least=1, most=1024)]
    slowdown: tuple[Slowdown, ...] | None = None
    fabric: Name | None = field(default=None, metadata=ADDED)
    topology: Name | None = field(default=None, metadata=ADDED)
    topology_pattern: Name | None = field(default=None, metadata=ADDED)

    def __post_init__(self) -> None:
        if self.slowdown is not None and len(self.slowdown) != len(self.devices):
            raise ConfigError(
                f"nodes: {self.name}: slowdown has {len(self.slowdown)} entries; must be one for each of "
                f"its {len(self.devices)} devices"
            )

    @property
    def slowdowns(self) -> tuple[float, ...]:
        """One a slot; 1 where the file says nothing."""
        return (1.0,) * len(self.devices) if self.slowdown is None else self.slowdown

    @property
    def segment(self) -> str | None:
        """The lowest switch or the block above the node, as `segment_name` gives it."""
        return segment_name(self.topology, self.topology_pattern)


def segment_name(topology: str | None, pattern: str | None) -> str | None:
    """The part of a node's place before the node itself; None where the place names no switch or block.

    Slurm writes `core.leaf2.node-7` as `switch.switch.node`, `rack4.node-7` as `block.node`, and without a
    topology the node alone.
    """
    parts = (pattern or "").split(".")
    place = (topology or "").split(".", len(parts) - 1)
    if parts[-1] != "node" or len(place) != len(parts):
        return None
    return ".".join(place[:-1]).strip(".") or None


@record
class Link:
    """One level of links."""

    bandwidth_bytes_per_s: Positive
    latency_s: Latency


@record
class LinkMatrix:
    """Links between nodes where they are not all alike, [node, node]; the diagonals are not read."""

    bandwidth_bytes_per_s: tuple[tuple[Annotated[float, Bounds(ge=0, lt=1e20)], ...], ...]
    latency_s: tuple[tuple[Latency, ...], ...] | None = None


@record
class ClusterLinks:
    """The levels: inside a scale-up domain, inside a node across domains, between nodes.

    `scale_up_devices` consecutive slots are a domain; None for those of all nodes of one `fabric`, and of
    each node without one. `segment` joins the nodes of a segment, None where `network` does. `matrix` goes
    before both. `measured`: bandwidths are what collectives reached, not what the data sheet says.
    """

    scale_up: Link
    node: Link | None = None
    network: Link | None = None
    scale_up_devices: Annotated[int, Bounds(ge=1, le=2**20)] | None = None
    matrix: LinkMatrix | None = None
    measured: bool = False
    segment: Link | None = field(default=None, metadata=ADDED)


@record
class Cluster:
    """Devices, nodes and links. See docs/formats.md for the file.

    Raises ConfigError where the parts contradict each other.
    """

    nodes: Annotated[tuple[ClusterNode, ...], Length(least=1, most=MAX_NODES)]
    links: ClusterLinks
    devices: Mapping[Name, DeviceValues] = field(default_factory=dict)
    source: Annotated[str, Length(most=500)] = ""
    schema_version: Literal[1] = 1

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if len(set(names)) != len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise ConfigError(f"nodes: {twice!r} appears twice; give every node a unique name")
        if self.num_slots > MAX_SLOTS:
            raise ConfigError(f"nodes: {self.num_slots} devices together; must be at most {MAX_SLOTS}")
        _check_links(self)

    @property
    def num_slots(self) -> int:
        """Devices of all nodes."""
        return sum(len(node.devices) for node in self.nodes)


def _check_links(cluster: Cluster) -> None:
    links, count = cluster.links, len(cluster.nodes)
    sizes = {len(node.devices) for node in cluster.nodes}
    domain = links.scale_up_devices
    if domain is not None and any(size % domain and domain % size for size in sizes):
        raise ConfigError(
            f"links.scale_up_devices: {domain}; must divide the devices of a node ({min(sizes)}), "
            "or be a multiple of them"
        )
    if domain is not None and domain > min(sizes) and len(sizes) > 1:
        raise ConfigError(
            f"links.scale_up_devices: {domain}; domains of several nodes need nodes of equal size"
        )
    if links.node is None and domain is not None and domain < max(sizes):
        raise ConfigError("links.node: missing; it joins the scale-up domains of one node")
    if count > 1 and links.network is None and links.matrix is None:
        raise ConfigError(f"links.network: missing; {count} nodes need it, or links.matrix")
    if links.segment is not None and all(node.segment is None for node in cluster.nodes):
        raise ConfigError(
            "links.segment: no node is in a segment; give nodes their topology and topology_pattern, or "
            "remove it"
        )
    if links.matrix is not None:
        _check_matrix(links.matrix, count)


def _check_matrix(matrix: LinkMatrix, count: int) -> None:
    if count > MAX_MATRIX_NODES:
        raise ConfigError(f"links.matrix: {count} nodes; must be at most {MAX_MATRIX_NODES}")
    tables = {"bandwidth_bytes_per_s": matrix.bandwidth_bytes_per_s, "latency_s": matrix.latency_s}
    for name, rows in tables.items():
        if rows is not None and (len(rows) != count or any(len(row) != count for row in rows)):
            raise ConfigError(f"links.matrix.{name}: must have a row and a column for each of {count} nodes")
    for row, values in enumerate(matrix.bandwidth_bytes_per_s):
        for column, value in enumerate(values):
            if row != column and not value > 0:
                raise ConfigError(
                    f"links.matrix.bandwidth_bytes_per_s[{row}][{column}]: {value}; must be > 0"
                )


def read_cluster(path: Path) -> Cluster:
    """The cluster in the JSON file `path`. Raises ConfigError in one line: field, value and rule."""
    return parse_cluster(read_json(path), where=str(path))


def parse_cluster(data: object, *, where: str) -> Cluster:
    """Plain data as a cluster. Raises ConfigError in one line."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: a cluster is an object with nodes and links, not {type(data).__name__}")
    if "links" not in data and "num_slots" in _first_node(data):
        raise ConfigError(
            f"{where}: lists the nodes that a run had, without devices and links; "
            "`quartet probe -o cluster.json` measures those"
        )
    return parse(Cluster, data, where=where)


def _first_node(data: dict[str, object]) -> dict[str, object]:
    nodes = data.get("nodes")
    first = nodes[0] if isinstance(nodes, list) and nodes else None
    return first if isinstance(first, dict) else {}


def write_cluster(cluster: Cluster, *, path: Path) -> None:
    """Write the cluster as a file that `read_cluster` reads, whole or not at all."""
    write_json_atomic(path, dump(cluster))
