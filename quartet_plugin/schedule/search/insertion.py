"""The compiled local search on fixed orders: move actions out of the blocks of a critical path.

A pipeline with a fixed split is a job shop, and this is its tabu search: of the moves in `moves` the one of
lowest estimate is taken if it is not tabu.
"""

import numpy as np

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.kernel import compiled
from quartet_plugin.schedule.search.critical import critical_blocks
from quartet_plugin.schedule.search.moves import REACH, best_move, farthest, try_shift
from quartet_plugin.schedule.search.shop import (
    ActionTable,
    JobShop,
    empty_table,
    finish_times,
    job_shop_of,
    settle_all,
    time_orders,
    write_codes,
)

_TOLERANCE = 1e-9


@compiled
def _kick(shop: JobShop, now: ActionTable, moves: int) -> None:
    """A few random legal shifts."""
    for _ in range(moves):
        i = np.random.randint(0, len(now.seq))
        d = shop.device_at[i]
        first = max(shop.offsets[d], i - REACH)
        last = min(shop.offsets[d + 1] - 1, i + REACH)
        j = farthest(shop, now, i, first, last, np.random.random() < 0.5)
        if j != i:
            try_shift(shop, now, i, j)


@compiled
def improve_orders(
    orders: IntArray,
    offsets: IntArray,
    num_stages: int,
    m: int,
    placement: IntArray,
    cost: FloatArray,
    send: FloatArray,
    sizes: FloatArray,
    held: float,
    cap: FloatArray,
    iterations: int,
    target: float,
    seed: int,
    best_orders: IntArray,
) -> float:
    """Tabu search from `orders`; fill `best_orders` and return its makespan.

    `orders` is overwritten with the order the search ended at. Deterministic in `seed`. Stops at `target`.
    When nothing better turns up for long it goes back to the best order, kicked by a few random shifts.
    """
    np.random.seed(seed)
    total = len(orders)
    shop = job_shop_of(orders, offsets, num_stages, m, placement, cost, send, sizes, held, cap)
    now = empty_table(orders, num_stages * m * 3)
    settle_all(shop, now)
    time_orders(shop, now)
    makespan = finish_times(shop, now)
    best = makespan
    best_seq = now.seq.copy()
    blocks = np.empty((total, 2), dtype=np.int64)
    tabu = np.zeros(num_stages * m * 3, dtype=np.int64)
    stall = 0
    kicks = 0
    patience = 300 + total // 4
    for step in range(1, iterations + 1):
        if best <= target:
            break
        eps = _TOLERANCE * makespan
        count = critical_blocks(shop, now, makespan, eps, blocks)
        i, j = best_move(shop, now, blocks, count, tabu, step, best, eps)
        if i < 0:
            stall = patience
        else:
            x = now.seq[i]
            if not try_shift(shop, now, i, j):
                tabu[x] = step + 50
                continue
            tabu[x] = step + 6 + np.random.randint(0, 10)
            makespan = finish_times(shop, now)
            stall += 1
            if makespan < best * (1.0 - 1e-12):
                best = makespan
                best_seq[:] = now.seq
                stall = 0
                kicks = 0
        if stall >= patience:
            stall = 0
            kicks += 1
            tabu[:] = 0
            now.seq[:] = best_seq
            settle_all(shop, now)
            time_orders(shop, now)
            _kick(shop, now, min(2 + kicks, 12))
            makespan = finish_times(shop, now)
    write_codes(best_seq, shop.whole, best_orders)
    write_codes(now.seq, shop.whole, orders)
    return best
