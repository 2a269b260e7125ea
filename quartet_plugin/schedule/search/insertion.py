"""The compiled local search on fixed orders: move actions out of the blocks of a critical path.

A block is a run of one device's actions on a critical path. A pipeline with a fixed split is a job shop, and
this is its tabu search: of the moves in `moves` the one of lowest estimate is taken if it is not tabu.
"""

import numpy as np

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.compilation import compiled, inner
from quartet_plugin.schedule.kernel import Lanes
from quartet_plugin.schedule.search.job_shop import (
    ActionTable,
    JobShop,
    job_shop_of,
    reset_order,
    table_of,
    update_tails,
    write_codes,
)
from quartet_plugin.schedule.search.moves import REACH, best_move, farthest, try_shift

_TOLERANCE = 1e-9


@inner
def _last_critical(shop: JobShop, table: ActionTable, makespan: float, eps: float) -> int:
    """One of the actions that end last, picked at random."""
    chosen = -1
    ends = 0
    for d in range(len(shop.offsets) - 1):
        if shop.offsets[d + 1] > shop.offsets[d]:
            y = table.seq[shop.offsets[d + 1] - 1]
            if table.head[y] + shop.duration[y] >= makespan - eps:
                ends += 1
                if np.random.randint(0, ends) == 0:
                    chosen = y
    return chosen


@inner
def _critical_before(shop: JobShop, table: ActionTable, x: int, eps: float) -> int:
    """One of the actions that x had to wait for, picked at random; -1 if none."""
    row = 3 * shop.num_microbatches
    slot = x % 3
    stage = x // row
    begin = table.head[x] - eps
    k = table.position[x]
    options = (
        table.seq[k - 1] if k > shop.offsets[shop.device_of[k]] else -1,
        x - 1 if slot > 0 else (x - row if stage > 0 else -1),
        x + row if slot == 1 and stage < shop.num_stages - 1 else -1,
    )
    chosen = -1
    ties = 0
    for kind in range(3):
        y = options[kind]
        if y < 0:
            continue
        lag = 0.0
        if kind == 1 and slot == 0:
            lag = shop.send[0, stage - 1]
        elif kind == 2:
            lag = shop.send[1, stage + 1]
        if table.head[y] + shop.duration[y] + lag >= begin:
            ties += 1
            if np.random.randint(0, ties) == 0:
                chosen = y
    return chosen


@inner
def _critical_blocks(shop: JobShop, table: ActionTable, makespan: float, eps: float, blocks: IntArray) -> int:
    """Fill `blocks` [n, 2] with first and last positions of one critical path's blocks; their number."""
    x = _last_critical(shop, table, makespan, eps)
    count = 0
    last = table.position[x]
    first = last
    while True:
        x = _critical_before(shop, table, x, eps) if table.head[x] > eps else -1
        k = table.position[x] if x >= 0 else -1
        if k >= 0 and k == first - 1 and shop.device_of[k] == shop.device_of[first]:
            first = k
            continue
        if last > first:
            blocks[count, 0] = first
            blocks[count, 1] = last
            count += 1
        if k < 0:
            return count
        first = k
        last = k


@inner
def _kick(shop: JobShop, table: ActionTable, moves: int) -> None:
    """Make `moves` random shifts that are legal."""
    for _ in range(moves):
        i = np.random.randint(0, len(table.seq))
        d = shop.device_of[i]
        first = max(shop.offsets[d], i - REACH)
        last = min(shop.offsets[d + 1] - 1, i + REACH)
        j = farthest(shop, table, i, first, last, np.random.random() < 0.5)
        if j != i:
            try_shift(shop, table, i, j)


@compiled
def improve_orders(
    orders: IntArray,
    offsets: IntArray,
    lanes: Lanes,
    cap: FloatArray,
    iterations: int,
    target: float,
    seed: int,
    best_orders: IntArray,
) -> float:
    """Tabu search from `orders`; fill `best_orders` and return its makespan in seconds.

    `orders` is overwritten with the order the search ended at. Deterministic in `seed`. Stops at `target`.
    When nothing better turns up for long it goes back to the best order, kicked by a few random shifts.
    """
    np.random.seed(seed)
    total = len(orders)
    shop = job_shop_of(orders, offsets, lanes, cap)
    table = table_of(orders, shop)
    makespan = update_tails(shop, table)
    best = makespan
    best_seq = table.seq.copy()
    blocks = np.empty((total, 2), dtype=np.int64)
    tabu = np.zeros(len(shop.duration), dtype=np.int64)
    stall = 0
    kicks = 0
    patience = 300 + total // 4
    for step in range(1, iterations + 1):
        if best <= target:
            break
        eps = _TOLERANCE * makespan
        count = _critical_blocks(shop, table, makespan, eps, blocks)
        i, j = best_move(shop, table, blocks, count, tabu, step, best, eps)
        if i < 0:
            stall = patience
        else:
            x = table.seq[i]
            if not try_shift(shop, table, i, j):
                tabu[x] = step + 50
                continue
            tabu[x] = step + 6 + np.random.randint(0, 10)
            makespan = update_tails(shop, table)
            stall += 1
            if makespan < best * (1.0 - 1e-12):
                best = makespan
                for k in range(total):
                    best_seq[k] = table.seq[k]
                stall = 0
                kicks = 0
        if stall >= patience:
            stall = 0
            kicks += 1
            for k in range(len(tabu)):
                tabu[k] = 0
            reset_order(shop, table, best_seq)
            _kick(shop, table, min(2 + kicks, 12))
            makespan = update_tails(shop, table)
    write_codes(best_seq, shop, best_orders)
    write_codes(table.seq, shop, orders)
    return best
