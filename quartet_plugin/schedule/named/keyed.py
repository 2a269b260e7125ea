"""Named schedules that are rules of priority: list scheduling by keys at unit costs F = I = W = 1.

Hanayo and Chimera are sorted by the slots of their conflict-free units.
"""

import math
from collections.abc import Sequence

import numpy as np

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule import placement as places
from quartet_plugin.schedule.action import ActionKind


def list_schedule(
    routes: Sequence[Sequence[int]],
    *,
    num_microbatches: int,
    keys: tuple[FloatArray, FloatArray],
    cap: float,
    slack: float,
) -> list[IntArray]:
    """Orders by the keys of F and I at unit costs, both [num_stages] and alike on all routes.

    `cap` is in stages held; the first microbatches take the first route, as many the next one.
    """
    # Compiled: who needs the names of schedules alone does not wait for numba.
    from quartet_plugin.schedule.generator import Keys, generate_orders
    from quartet_plugin.schedule.kernel import Lanes

    num_stages, num_routes = len(routes[0]), len(routes)
    num_lanes = num_stages * num_routes
    forward, backward = (np.tile(key, num_routes) for key in keys)
    count = num_microbatches // num_routes
    lane_device = np.concatenate([np.asarray(r, dtype=np.int64) for r in routes])
    per_device = np.bincount(lane_device) * count * 2
    offsets = np.concatenate(([0], np.cumsum(per_device)))
    orders = np.empty(int(offsets[-1]), dtype=np.int64)
    lanes = Lanes(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        device=lane_device,
        cost_s=np.repeat([[1.0], [1.0], [1.0], [2.0]], num_lanes, axis=1),
        send_s=np.zeros((2, num_lanes)),
        num_bytes=np.ones(num_lanes),
        held_fraction=1.0,
        route=np.repeat(np.arange(num_routes), count),
        exchange_s=np.zeros((2, num_lanes)),
    )
    makespan = generate_orders(
        lanes,
        Keys(forward, backward, np.arange(num_microbatches, dtype=np.float64)),
        np.ones(num_lanes, dtype=np.int64),
        np.array([math.inf, 1.0, slack, math.inf, math.inf, 0.0, 0.0]),
        np.full(len(per_device), float(cap)),
        orders,
        offsets,
    )
    assert math.isfinite(makespan)
    return np.split(orders, offsets[1:-1])


def mix_pipe(p: int, m: int) -> list[IntArray]:
    """Bidirectional, more microbatches in flight than Chimera's units (after MixPipe, Zhang et al. 2023)."""
    stage = np.arange(p, dtype=np.float64)
    keys = stage / 6.0, (p + 2.0 * (p - stage)) / 6.0
    return list_schedule(two_routes(p), num_microbatches=m, keys=keys, cap=1.5 * p, slack=2.0)


def two_routes(p: int) -> tuple[places.Placement, places.Placement]:
    """One copy of the model down the devices, the other up."""
    return places.linear(p), places.linear(p)[::-1]


def hanayo(p: int, m: int, v: int) -> list[IntArray]:
    """Hanayo (Liu et al. 2023): v/2 waves; memory p. A unit has bubble 4 (p-1)/v if B = 2F.

    In slots of F = B = 1 stage s runs microbatch i of a unit of p at s + 2i and back at 2S - 1 - s + 2i.
    Units one after another leave p - 1 more between them where B = 2F, so more than p microbatches are a
    steady wave: list scheduling at B = 2F with p microbatches' memory. Its bubble with one wave is that of
    one unit, exactly; with more waves it is a little above.
    """
    num_stages = p * v
    if m <= p:
        i = np.arange(m)
        return _by_slots((places.snake(p, v),), (i,), 2 * i, p, m)
    stage = np.arange(num_stages)
    keys = 1.5 * stage / (3 * v), (1.5 * num_stages + 5.0 * (num_stages - 1 - stage)) / (3 * v)
    return list_schedule((places.snake(p, v),), num_microbatches=m, keys=keys, cap=num_stages, slack=math.inf)


def chimera(p: int, m: int) -> list[IntArray]:
    """Chimera (Li and Hoefler 2021): units of p microbatches, half of them each way; p and m even.

    Bubble (p-2)(F+B)/2 if F = B, memory p/2 + 1 to p stages of the two copies.
    """
    half = np.arange(m // 2)
    base = half // (p // 2) * 2 * p + half % (p // 2) * 2
    return _by_slots(two_routes(p), (half, half + m // 2), base, p, m)


def _by_slots(
    routes: Sequence[Sequence[int]], microbatches: Sequence[IntArray], base: IntArray, p: int, m: int
) -> list[IntArray]:
    """Sort each device's actions by slot: F at base + s, B at base + 2S - 1 - s."""
    num_stages = len(routes[0])
    codes: list[list[IntArray]] = [[] for _ in range(p)]
    slots: list[list[IntArray]] = [[] for _ in range(p)]
    for route, of_route in zip(routes, microbatches, strict=True):
        for stage, device in enumerate(route):
            unit = (stage * m + of_route) * 4
            codes[device] += [unit + ActionKind.F, unit + ActionKind.B]
            slots[device] += [base + stage, base + 2 * num_stages - 1 - stage]
    orders = []
    for device in range(p):
        order = np.argsort(np.concatenate(slots[device]), kind="stable")
        orders.append(np.concatenate(codes[device])[order])
    return orders
