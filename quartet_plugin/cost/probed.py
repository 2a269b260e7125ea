"""The findings of `quartet probe` as a cluster: names of known devices, measured figures of others."""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from itertools import groupby
from typing import Annotated, Literal

from quartet_plugin.cost.devices import match_device
from quartet_plugin.model.cluster import (
    Cluster,
    ClusterLinks,
    ClusterNode,
    DeviceValues,
    Link,
    LinkMatrix,
    Name,
    Positive,
    Precision,
)
from quartet_plugin.model.schema import ADDED, Bounds, Length, record

# A device slower than the fastest of its name by more than this has a slowdown; less is noise.
SLOWDOWN_TOLERANCE = 0.15

Pairs = tuple[tuple[Annotated[float, Bounds(ge=0, lt=1e20)], ...], ...]


@record
class ProbedRank:
    """One rank's device: its name and size, its fastest product by format, and the rate of its copies.

    `host` is the name of the rank's node, which no other node has (`probe.node_names`).
    `fabric` is the identity of the fabric and the clique that the device's links belong to, `topology` the
    node's place among Slurm's switches; None where nothing says them.
    """

    host: Name
    local_rank: Annotated[int, Bounds(ge=0, lt=1024)]
    name: Name
    memory_bytes: Annotated[int, Bounds(ge=1, le=2**50)]
    compute_units: Annotated[int, Bounds(ge=1, le=2**20)]
    power_watts: Positive | None
    matmul_flops: Mapping[Precision, Positive]
    copy_bytes_per_s: Positive
    fabric: Name | None = field(default=None, metadata=ADDED)
    topology: Name | None = field(default=None, metadata=ADDED)
    topology_pattern: Name | None = field(default=None, metadata=ADDED)


@record
class ProbedLinks:
    """The links of each level; `pairs` are bytes/s from node to node, in the order of the hosts.

    `segment` joins the nodes of a segment, and `network` segments; without it `network` joins nodes.
    """

    scale_up: Link | None
    network: Link | None
    pairs: Pairs | None
    segment: Link | None = field(default=None, metadata=ADDED)


@record
class Findings:
    """The file that the probe's rank 0 writes."""

    schema_version: Literal[1]
    device: Literal["cpu", "cuda"]
    ranks: Annotated[tuple[ProbedRank, ...], Length(least=1, most=65_536)]
    links: ProbedLinks


def cluster_of(findings: Findings) -> Cluster:
    """The cluster that was probed; ranks are its slots, in the order of hosts and local ranks."""
    hosts = list(dict.fromkeys(rank.host for rank in findings.ranks))
    names = {rank.name: library_name(rank) or rank.name for rank in findings.ranks}
    best = {name: max(_rate(rank) for rank in findings.ranks if rank.name == name) for name in names}
    nodes = []
    in_order = sorted(findings.ranks, key=lambda rank: rank.local_rank)
    for host in hosts:
        ranks = [rank for rank in in_order if rank.host == host]
        slowdowns = tuple(max(1.0, best[rank.name] / _rate(rank)) for rank in ranks)
        is_unequal = any(slowdown > 1 + SLOWDOWN_TOLERANCE for slowdown in slowdowns)
        nodes.append(
            ClusterNode(
                name=host,
                devices=tuple(names[rank.name] for rank in ranks),
                slowdown=tuple(round(slowdown, 3) for slowdown in slowdowns) if is_unequal else None,
                fabric=_same([rank.fabric for rank in ranks]),
                topology=ranks[0].topology,
                topology_pattern=ranks[0].topology_pattern,
            )
        )
    devices = {
        names[name]: _values([rank for rank in findings.ranks if rank.name == name])
        for name in names
        if names[name] == name
    }
    return Cluster(
        nodes=tuple(nodes),
        links=_links(findings, nodes),
        devices=devices,
        source=_source(findings),
    )


def library_name(rank: ProbedRank) -> str | None:
    """The library's name of a rank's device, by the driver's name and its memory; None where it has none."""
    device = match_device(rank.name, memory_bytes=rank.memory_bytes)
    return None if device is None else device.name


def _rate(rank: ProbedRank) -> float:
    """FLOP/s by which devices are compared: in fp32, else in the fastest format."""
    return rank.matmul_flops.get("fp32") or max(rank.matmul_flops.values())


def _values(ranks: Sequence[ProbedRank]) -> DeviceValues:
    """The fastest measured figures of equal devices: those of a device that nothing slows down."""
    formats = dict.fromkeys(name for rank in ranks for name in rank.matmul_flops)
    return DeviceValues(
        peak_flops={name: max(rank.matmul_flops.get(name, 0.0) for rank in ranks) for name in formats},
        memory_bytes=min(rank.memory_bytes for rank in ranks),
        memory_bandwidth_bytes_per_s=max(rank.copy_bytes_per_s for rank in ranks),
        compute_units=min(rank.compute_units for rank in ranks),
    )


def _same(names: Sequence[str | None]) -> str | None:
    """The name that all have; None where they differ."""
    return names[0] if len(set(names)) == 1 else None


def domain_devices(nodes: Sequence[ClusterNode]) -> int | None:
    """The devices of a scale-up domain of several nodes: of the nodes of one fabric and clique.

    None where no clique has several nodes, and where cliques differ in size or lie apart in the order of
    nodes. Then the nodes' `fabric` alone says it (`cost.cluster`).
    """
    sizes = {len(node.devices) for node in nodes}
    cliques = [(name, len(list(alike))) for name, alike in groupby(node.fabric for node in nodes)]
    counts = {count for _, count in cliques}
    is_apart = len({name for name, _ in cliques}) < len(cliques)
    if None in {node.fabric for node in nodes} or is_apart or len(counts) > 1 or len(sizes) > 1:
        return None
    return counts.pop() * sizes.pop() if max(counts) > 1 else None


def _links(findings: Findings, nodes: Sequence[ClusterNode]) -> ClusterLinks:
    links, num_nodes = _with_slower_network(findings.links), len(nodes)
    # A single device has no link inside its node; its memory stands in, so that the file is complete.
    memory = Link(bandwidth_bytes_per_s=min(r.copy_bytes_per_s for r in findings.ranks), latency_s=0.0)
    matrix = None
    if links.pairs is not None and num_nodes > 2:
        matrix = LinkMatrix(bandwidth_bytes_per_s=_under_load(links.pairs, links, nodes))
    return ClusterLinks(
        scale_up=links.scale_up or memory,
        network=links.network,
        scale_up_devices=domain_devices(nodes),
        matrix=matrix,
        measured=True,
        segment=links.segment,
    )


def _with_slower_network(links: ProbedLinks) -> ProbedLinks:
    """The links with those between segments no faster than those inside: beyond that they differ by noise."""
    inside, between = links.segment, links.network
    if inside is None or between is None:
        return links
    network = Link(
        bandwidth_bytes_per_s=min(inside.bandwidth_bytes_per_s, between.bandwidth_bytes_per_s),
        latency_s=max(inside.latency_s, between.latency_s),
    )
    return replace(links, network=network)


def _under_load(pairs: Pairs, links: ProbedLinks, nodes: Sequence[ClusterNode]) -> Pairs:
    """The rates of pairs of nodes, none faster than its level of links is while all nodes use it.

    A pair was measured alone: it does not show that the links between segments have many users.
    """
    if links.segment is None or links.network is None:
        return pairs
    inside, between = links.segment.bandwidth_bytes_per_s, links.network.bandwidth_bytes_per_s
    return tuple(
        tuple(
            min(rate, inside if nodes[row].segment == nodes[column].segment else between)
            for column, rate in enumerate(rates)
        )
        for row, rates in enumerate(pairs)
    )


def _source(findings: Findings) -> str:
    backend = "nccl" if findings.device == "cuda" else "gloo"
    text = (
        f"quartet probe: {len(findings.ranks)} ranks, {backend}; peak_flops are the fastest products measured"
    )
    return text if findings.links.scale_up else f"{text}; links inside a node were not measured"
