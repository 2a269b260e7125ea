"""The collectives of a closed form's step: rings by coefficients, all-to-alls by the iteration model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.mapping.topology import GroupLink, Topology, group_link
from quartet_plugin.model.costs import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collective:
    """Collectives of each pipeline rank [pp]: bytes through a rank's link, and passes around the ring."""

    volume_bytes: FloatArray
    rounds: FloatArray

    def seconds(self, link: GroupLink, rank: int) -> float:
        """Seconds of rank `rank`'s collectives on `link`."""
        if link.size == 1:
            return 0.0
        moved = float(self.volume_bytes[rank]) / link.bytes_per_s
        return moved + float(self.rounds[rank]) * link.ring_latency_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchanges:
    """All-to-alls of each pipeline rank, as the iteration model has them on a link.

    `seconds_over` gives the seconds of a microbatch on each pipeline rank [pp]; it remembers them.
    """

    seconds_over: Callable[[GroupLink], FloatArray]

    def seconds(self, link: GroupLink, rank: int) -> float:
        """Seconds of rank `rank`'s exchanges on `link`."""
        return 0.0 if link.size == 1 else float(self.seconds_over(link)[rank])


def no_collective(num_ranks: int) -> Collective:
    """The collective of groups of one rank: no bytes and no rounds."""
    return Collective(volume_bytes=np.zeros(num_ranks), rounds=np.zeros(num_ranks))


class ExchangeTable:
    """Seconds of context and expert groups' exchanges where all links between domains are equal.

    A group's link then depends on its domains and on its members in the domain that has the fewest alone.
    `rows` [2, num_domains + 1, largest size + 1] are numbers of rows of `seconds` [num_rows, pp], -1 for what
    no arrangement has needed so far, and -2 for groups that have rings. `unknown` [3] is an index into `rows`
    for which the compiled step needs a row.
    """

    def __init__(
        self,
        groups: Sequence[Collective | Exchanges],
        sizes: Sequence[int],
        topology: Topology,
        *,
        num_ranks: int,
    ) -> None:
        self._groups, self._sizes, self._topology = groups, sizes, topology
        num_domains = len(topology.between_bytes_per_s)
        self.rows: IntArray = np.full((len(groups), num_domains + 1, max(sizes) + 1), -1, dtype=np.int64)
        for kind, group in enumerate(groups):
            if not isinstance(group, Exchanges):
                self.rows[kind] = -2
        self.seconds: FloatArray = np.zeros((0, num_ranks))
        self.unknown: IntArray = np.zeros(3, dtype=np.int64)

    def add_unknown(self) -> None:
        """Add the row of the groups that the compiled step asked for."""
        kind, num_domains, fewest = self.unknown.tolist()
        group, size = self._groups[kind], self._sizes[kind]
        others = np.repeat(np.arange(num_domains - 1), fewest)
        domains = np.append(others, np.full(size - len(others), num_domains - 1))
        link = group_link(self._topology, domains.tolist())
        row = [group.seconds(link, rank) for rank in range(self.seconds.shape[1])]
        self.rows[kind, num_domains, fewest] = len(self.seconds)
        self.seconds = np.vstack([self.seconds, row])
