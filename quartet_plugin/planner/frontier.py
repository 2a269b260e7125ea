"""Compares plans of one job: for several numbers of devices, and time against memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.memory import capacity_bytes_of
from quartet_plugin.errors import ConfigError, InfeasibleError
from quartet_plugin.model.plan import MAX_RANKS
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.ranking import Ranked, best_plans

MAX_POINTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesPoint:
    """The best plan for one number of devices; `reason` says why there is none where `best` is None.

    `efficiency` is its tokens/s a device over those of the smallest number that has a plan.
    """

    job: PlanRequest
    best: Ranked | None
    efficiency: float | None = None
    reason: str = ""


def with_devices(job: PlanRequest, num_devices: int) -> PlanRequest:
    """The same job on another number of its equal devices.

    Raises ConfigError for a cluster that is described in full, or a number that fills no whole nodes.
    """
    per_node = job.machines.devices_per_node
    if job.cluster is not None:
        raise ConfigError(
            f"--devices {num_devices}: the cluster is described node by node; name equal devices instead"
        )
    if num_devices > per_node and num_devices % per_node:
        lower = num_devices // per_node * per_node
        raise ConfigError(
            f"--devices {num_devices}: must fill nodes of {per_node} devices; nearest: {lower} or "
            f"{lower + per_node}"
        )
    if not 1 <= num_devices <= MAX_RANKS:
        raise ConfigError(f"--devices {num_devices}: must be from 1 to {MAX_RANKS}")
    machines = replace(job.machines, num_devices=num_devices, devices_per_node=min(per_node, num_devices))
    return replace(job, machines=machines)


def devices_frontier(
    job: PlanRequest, counts: Sequence[int], *, constants: Constants | None = None
) -> list[DevicesPoint]:
    """The best plan for each number of devices, in ascending order; the batch stays what it is."""
    jobs = [with_devices(job, count) for count in sorted(set(counts))]
    points: list[DevicesPoint] = []
    least: float | None = None
    for sized in jobs:
        try:
            best = best_plans(sized, constants=constants).best[0]
        except (ConfigError, InfeasibleError) as error:
            # A requested setting may have no value on some numbers of devices.
            points.append(DevicesPoint(job=sized, best=None, reason=str(error)))
            continue
        device_s = best.equal_work_s * sized.machines.num_devices
        least = device_s if least is None else least
        points.append(DevicesPoint(job=sized, best=best, efficiency=least / device_s))
    return points


def memory_frontier(job: PlanRequest, *, constants: Constants | None = None) -> list[Ranked]:
    """The plans that no other one beats in both time and peak memory, the fastest first.

    Each is the best under the limit that the peak of the one before sets, so there is none between two. At
    most `MAX_POINTS`. Beyond the first they have balanced splits: layers that move one by one would make
    many points of a layout. Raises InfeasibleError where no plan fits at all.
    """
    points = [best_plans(job, constants=constants).best[0]]
    while len(points) < MAX_POINTS:
        limited = _with_usable(job, points[-1].memory.total_bytes * (1 - 1e-9))
        try:
            best = best_plans(limited, constants=constants, moves_layers=False).best[0]
        except InfeasibleError:
            break
        points.append(best)
    # One that is as fast with less memory comes after it.
    after = [*(point.equal_work_s for point in points[1:]), float("inf")]
    return [point for point, next_s in zip(points, after, strict=True) if point.equal_work_s < next_s]


def _with_usable(job: PlanRequest, num_bytes: float) -> PlanRequest:
    """The job on devices whose usable memory is at most `num_bytes`."""
    return replace(job, machines=replace(job.machines, memory_bytes=int(capacity_bytes_of(num_bytes))))
