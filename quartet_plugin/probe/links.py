"""Bandwidth and latency of each level of links, with all devices of a node using them together.

A bandwidth is bytes that crossed one device's link over time in an all-reduce of ring shape, a latency that
of one small message. Between nodes every pair is measured where there are few.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import combinations, zip_longest
from typing import Any

import torch
import torch.distributed as dist

_BYTES = {"cpu": 8 * 2**20, "cuda": 128 * 2**20}
_REPEATS = 5
_PINGS = 50
MAX_MATRIX_NODES = 16

# The ranks of a node.
type Node = list[int]


def measure_links(
    device: torch.device, *, hosts: Sequence[str], segments: Sequence[str | None]
) -> dict[str, Any]:
    """Links inside the nodes, between them, and the table of node pairs; None for what is not there.

    `hosts` and `segments` name the node of each rank and its segment. Where there are several segments, the
    links inside them are a level of their own, and those between nodes are links between segments. Every
    rank calls this together.
    """
    nodes = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    inside = _level(device, nodes) if max(len(node) for node in nodes) > 1 else None
    levels = {"scale_up": inside}
    by_segment = _by_segment(nodes, segments)
    if by_segment:
        levels["segment"] = _level(device, _rings(by_segment))
        levels["network"] = _level(device, _rings(_across(by_segment)))
    else:
        levels["network"] = _level(device, _rings([nodes])) if len(nodes) > 1 else None
    return {**levels, "pairs": _pairs(device, nodes)}


def _by_segment(nodes: Sequence[Node], segments: Sequence[str | None]) -> list[list[Node]]:
    """The nodes of each segment; none where a node has no segment, or no segment of several has another."""
    names = [segments[node[0]] for node in nodes]
    grouped = [
        [node for node, other in zip(nodes, names, strict=True) if other == name]
        for name in dict.fromkeys(names)
    ]
    return grouped if None not in names and 1 < len(grouped) < len(nodes) else []


def _across(by_segment: Sequence[Sequence[Node]]) -> list[list[Node]]:
    """Groups of nodes with one of each segment, so that all links between segments are used at once.

    Segments of fewer nodes are in fewer of them.
    """
    columns = zip_longest(*by_segment)
    return [[node for node in column if node is not None] for column in columns]


def _rings(groups: Sequence[Sequence[Node]]) -> list[list[int]]:
    """The ranks of equal place in the nodes of each group, so that all ports of a node are used at once."""
    return [
        [node[index] for node in nodes]
        for nodes in groups
        if len(nodes) > 1
        for index in range(min(len(node) for node in nodes))
    ]


def _level(device: torch.device, groups: Sequence[Sequence[int]]) -> dict[str, float]:
    """All groups at once; the slowest rank's figures. A rank in no group of several measures nothing."""
    group, members = None, [dist.get_rank()]
    for ranks in groups:
        new_group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            group, members = new_group, list(ranks)
    speed, latency = math.inf, 0.0
    if group is not None and len(members) > 1:
        tensor = torch.ones(_BYTES[device.type] // 4, device=device)
        seconds = _median(lambda: dist.all_reduce(tensor, group=group), device, group=group)
        # What a ring sends over one rank's link: twice all but its own share.
        speed = 2 * (len(members) - 1) / len(members) * _BYTES[device.type] / seconds
        latency = _ping_s(device, members)
    dist.barrier()
    figures = _gathered([speed, latency], device)
    return {"bandwidth_bytes_per_s": float(figures[:, 0].min()), "latency_s": float(figures[:, 1].max())}


def _pairs(device: torch.device, nodes: Sequence[Sequence[int]]) -> list[list[float]] | None:
    """Bytes/s from node to node, all ranks of both at once; None for a single node or many."""
    if not 2 <= len(nodes) <= MAX_MATRIX_NODES:
        return None
    table = [[0.0] * len(nodes) for _ in nodes]
    for a, b in combinations(range(len(nodes)), 2):
        for sender, receiver in ((a, b), (b, a)):
            seconds = _one_way_s(device, nodes[sender], nodes[receiver])
            table[sender][receiver] = _BYTES[device.type] / seconds
    return table


def _one_way_s(device: torch.device, senders: Sequence[int], receivers: Sequence[int]) -> float:
    rank = dist.get_rank()
    pair = next((pair for pair in zip(senders, receivers, strict=False) if rank in pair), None)
    seconds = 0.0
    if pair is not None:
        tensor = torch.ones(_BYTES[device.type] // 4, device=device)
        send, receive = (lambda: dist.send(tensor, pair[1])), (lambda: dist.recv(tensor, pair[0]))
        seconds = _median(send if rank == pair[0] else receive, device, group=None)
    dist.barrier()
    return float(_gathered([seconds], device).max())


def _ping_s(device: torch.device, members: Sequence[int]) -> float:
    """Half of a round trip of 4 bytes between neighbours of a group; a rank without one measures nothing."""
    index = members.index(dist.get_rank())
    partner = index ^ 1
    if partner >= len(members):
        return 0.0
    peer, tensor = members[partner], torch.zeros(1, device=device)
    times = []
    for _ in range(_PINGS):
        begin = time.perf_counter()
        if index < partner:
            dist.send(tensor, peer)
            dist.recv(tensor, peer)
        else:
            dist.recv(tensor, peer)
            dist.send(tensor, peer)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / 2)
    return statistics.median(times)


def _median(action: Callable[[], Any], device: torch.device, *, group: Any) -> float:
    times = []
    for repeat in range(_REPEATS + 1):
        if group is not None:
            dist.barrier(group=group)
        begin = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repeat:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _gathered(values: Sequence[float], device: torch.device) -> torch.Tensor:
    tensor = torch.tensor(
        values, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device
    )
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.stack(gathered)
