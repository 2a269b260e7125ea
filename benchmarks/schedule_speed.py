"""How long one generation, one simulation and one named schedule take, after compilation.

    python benchmarks/schedule_speed.py

Medians of repeated runs on one thread: CPU time, which other processes hardly change, and wall time.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from quartet_plugin.model.costs import StageCosts
from quartet_plugin.schedule.family import Family, generate, run
from quartet_plugin.schedule.named import NAMED, named
from quartet_plugin.schedule.placement import v_shape
from quartet_plugin.schedule.simulate import simulate


def median_ms(function: Callable[[], object], repeats: int) -> str:
    """Median CPU and wall time of a call in milliseconds; the first call is not counted."""
    function()
    cpu, wall = [], []
    for _ in range(repeats):
        begin, began = time.thread_time(), time.perf_counter()
        function()
        cpu.append(time.thread_time() - begin)
        wall.append(time.perf_counter() - began)
    return f"{1e3 * statistics.median(cpu):8.3f} ms CPU {1e3 * statistics.median(wall):8.3f} ms wall"


def costs_of(num_devices: int) -> StageCosts:
    """Two chunks a device in a V, unequal costs."""
    rng = np.random.default_rng(0)
    stages = 2 * num_devices
    input_grad, weight_grad = rng.uniform(0.8, 1.2, (2, stages))
    link = np.full(stages, 0.05)
    return StageCosts(
        device_of_stage=np.array(v_shape(num_devices), dtype=np.int64),
        forward_s=rng.uniform(0.8, 1.2, stages),
        input_grad_s=input_grad,
        weight_grad_s=weight_grad,
        backward_s=input_grad + weight_grad,
        activation_bytes=np.ones(stages),
        forward_transfer_s=np.append(link[:-1], 0.0),
        backward_transfer_s=np.concatenate(([0.0], link[1:])),
        held_fraction=1.0,
    )


def measure(family: Family, p: int, m: int, repeats: int) -> None:
    """Print three lines for one size."""
    costs = costs_of(p)
    limit = np.full(p, 2.0 * p)
    schedule = generate(family, costs, m, memory_limit_bytes=limit)

    def both() -> None:
        simulate(generate(family, costs, m, memory_limit_bytes=limit), costs)

    made = median_ms(lambda: run(family, costs, m, memory_limit_bytes=limit), repeats)
    simulated = median_ms(lambda: simulate(schedule, costs), repeats)
    print(f"p={p:<3} m={m:<4} one generation while simulating     {made}")
    print(f"p={p:<3} m={m:<4} one simulation of a fixed order     {simulated}")
    print(f"p={p:<3} m={m:<4} one generation and one simulation   {median_ms(both, repeats)}")


def main() -> None:
    """Print the table."""
    family = Family(
        stretch_forward=(1.5, 1.5),
        stretch_backward=(2.0, 2.0),
        shift_forward=(0.0, 0.0),
        shift_backward=(0.0, 0.5),
        slack=1.0,
    )
    for p, m, repeats in ((8, 32, 300), (64, 512, 15)):
        measure(family, p, m, repeats)
    for name in NAMED:
        taken = median_ms(partial(named, name, num_devices=64, num_microbatches=512), 5)
        print(f"named p=64 m=512 {name:15} {taken}")


if __name__ == "__main__":
    main()
