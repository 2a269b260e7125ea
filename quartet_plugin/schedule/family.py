"""One parameterized family of schedules; some parameters make each single-copy named schedule.

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
from quartet_plugin.schedule.generator import NUM_SCALARS, generate_orders, keys_of
from quartet_plugin.schedule.kernel import Lanes
from quartet_plugin.schedule.placement import chunk_of_stage
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import lanes_of_stages

PER_CHUNK = ("stretch_forward", "stretch_backward", "shift_forward", "shift_backward")
SCALARS = ("w_gap", "group", "slack", "memory_cap", "w_limit", "w_fill", "patience")
_JSON_KEYS = {"full_backward": "whole"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One set of the family's parameters.

    Per chunk: `stretch_forward`, `stretch_backward` multiply latencies, `shift_forward`, `shift_backward`
    are added, in microbatches. `slack` (microbatches): how much larger than the smallest open key a key may
    be; 0 is a static order, inf greedy. `memory_cap`: in one microbatch's activation bytes of each device;
    inf for none beyond the cost table's own limit. `w_limit`: more pending W are forced. `w_fill`: a W
    fills an idle gap of at least this part of its time. `patience`: wait for a smaller key that arrives
    within this part of the other action's time. `full_backward[s]`: one backward action on stage s; a file
    calls it `whole`.
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
    full_backward: tuple[bool, ...] = ()

    @classmethod
    def json_keys(cls) -> tuple[str, ...]:
        """The keys of `to_json`, in the order of the fields."""
        return tuple(_JSON_KEYS.get(field.name, field.name) for field in fields(cls))

    def to_json(self) -> dict[str, Any]:
        """Plain data; infinity is null."""
        return dict(zip(self.json_keys(), map(_finite, asdict(self).values()), strict=True))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; raises PlanError for unknown or missing keys."""
        keys = set(cls.json_keys())
        if set(data) != keys:
            raise PlanError(
                f"family: keys {sorted(set(data) ^ keys)} are unknown or missing; expected {sorted(keys)}"
            )
        values = (_restore(key, data[key]) for key in cls.json_keys())
        return cls(**dict(zip(cls.__dataclass_fields__, values, strict=True)))

    def to_vector(self) -> FloatArray:
        """The kernels' parameters (`generator.keys_of`), all but `full_backward`."""
        chunks = [np.array(getattr(self, name), dtype=np.float64) for name in PER_CHUNK]
        return np.concatenate((*chunks, [float(getattr(self, name)) for name in SCALARS]))

    @classmethod
    def from_vector(cls, params: FloatArray, full_backward: IntArray) -> Self:
        """The inverse of `to_vector`."""
        chunks = np.split(params[:-NUM_SCALARS], len(PER_CHUNK))
        values: dict[str, Any] = dict(zip(SCALARS, params[-NUM_SCALARS:].tolist(), strict=True))
        values |= {name: tuple(part.tolist()) for name, part in zip(PER_CHUNK, chunks, strict=True)}
        values["group"] = int(values["group"])
        return cls(**values, full_backward=tuple(bool(x) for x in full_backward))


def _finite(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return None if isinstance(value, float) and math.isinf(value) else value


def _restore(key: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(bool, value)) if key == "whole" else tuple(map(float, value))
    return math.inf if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stage costs prepared for many generations.

    `share_bytes` [num_devices]: activation bytes of one microbatch on all stages of a device. `beat_s`: the
    busiest device's seconds a microbatch.
    """

    costs: StageCosts
    num_devices: int
    num_microbatches: int
    memory_limit_bytes: FloatArray
    chunk: IntArray
    lanes: Lanes
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
            lanes=lanes_of_stages([costs], np.zeros(num_microbatches, dtype=np.int64)),
            share_bytes=np.bincount(device, weights=costs.activation_bytes, minlength=num_devices),
            beat_s=float(np.bincount(device, weights=work, minlength=num_devices).max()) or 1.0,
        )

    @property
    def num_chunks(self) -> int:
        """Stages a device."""
        return self.costs.num_stages // self.num_devices


def run(family: Family, pipeline: Pipeline) -> tuple[float, IntArray, IntArray]:
    """Makespan (inf when the memory cannot hold one microbatch), flat orders and device offsets."""
    full_backward = np.zeros(pipeline.costs.num_stages, dtype=np.int64)
    full_backward[: len(family.full_backward)] = family.full_backward
    params = family.to_vector()
    per_device = np.bincount(
        pipeline.costs.device_of_stage, weights=3 - full_backward, minlength=pipeline.num_devices
    ).astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(per_device * pipeline.num_microbatches)))
    orders = np.empty(int(offsets[-1]), dtype=np.int64)
    makespan = generate_orders(
        pipeline.lanes,
        keys_of(params, full_backward, pipeline.chunk, pipeline.lanes, pipeline.beat_s),
        full_backward,
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
    """The schedule that the parameters make under `costs` (its placement and split included).

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
