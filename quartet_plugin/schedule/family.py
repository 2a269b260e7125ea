"""One parameterized family of schedules; some parameters make each single-copy named schedule.

key(F s,i) = progress(i) + offF(s), key(I s,i) = progress(i) + offI(s), key(W s,i) = key(I s,i) + w_gap.
Offsets are the cumulated unloaded latencies of the cost table in units of the busiest device's time a
microbatch, stretched and shifted chunk by chunk. With group g, g microbatches pass a chunk before the next
chunk: progress(i) = g (i div g) + (i mod g) / v.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np

from quartet_plugin.errors import InfeasibleError, PlanError
from quartet_plugin.model.costs import FloatArray, IntArray, StageCosts
from quartet_plugin.schedule.generator import NUM_SCALARS, orders_of_params
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
        """The kernels' parameters (`generator.orders_of_params`), all but `full_backward`."""
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


def run(
    family: Family, costs: StageCosts, num_microbatches: int, *, memory_limit_bytes: FloatArray | None = None
) -> tuple[float, IntArray, IntArray]:
    """Makespan (inf when the memory cannot hold one microbatch), flat orders and device offsets.

    `memory_limit_bytes` is [num_devices], None for no limit.
    """
    device = costs.device_of_stage
    full_backward = np.zeros(costs.num_stages, dtype=np.int64)
    full_backward[: len(family.full_backward)] = family.full_backward
    limit = np.full(int(device.max()) + 1, np.inf) if memory_limit_bytes is None else memory_limit_bytes
    makespan, orders, offsets = orders_of_params(
        family.to_vector(),
        full_backward,
        chunk_of_stage(device.tolist()),
        lanes_of_stages([costs], np.zeros(num_microbatches, dtype=np.int64)),
        np.asarray(limit, dtype=np.float64),
    )
    return float(makespan), orders, offsets


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
    device = costs.device_of_stage
    makespan, orders, offsets = run(family, costs, num_microbatches, memory_limit_bytes=memory_limit_bytes)
    if math.isinf(makespan):
        share_bytes = np.bincount(device, weights=costs.activation_bytes)
        raise InfeasibleError(
            f"memory_limit_bytes: one microbatch needs {share_bytes.tolist()} bytes of activations on the "
            "devices; raise the limit, or use more stages"
        )
    return Schedule(
        num_devices=len(offsets) - 1,
        num_microbatches=num_microbatches,
        placement=tuple(device.tolist()),
        orders=tuple(np.split(orders, offsets[1:-1])),
        origin={"family": family.to_json()},
    )


def plain_family(placement: Sequence[int], *, num_devices: int) -> Family:
    """Full backwards, as 1F1B on any placement, with the microbatches in flight that fill the pipeline."""
    chunks = len(placement) // num_devices
    ones, zeros = (1.0,) * chunks, (0.0,) * chunks
    return Family(
        stretch_forward=ones,
        stretch_backward=ones,
        shift_forward=zeros,
        shift_backward=zeros,
        memory_cap=float(num_devices + 1),
        full_backward=(True,) * len(placement),
    )
