"""The simulator's error: makespans of rehearsed schedules beside the simulated ones.

    python benchmarks/rehearsal.py [--devices 8 16] [--action-ms 10 3] [--steps 5] [--only NAME ...]

Real processes over gloo, compute that sleeps, every action of a stage equally long; a boundary tensor takes
5 % of an action. The error is that of the median step; beside it the range over the steps.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from quartet_plugin.model.costs import Costs, LayerCost, stage_costs
from quartet_plugin.runtime.rehearsal.processes import Rehearsal
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.search import search
from quartet_plugin.schedule.simulate import simulate_costs

NAMES = ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "searched")
TRANSFER = 0.05
LIMITS = {10: 0.04, 3: 0.08}


def table(num_devices: int, *, num_layers: int, num_microbatches: int, action_s: float) -> Costs:
    """Equal layers on equal devices, every F, I and W of a layer `action_s` long."""
    layer = LayerCost(
        name="layer", forward_s=action_s, input_grad_s=action_s, weight_grad_s=action_s, activation_bytes=1.0
    )
    return Costs(
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        layers=tuple(replace(layer, name=f"layer.{n}") for n in range(num_layers)),
        device_slowdown=np.ones(num_devices),
        transfer_s=TRANSFER * action_s * (1 - np.eye(num_devices)),
        memory_limit_bytes=None,
        weight_grad_held_fraction=1.0,
        backward_fused_s=None,
    )


def cases(num_devices: int, *, action_s: float, only: list[str]) -> Iterator[tuple[str, Schedule, Costs]]:
    """The schedules, one layer a stage, with twice as many microbatches as devices."""
    microbatches = 2 * num_devices
    for name in only:
        chunks = 1 if name in ("1f1b", "zb-h1") else 2
        costs = table(
            num_devices, num_layers=chunks * num_devices, num_microbatches=microbatches, action_s=action_s
        )
        if name == "searched":
            result = search(costs, placement="v", chunks=2, split="even", evaluations=2000, seed=0)
            yield name, result.schedule, costs
            continue
        order = named(name, num_devices=num_devices, num_microbatches=microbatches, num_chunks=chunks)
        yield name, replace(order, layers_per_stage=(1,) * order.num_stages), costs


def main() -> None:
    """Rehearse every case and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--action-ms", type=float, nargs="+", default=[10.0, 3.0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=list(NAMES), choices=NAMES)
    options = parser.parse_args()
    print(f"{'p':>3} {'action':>7} {'schedule':<12} {'simulated':>10} {'rehearsed':>10} {'error':>7}  range")
    for action_ms in options.action_ms:
        errors = []
        for num_devices in options.devices:
            for name, schedule, costs in cases(num_devices, action_s=action_ms / 1e3, only=options.only):
                expected_s = simulate_costs(schedule, costs).makespan_s
                assert schedule.layers_per_stage is not None
                stages = stage_costs(
                    costs, placement=schedule.placement, layers_per_stage=schedule.layers_per_stage
                )
                with tempfile.TemporaryDirectory() as folder:
                    steps = Rehearsal(
                        schedule=schedule, costs=stages, folder=Path(folder), num_steps=options.steps
                    ).run()
                walls = [step.wall_s for step in steps]
                wall_s = statistics.median(walls)
                errors.append(wall_s / expected_s - 1)
                print(
                    f"{num_devices:>3} {action_ms:>5g}ms {name:<12} {expected_s:>9.3f}s {wall_s:>9.3f}s "
                    f"{errors[-1]:>7.1%}  {min(walls) / expected_s - 1:.1%} to "
                    f"{max(walls) / expected_s - 1:.1%}",
                    flush=True,
                )
        limit = LIMITS.get(round(action_ms))
        goal = "" if limit is None else f" (goal: {limit:.0%})"
        print(f"median error at {action_ms:g} ms: {statistics.median(map(abs, errors)):.1%}{goal}")


if __name__ == "__main__":
    main()
