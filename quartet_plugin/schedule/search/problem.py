"""The records of a schedule search: cost tables as arrays, candidates, results."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from quartet_plugin.model.costs import Costs, FloatArray, IntArray, StageCosts, stage_costs
from quartet_plugin.schedule.family import Family, generate
from quartet_plugin.schedule.placement import Placement, chunk_of_stage
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.search.climb import PlacedCosts, climb_family, family_score
from quartet_plugin.schedule.search.limits import FREE, SLACKS, W_LIMITS, FamilyLimits
from quartet_plugin.schedule.simulate import Simulation
from quartet_plugin.split.entries import Entries, minimum_entries


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleProblem:
    """A cost table prepared for the kernels, with the objective and the choices that are free.

    `prefix` [5, layers + 1]: cumulated F, I, W, B seconds and bytes. `limit_bytes` [num_devices], inf for
    none. `has_period_objective`: minimize the period instead of the makespan. `limits` are those of the
    family.
    """

    costs: Costs
    prefix: FloatArray
    limit_bytes: FloatArray
    has_period_objective: bool
    allow_empty: bool
    has_free_split: bool
    limits: FamilyLimits = FREE

    @classmethod
    def of(
        cls,
        costs: Costs,
        *,
        has_period_objective: bool = False,
        allow_empty: bool = False,
        has_free_split: bool = False,
        limits: FamilyLimits = FREE,
    ) -> Self:
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
            limit_bytes=np.full(costs.num_devices, np.inf) if limit is None else np.asarray(limit),
            has_period_objective=has_period_objective,
            allow_empty=allow_empty,
            has_free_split=has_free_split,
            limits=limits,
        )

    @property
    def fused_pays(self) -> bool:
        """Whether a full backward is cheaper than I and W somewhere."""
        return bool(np.any(np.diff(self.prefix[3]) < np.diff(self.prefix[1] + self.prefix[2]) * (1 - 1e-9)))

    def costs_under(self, placement: Sequence[int], *, num_microbatches: int | None = None) -> PlacedCosts:
        """The kernels' view of a placement, for another number of microbatches than the costs' if given."""
        return PlacedCosts(
            placement=np.array(placement, dtype=np.int64),
            chunk=chunk_of_stage(placement),
            prefix=self.prefix,
            slowdown=np.asarray(self.costs.device_slowdown, dtype=np.float64),
            transfer=np.asarray(self.costs.transfer_s, dtype=np.float64),
            limit=self.limit_bytes,
            held=float(self.costs.weight_grad_held_fraction),
            num_microbatches=num_microbatches or self.costs.num_microbatches,
            has_period_objective=self.has_period_objective,
            slacks=np.array(self.limits.slacks or SLACKS),
            w_limits=np.array(self.limits.w_limits or W_LIMITS),
        )

    def least_counts(self, num_stages: int) -> IntArray:
        """The fewest entries that each stage may hold [num_stages]."""
        return np.array(minimum_entries(self.costs, num_stages, allow_empty=self.allow_empty), dtype=np.int64)

    def stage_costs(self, placement: Sequence[int], split: Entries) -> StageCosts:
        """The simulator's input for a placement and a split."""
        return stage_costs(self.costs, placement=placement, layers_per_stage=split)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyCandidate:
    """Parameters of the family with a placement and a split; `score` in seconds, inf where it is not known.

    `full_backward[s]` is 1 where the backward of stage s is one action.
    """

    placement: Placement
    split: Entries
    params: FloatArray
    full_backward: IntArray
    score: float = math.inf

    def schedule(self, problem: ScheduleProblem) -> Schedule:
        """The schedule that the parameters make."""
        costs = problem.costs
        schedule = generate(
            Family.from_vector(self.params, self.full_backward),
            problem.stage_costs(self.placement, self.split),
            costs.num_microbatches,
            memory_limit_bytes=costs.memory_limit_bytes,
        )
        return replace(schedule, layers_per_stage=self.split)

    def climb(
        self, problem: ScheduleProblem, *, num_microbatches: int, steps: int, target: float, seed: int
    ) -> "FamilyCandidate":
        """A hill climb from here; the same candidate with its score when `steps` is 0."""
        params, full_backward = self.params.copy(), self.full_backward.copy()
        counts = np.array(self.split, dtype=np.int64)
        costs = problem.costs_under(self.placement, num_microbatches=num_microbatches)
        score = float(family_score(params, full_backward, counts, costs))
        if steps > 0:
            score = climb_family(
                params,
                full_backward,
                counts,
                problem.least_counts(len(counts)),
                costs,
                0.35 if problem.has_free_split else 0.0,
                0.15 if problem.fused_pays else 0.0,
                score,
                steps,
                target,
                seed,
            )
        return replace(
            self,
            params=params,
            full_backward=full_backward,
            split=tuple(counts.tolist()),
            score=float(score),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedResult:
    """A named schedule's best result: `score_s` is its makespan, or period when that is the objective."""

    label: str
    schedule: Schedule
    score_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The schedule that a search chose, and how it compares.

    `named_best` is the best named schedule that fits, None when none does; `named` all that fit, best
    first. `best_score_s` is the best score seen, also when that order lost under noise and was not taken.
    `lower_bound_s` is a makespan that nothing the search was allowed to use can beat, 0 where none is known.
    `is_cut`: the time limit has ended the search.
    """

    schedule: Schedule
    simulation: Simulation
    named_best: NamedResult | None
    named: tuple[NamedResult, ...]
    best_score_s: float
    lower_bound_s: float
    num_evaluations: int
    elapsed_s: float
    is_cut: bool
