"""The closed form of a step where all links between domains are equal, in one loop over blocks."""

import numpy as np

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.compilation import compiled


@compiled
def step_seconds(
    domains: IntArray,
    slowdowns: FloatArray,
    compute_s: FloatArray,
    tensor_s: FloatArray,
    sizes: IntArray,
    volumes_bytes: FloatArray,
    num_rounds: FloatArray,
    forbidden_s: FloatArray,
    links: FloatArray,
    transfers_s: FloatArray,
    exchange_rows: IntArray,
    exchanges_s: FloatArray,
    unknown: IntArray,
    num_microbatches: int,
    num_chunks: int,
    is_blocking: bool,
    hidden_s: FloatArray,
    exposed_share: float,
) -> float:
    """Seconds a step of blocks in `domains` [pp, copies] with `slowdowns` [pp, copies].

    Collectives 0 to 2 are those of context and expert groups and of gradients: `sizes` [3] are their ranks,
    `volumes_bytes` and `num_rounds` [3, pp] their coefficients; where `forbidden_s` [3] is not 0 a group that
    leaves its domain takes these seconds. `links` are the bandwidth and the latency inside a domain and
    between two; `transfers_s` those of a boundary tensor inside and between.

    `exchange_rows` [2, num_domains + 1, largest size + 1] tells by a group's domains, and its members in the
    domain that has the fewest, the row of `exchanges_s` [num_rows, pp]: below -1 the group has rings. Where a
    row is not known (-1), its index is in `unknown` [3], and the result is below 0.
    """
    # Element by element: to compile an operation on arrays takes numba seconds.
    pp, copies = domains.shape
    counts = np.zeros(domains.max() + 1, dtype=np.int64)
    busy = np.zeros((pp, copies))
    for rank in range(pp):
        for column in range(copies):
            busy[rank, column] = slowdowns[rank, column] * compute_s[rank] + tensor_s[rank]
    for kind in range(2):
        size = sizes[kind]
        if size == 1:
            continue
        for rank in range(pp):
            for first in range(0, copies, size):
                num_domains, fewest = _spread(domains, rank, first, size, counts)
                row = exchange_rows[kind, num_domains, fewest]
                if num_domains > 1 and forbidden_s[kind] > 0.0:
                    seconds = forbidden_s[kind]
                elif row >= 0:
                    seconds = exchanges_s[row, rank]
                elif row == -1:
                    unknown[0], unknown[1], unknown[2] = kind, num_domains, fewest
                    return -1.0
                else:
                    volume, rounds = volumes_bytes[kind, rank], num_rounds[kind, rank]
                    seconds = _ring_s(size, num_domains, fewest, volume, rounds, links)
                for column in range(first, first + size):
                    busy[rank, column] += seconds
    longest_step = 0.0
    for column in range(copies):
        filling = 0.0
        for rank in range(pp - 1):
            sent = transfers_s[0] if domains[rank, column] == domains[rank + 1, column] else transfers_s[1]
            if is_blocking:
                busy[rank, column] += sent
            else:
                filling += sent + sent
        if is_blocking:
            for rank in range(1, pp):
                is_inside = domains[rank, column] == domains[rank - 1, column]
                busy[rank, column] += transfers_s[0] if is_inside else transfers_s[1]
        if num_chunks > 1 and pp > 1:
            wrap = transfers_s[0] if domains[pp - 1, column] == domains[0, column] else transfers_s[1]
            filling = filling + (wrap + wrap) * (num_chunks - 1)
        longest, total = busy[0, column], 0.0
        for rank in range(pp):
            longest = max(longest, busy[rank, column])
            total += busy[rank, column]
        longest_step = max(
            longest_step, num_microbatches * longest + ((total - longest) / num_chunks + filling)
        )
    worst = 0.0
    for rank in range(pp):
        traffic = 0.0
        if sizes[2] > 1:
            num_domains, fewest = _spread(domains, rank, 0, copies, counts)
            traffic = _ring_s(copies, num_domains, fewest, volumes_bytes[2, rank], num_rounds[2, rank], links)
        worst = max(worst, traffic * exposed_share, traffic - hidden_s[rank])
    return longest_step + worst


@compiled
def _spread(domains: IntArray, rank: int, first: int, size: int, counts: IntArray) -> tuple[int, int]:
    """The domains of a group, the columns from `first` on, and its members in the one that has the fewest.

    `counts` is all 0 before and after.
    """
    num_domains = 0
    for column in range(first, first + size):
        domain = domains[rank, column]
        if counts[domain] == 0:
            num_domains += 1
        counts[domain] += 1
    fewest = size
    for column in range(first, first + size):
        fewest = min(fewest, counts[domains[rank, column]])
    for column in range(first, first + size):
        counts[domains[rank, column]] = 0
    return num_domains, fewest


@compiled
def _ring_s(
    size: int, num_domains: int, fewest: int, volume_bytes: float, num_rounds: float, links: FloatArray
) -> float:
    """Seconds of a collective of a group that `_spread` describes."""
    bandwidth = links[0]
    if num_domains > 1:
        between = links[2] * fewest
        bandwidth = min(between, links[0]) if fewest > 1 else between
    latency = links[3] * (num_domains - 1) + links[1] * (size - num_domains)
    return float(volume_bytes / bandwidth + num_rounds * latency)
