"""One parameterized family of schedules; every single-copy named schedule is a point of it.

key(F s,i) = progress(i) + offF(s), key(I s,i) = progress(i) + offI(s), key(W s,i) = key(I s,i) + w_gap.
Offsets are the cumulated unloaded latencies of the cost table in units of the busiest device's time a
microbatch, stretched and shifted chunk by chunk. With group g, g microbatches pass a chunk before the next
chunk: progress(i) = g (i div g) + (i mod g) / v.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np

from quartet_plugin.errors import InfeasibleError, PlanError
from quartet_plugin.model.costs import FloatArray, IntArray, StageCosts
from quartet_plugin.schedule.generator import generate_orders
from quartet_plugin.schedule.keys import NUM_SCALARS, fill_keys
from quartet_plugin.schedule.placement import chunk_of_stage
from quartet_plugin.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A point of the family.

    Per chunk: `stretch_forward`, `stretch_backward` multiply latencies, `shift_forward`, `shift_backward`
    are added, in microbatches. `slack` (microbatches): how much larger than the smallest open key a key may
    be; 0 is a static order, inf greedy. `memory_cap`: in one microbatch's activation bytes of each device;
    inf for none beyond the cost table's own limit. `w_limit`: more pending W are forced. `w_fill`: a W
    fills an idle gap of at least this part of its time. `patience`: wait for a smaller key that arrives
    within this part of the other action's time. `whole[s]`: one backward action on stage s.
    """

    stretch_forward: tuple[float, ...]
    stretch_backward: tuple[float, ...]
    shift_forward: tuple[float, ...]
    shift_backward: tuple[float, ...]
    w_gap: float = math.inf
    group: int = 1
    slack: float = math.inf
    memory_cap: float = math.inf
    w_limit: float = math.inf
    w_fill: float = 0.0
    patience: float = 0.0
    whole: tuple[bool, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data; infinity is null."""
        return {name: _finite(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; raises PlanError for unknown or missing keys."""
        names = {f.name for f in fields(cls)}
        if set(data) != names:
            raise PlanError(
                f"family: keys {sorted(set(data) ^ names)} are unknown or missing; expected {sorted(names)}"
            )
        return cls(**{name: _restore(name, value) for name, value in data.items()})

    def to_vector(self) -> FloatArray:
        """The kernels' parameters (`keys.fill_keys`), all but `whole`."""
        chunks = (self.stretch_forward, self.stretch_backward, self.shift_forward, self.shift_backward)
        scalars = (
            self.w_gap,
            self.group,
            self.slack,
            self.memory_cap,
            self.w_limit,
            self.w_fill,
            self.patience,
        )
        return np.array([x for part in (*chunks, scalars) for x in part], dtype=np.float64)

    @classmethod
    def from_vector(cls, params: FloatArray, whole: IntArray) -> Self:
        """The inverse of `to_vector`."""
        v = (len(params) - NUM_SCALARS) // 4
        values = params.tolist()
        w_gap, group, slack, memory_cap, w_limit, w_fill, patience = values[4 * v :]
        return cls(
            stretch_forward=tuple(values[:v]),
            stretch_backward=tuple(values[v : 2 * v]),
            shift_forward=tuple(values[2 * v : 3 * v]),
            shift_backward=tuple(values[3 * v : 4 * v]),
            w_gap=w_gap,
            group=int(group),
            slack=slack,
            memory_cap=memory_cap,
            w_limit=w_limit,
            w_fill=w_fill,
            patience=patience,
            whole=tuple(bool(x) for x in whole),
        )


def _finite(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return None if isinstance(value, float) and math.isinf(value) else value


def _restore(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(bool, value)) if name == "whole" else tuple(map(float, value))
    return math.inf if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stage costs prepared for many generations: latencies, lanes and room for the orders."""

    costs: StageCosts
    num_devices: int
    num_microbatches: int
    memory_limit_bytes: FloatArray
    chunk: IntArray
    cost_s: FloatArray
    send_s: FloatArray
    share_bytes: FloatArray
    beat_s: float

    @classmethod
    def of(
        cls, costs: StageCosts, num_microbatches: int, *, memory_limit_bytes: FloatArray | None = None
    ) -> Self:
        """Prepare `costs`; `memory_limit_bytes` is [num_devices], None for no limit."""
        device = costs.device_of_stage
        num_devices = int(device.max()) + 1
        work = costs.forward_s + np.minimum(costs.input_grad_s + costs.weight_grad_s, costs.backward_s)
        limit = np.full(num_devices, np.inf) if memory_limit_bytes is None else memory_limit_bytes
        return cls(
            costs=costs,
            num_devices=num_devices,
            num_microbatches=num_microbatches,
            memory_limit_bytes=np.asarray(limit, dtype=np.float64),
            chunk=chunk_of_stage(device.tolist()),
            cost_s=np.stack([costs.forward_s, costs.input_grad_s, costs.weight_grad_s, costs.backward_s]),
            send_s=np.stack([costs.forward_transfer_s, costs.backward_transfer_s]),
            share_bytes=np.bincount(device, weights=costs.activation_bytes, minlength=num_devices),
            beat_s=float(np.bincount(device, weights=work, minlength=num_devices).max()) or 1.0,
        )

    @property
    def num_chunks(self) -> int:
        """Stages a device."""
        return self.costs.num_stages // self.num_devices


def run(family: Family, pipeline: Pipeline) -> tuple[float, IntArray, IntArray]:
    """Makespan (inf when the memory cannot hold one microbatch), flat orders and device offsets."""
    num_stages, num_microbatches = pipeline.costs.num_stages, pipeline.num_microbatches
    whole = np.zeros(num_stages, dtype=np.int64)
    whole[: len(family.whole)] = family.whole
    params = family.to_vector()
    forward_key, backward_key = np.empty(num_stages), np.empty(num_stages)
    progress = np.empty(num_microbatches)
    fill_keys(
        params,
        whole,
        pipeline.chunk,
        pipeline.cost_s,
        pipeline.send_s,
        pipeline.beat_s,
        forward_key,
        backward_key,
        progress,
    )
    per_device = np.bincount(
        pipeline.costs.device_of_stage, weights=3 - whole, minlength=pipeline.num_devices
    ).astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(per_device * num_microbatches)))
    orders = np.empty(int(offsets[-1]), dtype=np.int64)
    makespan = generate_orders(
        pipeline.num_devices,
        num_stages,
        num_microbatches,
        pipeline.costs.device_of_stage,
        pipeline.cost_s,
        pipeline.send_s,
        pipeline.costs.activation_bytes,
        pipeline.costs.held_fraction,
        np.zeros(num_stages, dtype=np.int64),
        np.full(num_stages, num_microbatches, dtype=np.int64),
        forward_key,
        backward_key,
        progress,
        whole,
        params[-NUM_SCALARS:],
        _cap(family, pipeline),
        orders,
        offsets,
    )
    return float(makespan), orders, offsets


def _cap(family: Family, pipeline: Pipeline) -> FloatArray:
    if math.isinf(family.memory_cap):
        return pipeline.memory_limit_bytes
    return np.minimum(pipeline.memory_limit_bytes, family.memory_cap * pipeline.share_bytes)


def generate(
    family: Family,
    costs: StageCosts,
    num_microbatches: int,
    *,
    memory_limit_bytes: FloatArray | None = None,
) -> Schedule:
    """The schedule of a point of the family under `costs` (its placement and split included).

    Raises InfeasibleError when the memory limit does not hold one microbatch.
    """
    pipeline = Pipeline.of(costs, num_microbatches, memory_limit_bytes=memory_limit_bytes)
    makespan, orders, offsets = run(family, pipeline)
    if math.isinf(makespan):
        raise InfeasibleError(
            f"memory limit: one microbatch needs {pipeline.share_bytes.tolist()} activation bytes a device; "
            "raise the limit, or split finer"
        )
    return Schedule(
        num_devices=pipeline.num_devices,
        num_microbatches=num_microbatches,
        placement=tuple(costs.device_of_stage.tolist()),
        orders=tuple(np.split(orders, offsets[1:-1])),
        origin={"family": family.to_json()},
    )
