"""What the search works on: a cost table as arrays, and points (placement, split, parameters) in it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from quartet_plugin.model.costs import Costs, FloatArray, IntArray, StageCosts, stage_costs
from quartet_plugin.schedule.family import Family, Pipeline, run
from quartet_plugin.schedule.placement import Placement, chunk_of_stage
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.search import climb
from quartet_plugin.split.entries import Entries, minimum_entries


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleProblem:
    """A cost table prepared for the kernels.

    `prefix` [5, layers + 1]: cumulated F, I, W, B seconds and bytes. `limit_bytes` [num_devices], inf for
    none. `want_period`: minimize the period instead of the makespan.
    """

    costs: Costs
    prefix: FloatArray
    slowdown: FloatArray
    transfer: FloatArray
    limit_bytes: FloatArray
    want_period: bool
    allow_empty: bool
    free_split: bool

    @classmethod
    def of(cls, costs: Costs, *, want_period: bool, allow_empty: bool, free_split: bool) -> Self:
        """Prepare `costs`."""
        layers = costs.layers
        split = [x.input_grad_s + x.weight_grad_s for x in layers]
        rows = [
            [x.forward_s for x in layers],
            [x.input_grad_s for x in layers],
            [x.weight_grad_s for x in layers],
            split if costs.backward_fused_s is None else list(costs.backward_fused_s),
            [x.activation_bytes for x in layers],
        ]
        limit = costs.memory_limit_bytes
        return cls(
            costs=costs,
            prefix=np.concatenate((np.zeros((5, 1)), np.cumsum(np.array(rows), axis=1)), axis=1),
            slowdown=np.asarray(costs.device_slowdown, dtype=np.float64),
            transfer=np.asarray(costs.transfer_s, dtype=np.float64),
            limit_bytes=np.full(costs.num_devices, np.inf) if limit is None else np.asarray(limit),
            want_period=want_period,
            allow_empty=allow_empty,
            free_split=free_split,
        )

    @property
    def fused_pays(self) -> bool:
        """Whether a whole backward is cheaper than I and W somewhere."""
        return bool(np.any(np.diff(self.prefix[3]) < np.diff(self.prefix[1] + self.prefix[2]) * (1 - 1e-9)))

    def stage_costs(self, placement: Sequence[int], split: Entries) -> StageCosts:
        """The simulator's input for a placement and a split."""
        return stage_costs(self.costs, placement=placement, layers_per_stage=split)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One candidate of the family, with its score in seconds (inf: not evaluated, or not feasible)."""

    placement: Placement
    split: Entries
    params: FloatArray
    whole: IntArray
    score: float = math.inf

    @property
    def family(self) -> Family:
        """The parameters by name."""
        return Family.from_vector(self.params, self.whole)

    def schedule(self, problem: ScheduleProblem) -> Schedule:
        """The order this point stands for."""
        costs = problem.costs
        pipeline = Pipeline.of(
            problem.stage_costs(self.placement, self.split),
            costs.num_microbatches,
            memory_limit_bytes=costs.memory_limit_bytes,
        )
        makespan, orders, offsets = run(self.family, pipeline)
        assert math.isfinite(makespan), self
        return Schedule(
            num_devices=costs.num_devices,
            num_microbatches=costs.num_microbatches,
            placement=self.placement,
            orders=tuple(np.split(orders, offsets[1:-1])),
            layers_per_stage=self.split,
            origin={"family": self.family.to_json()},
        )

    def climbed(
        self, problem: ScheduleProblem, *, num_microbatches: int, steps: int, target: float, seed: int
    ) -> "Point":
        """A hill climb from here; the same point with its score when `steps` is 0."""
        params, whole = self.params.copy(), self.whole.copy()
        counts = np.array(self.split, dtype=np.int64)
        arrays = (
            np.array(self.placement, dtype=np.int64),
            chunk_of_stage(self.placement),
            problem.prefix,
            problem.slowdown,
            problem.transfer,
            problem.limit_bytes,
            problem.costs.weight_grad_held_fraction,
            num_microbatches,
            problem.want_period,
        )
        score = float(climb.evaluate(params, whole, counts, *arrays))
        if steps > 0:
            least = minimum_entries(problem.costs, len(counts), allow_empty=problem.allow_empty)
            score = climb.climb(
                params,
                whole,
                counts,
                np.array(least, dtype=np.int64),
                *arrays,
                0.35 if problem.free_split else 0.0,
                0.15 if problem.fused_pays else 0.0,
                score,
                steps,
                target,
                seed,
            )
        return replace(self, params=params, whole=whole, split=tuple(counts.tolist()), score=float(score))
