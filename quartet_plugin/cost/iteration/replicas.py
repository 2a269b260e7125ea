"""An order of slots cut into the replicas of a layout: those that differ in time, and their groups' links.

Many layouts are predicted on a few orders of slots, so what depends on the order alone is made once.
"""

import functools
from dataclasses import dataclass

import numpy as np

from quartet_plugin.mapping.topology import (
    GroupLink,
    Topology,
    blocks_in_order,
    degrees_alone,
    group_link,
    slowdowns_of_blocks,
)
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One replica, an entry a pipeline rank: slowdown, links of its context and expert groups, domain.

    Members of the groups are blocks.
    """

    slowdowns: tuple[float, ...]
    context: tuple[GroupLink, ...]
    expert: tuple[GroupLink, ...]
    domains: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrangedSlots:
    """A layout's ranks on their slots; of replicas that take equal times there is one.

    `slowdowns` [pp] are those of each pipeline rank's slowest replica, `slowest` is that of the slowest slot.
    `gradients` are the links of the pipeline ranks' data-parallel groups.
    """

    replicas: tuple[Replica, ...]
    slowdowns: FloatArray
    slowest: float
    gradients: tuple[GroupLink, ...]


def arranged_slots(topology: Topology, slots: tuple[int, ...], layout: Layout) -> ArrangedSlots:
    """The replicas of `layout` when slot `slots[r]` plays RANK r; layouts of equal degrees share them.

    `layout` counts expert parallelism in blocks (`degrees_alone`).
    """
    return _arranged(topology, slots, degrees_alone(layout))


@functools.lru_cache(maxsize=256)
def _arranged(topology: Topology, slots: tuple[int, ...], layout: Layout) -> ArrangedSlots:
    blocks = blocks_in_order(topology, slots, size=layout.tensor_parallel)
    arrangement = np.arange(len(blocks), dtype=np.int64).reshape(layout.pipeline_parallel, -1)
    domains: IntArray = blocks.domain[arrangement]
    slowdowns = slowdowns_of_blocks(layout, blocks, arrangement)
    links = _Links(topology)
    context = links.of_groups(domains, layout.context_parallel)
    expert = links.of_groups(domains, layout.expert_parallel)
    has_equal_links = topology.has_equal_links
    speeds = np.unique(slowdowns, return_inverse=True)[1].reshape(domains.shape)
    places = first_alike(domains) if has_equal_links else domains
    keys = np.ascontiguousarray(np.concatenate([speeds, context, expert, places]).T)
    first: dict[bytes, int] = {}
    for column, key in enumerate(keys):
        first.setdefault(key.tobytes(), column)
    return ArrangedSlots(
        replicas=tuple(
            Replica(
                slowdowns=tuple(slowdowns[:, column].tolist()),
                context=tuple(links.each[number] for number in context[:, column].tolist()),
                expert=tuple(links.each[number] for number in expert[:, column].tolist()),
                domains=tuple(domains[:, column].tolist()),
            )
            for column in first.values()
        ),
        slowdowns=slowdowns.max(axis=1),
        slowest=float(blocks.slowdown.max()),
        gradients=tuple(links.each[links.number(row)] for row in domains),
    )


class _Links:
    """The links of groups on one topology; equal ones have one number in `each`."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._by_domains: dict[bytes, int] = {}
        self._numbers: dict[GroupLink, int] = {}
        self.each: list[GroupLink] = []

    def number(self, domains: IntArray) -> int:
        """The number of the link of a group whose members are in `domains`."""
        key = domains.tobytes()
        if key not in self._by_domains:
            link = group_link(self._topology, domains.tolist())
            number = self._by_domains[key] = self._numbers.setdefault(link, len(self.each))
            if number == len(self.each):
                self.each.append(link)
        return self._by_domains[key]

    def of_groups(self, domains: IntArray, size: int) -> IntArray:
        """The number of each rank's link to the `size` neighbours of its group [pp, copies]."""
        if size == 1:
            return np.full(domains.shape, self.number(domains[0, :1]), dtype=np.int64)
        groups = np.ascontiguousarray(domains).reshape(-1, size)
        numbers = np.array([self.number(group) for group in groups], dtype=np.int64)
        return np.repeat(numbers, size).reshape(domains.shape)


def first_alike(domains: IntArray) -> IntArray:
    """The first pipeline rank of the same column in the same domain [pp, copies]."""
    first: IntArray = (domains[:, None, :] == domains[None, :, :]).argmax(axis=1)
    return first
