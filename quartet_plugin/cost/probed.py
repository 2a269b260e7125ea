"""What `quartet probe` found, as a cluster: names the library knows, measured figures for all others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from quartet_plugin.cost.devices import DeviceSpec, library
from quartet_plugin.model.cluster import (
    Cluster,
    ClusterLinks,
    ClusterNode,
    DeviceValues,
    Link,
    LinkMatrix,
    Precision,
)
from quartet_plugin.model.schema import Bounds, Length, read_record, record

# How far a device's memory may be from the data sheet's, of which a driver keeps some.
MEMORY_TOLERANCE = 0.12
# Slower than the fastest of its name by more than this is a slowdown, not noise.
SLOWDOWN_TOLERANCE = 0.15

Positive = Annotated[float, Bounds(gt=0, lt=1e20)]
Name = Annotated[str, Length(least=1, most=200)]


@record
class ProbedRank:
    """One rank's device: what it is, the fastest product by format, and bytes read and written in a copy."""

    host: Name
    local_rank: Annotated[int, Bounds(ge=0, lt=1024)]
    name: Name
    memory_bytes: Annotated[int, Bounds(ge=1, le=2**50)]
    compute_units: Annotated[int, Bounds(ge=1, le=2**20)]
    power_watts: Positive | None
    matmul_flops: Mapping[Precision, Positive]
    copy_bytes_per_s: Positive


@record
class ProbedLinks:
    """Each level's figures; `pairs` are bytes/s from node to node, in the order of the hosts."""

    scale_up: Link | None
    network: Link | None
    pairs: tuple[tuple[Annotated[float, Bounds(ge=0, lt=1e20)], ...], ...] | None


@record
class Findings:
    """The file that the probe's rank 0 writes."""

    schema_version: Literal[1]
    device: Literal["cpu", "cuda"]
    ranks: Annotated[tuple[ProbedRank, ...], Length(least=1, most=65_536)]
    links: ProbedLinks


def read_findings(path: Path) -> Findings:
    """The probe's file. Raises ConfigError in one line."""
    return read_record(Findings, path)


def cluster_of(findings: Findings) -> Cluster:
    """The cluster that was probed; ranks are its slots, in the order of hosts and local ranks."""
    hosts = list(dict.fromkeys(rank.host for rank in findings.ranks))
    names = {rank.name: library_name(rank) or rank.name for rank in findings.ranks}
    best = {name: max(_rate(rank) for rank in findings.ranks if rank.name == name) for name in names}
    nodes = []
    for host in hosts:
        own = sorted((rank for rank in findings.ranks if rank.host == host), key=lambda rank: rank.local_rank)
        slow = [best[rank.name] / _rate(rank) for rank in own]
        is_unequal = any(factor > 1 + SLOWDOWN_TOLERANCE for factor in slow)
        nodes.append(
            ClusterNode(
                name=host,
                devices=tuple(names[rank.name] for rank in own),
                slowdown=tuple(round(max(1.0, factor), 3) for factor in slow) if is_unequal else None,
            )
        )
    devices = {
        names[name]: _values([rank for rank in findings.ranks if rank.name == name])
        for name in names
        if names[name] == name
    }
    return Cluster(
        nodes=tuple(nodes),
        links=_links(findings, num_nodes=len(nodes)),
        devices=devices,
        source=_source(findings),
    )


def library_name(rank: ProbedRank) -> str | None:
    """The library's name of a device that a driver calls otherwise: same model, same memory, same form.

    None where no entry is meant for certain.
    """
    words = rank.name.upper().replace("-", " ").split()
    fits = [
        device
        for device in dict.fromkeys(library()[name].name for name in library())
        if _is_meant(library()[device.lower()], words, rank.memory_bytes)
    ]
    return fits[0] if len(fits) == 1 else None


def _is_meant(device: DeviceSpec, words: Sequence[str], memory_bytes: int) -> bool:
    model, *rest = device.name.upper().split("-")
    is_card = "PCIE" in words or "NVL" in words
    if model not in words or (is_card and "PCIE" not in rest):
        return False
    return abs(memory_bytes / device.memory_bytes - 1) <= MEMORY_TOLERANCE


def _rate(rank: ProbedRank) -> float:
    """Of the widest format all devices have."""
    return rank.matmul_flops.get("fp32") or max(rank.matmul_flops.values())


def _values(ranks: Sequence[ProbedRank]) -> DeviceValues:
    """The fastest measured figures: what such a device does when nothing slows it down."""
    formats = dict.fromkeys(name for rank in ranks for name in rank.matmul_flops)
    return DeviceValues(
        peak_flops={name: max(rank.matmul_flops.get(name, 0.0) for rank in ranks) for name in formats},
        memory_bytes=min(rank.memory_bytes for rank in ranks),
        memory_bandwidth_bytes_per_s=max(rank.copy_bytes_per_s for rank in ranks),
        compute_units=min(rank.compute_units for rank in ranks),
    )


def _links(findings: Findings, *, num_nodes: int) -> ClusterLinks:
    found = findings.links
    # A lone device has no link inside its node; its own memory stands in, so that the file is whole.
    own = Link(bandwidth_bytes_per_s=min(r.copy_bytes_per_s for r in findings.ranks), latency_s=0.0)
    matrix = None
    if found.pairs is not None and num_nodes > 2:
        matrix = LinkMatrix(bandwidth_bytes_per_s=found.pairs)
    return ClusterLinks(scale_up=found.scale_up or own, network=found.network, matrix=matrix, measured=True)


def _source(findings: Findings) -> str:
    backend = "nccl" if findings.device == "cuda" else "gloo"
    text = (
        f"quartet probe: {len(findings.ranks)} ranks, {backend}; peak_flops are the fastest products measured"
    )
    return text if findings.links.scale_up else f"{text}; links inside a node were not measured"
