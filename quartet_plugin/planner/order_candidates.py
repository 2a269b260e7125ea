"""The orders of slots that are worth predicting for a layout: every one of a few slots, else the solver's.

Orders that take the same time under the calibrated slowdowns and links count once. A job whose features limit
its orders also has exchanges of the runs that may move: the solver knows nothing of these limits.
"""

import itertools

import numpy as np

from quartet_plugin.cost.iteration.split_model import CalibratedSplits, SlotOrder
from quartet_plugin.errors import PlanError
from quartet_plugin.mapping.exchanges import exchanged, pairs_of_runs
from quartet_plugin.mapping.orders import is_legal, slot_indices, slots_of
from quartet_plugin.mapping.topology import Topology
from quartet_plugin.model.costs import IntArray
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Mapping, Plan
from quartet_plugin.planner.closed_form import StepCosts, solve_step
from quartet_plugin.planner.collectives import Collective, no_collective
from quartet_plugin.planner.split_search import balanced_split
from quartet_plugin.space.knobs.expert_tensor_parallel import EXPERT_TENSOR_PARALLEL, WHOLE
from quartet_plugin.space.plan_space import Space

# Slots up to which every order is a candidate.
MAX_PERMUTED_SLOTS = 6
# Layouts for which the solver is asked in one call, its steps of local search, and its orders that are taken.
MAX_SOLVED = 4
EVALUATIONS, EXACT_LIMIT, NUM_SOLVED = 120, 300, 6
# Ranks at which one step of the solver takes ten times as long as it does for a few.
_LARGE = 128

type Order = tuple[IntArray, Mapping]


class OrderCandidates:
    """Candidates of one call; `limits` says what was cut off."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._slots = slots_of(space.nodes)
        self._every: dict[object, IntArray] = {}
        self._solved: dict[object, list[Order]] = {}
        self._exchanged: dict[object, IntArray] = {}
        self._num_named = 0

    @property
    def limits(self) -> tuple[str, ...]:
        """What the limits cut off, one line each."""
        lines = []
        if self._solved:
            lines.append(
                f"mappings: {len(self._slots)} slots; for {len(self._solved)} layouts only the named rank "
                f"orders and the solver's best {NUM_SOLVED} are predicted"
            )
        if self._num_named:
            lines.append(
                f"mappings: for {self._num_named} further combinations only the named rank orders are "
                "predicted"
            )
        return tuple(lines)

    def of(self, plan: Plan, calibrated: CalibratedSplits) -> list[Order]:
        """The orders of slots of the plan's layout, by indices and as mappings."""
        space, layout = self._space, plan.layout
        orders = [
            (slot_indices(space.nodes, order.mapping), order.mapping) for order in space.orders_of(layout)
        ]
        if not space.run_lengths_of(layout):
            return orders
        if len(self._slots) <= MAX_PERMUTED_SLOTS:
            every = self._permutations(layout)
            first = calibrated.distinct(every)
            return orders + [(every[index], self._mapping(every[index])) for index in first]
        return orders + self._solver_orders(plan, calibrated) + self._exchanges(layout, calibrated)

    def _permutations(self, layout: Layout) -> IntArray:
        """Every legal order [orders, world size]."""
        key, rules = layout.degrees, self._space.order_rules
        if key not in self._every:
            self._every[key] = np.array(
                [
                    order
                    for order in itertools.permutations(range(len(self._slots)))
                    if is_legal([self._slots[index] for index in order], layout=layout, rules=rules)
                ],
                dtype=np.int64,
            )
        return self._every[key]

    def _exchanges(self, layout: Layout, calibrated: CalibratedSplits) -> list[Order]:
        """The legal orders that one exchange of two runs makes, where features limit the orders."""
        space, rules = self._space, self._space.order_rules
        if not rules.limits_orders:
            return []
        key = layout.degrees
        if key not in self._exchanged:
            orders = [
                exchanged(self._slots, [pair], length=length, layout=layout, rules=rules)
                for length in space.run_lengths_of(layout)
                for pair in pairs_of_runs(layout.world_size // length)
            ]
            legal = [Mapping(slots=order) for order in dict.fromkeys(orders) if order != self._slots]
            self._exchanged[key] = np.array(
                [slot_indices(space.nodes, mapping) for mapping in legal], dtype=np.int64
            ).reshape(len(legal), layout.world_size)
        every = self._exchanged[key]
        first = calibrated.distinct(every) if len(every) else ()
        return [(every[index], self._mapping(every[index])) for index in first]

    def _mapping(self, order: SlotOrder) -> Mapping:
        return Mapping(slots=tuple(self._slots[int(index)] for index in order))

    def _solver_orders(self, plan: Plan, calibrated: CalibratedSplits) -> list[Order]:
        """The solver's best for the layout's degrees, asked once for each."""
        slowdowns = calibrated.slowdowns
        is_one_domain = len(self._space.nodes) == 1 and len(set(calibrated.domain_of_slot.tolist())) == 1
        if len(set(slowdowns.tolist())) == 1 and is_one_domain:
            return []
        layout = plan.layout
        key = (layout.degrees, self._has_whole_experts(layout))
        if key not in self._solved:
            if len(self._solved) >= MAX_SOLVED:
                self._num_named += 1
                return []
            self._solved[key] = self._solve(plan, calibrated)
        return self._solved[key]

    def _has_whole_experts(self, layout: Layout) -> bool:
        """Whether tensor-parallel ranks hold whole experts, by the layout or else by the command."""
        value = layout.setting(EXPERT_TENSOR_PARALLEL.name)
        if value is None:
            value = self._space.job.setting(EXPERT_TENSOR_PARALLEL.name)
        return value == WHOLE

    def _solve(self, plan: Plan, calibrated: CalibratedSplits) -> list[Order]:
        slowdowns, layout = calibrated.slowdowns, plan.layout
        domains = calibrated.domain_of_slot
        intra_s, inter_s, latency_s = calibrated.link_s
        num_domains, ranks = int(domains.max()) + 1, layout.pipeline_parallel
        # A boundary tensor counts as one byte, so that seconds are the inverse of bandwidths.
        topology = Topology(
            slots=self._slots,
            domain_of_slot=domains,
            slowdown=slowdowns,
            inside_bytes_per_s=1.0 / max(intra_s, 1e-30),
            inside_latency_s=latency_s,
            between_bytes_per_s=np.full((num_domains, num_domains), 1.0 / max(inter_s, 1e-30)),
            between_latency_s=np.full((num_domains, num_domains), latency_s),
        )
        present = slot_indices(self._space.nodes, plan.mapping)
        times = calibrated.times(present, plan.mapping)
        stages = times.action_s(balanced_split(times, plan.shape.num_layers)).sum(axis=0)
        compute_s = np.bincount(times.placement, weights=stages, minlength=ranks)
        compute_s /= slowdowns[present.reshape(ranks, -1)].max(axis=1)
        none, volume = no_collective(ranks), calibrated.gradient_boundaries(present)
        costs = StepCosts(
            layout=layout,
            num_microbatches=plan.num_microbatches,
            compute_s=compute_s,
            tensor=none,
            context=none,
            expert=none,
            gradients=Collective(volume_bytes=np.full(ranks, volume), rounds=np.zeros(ranks)),
            boundary_bytes=1.0,
            hidden_s=np.zeros(ranks),
            is_blocking=times.is_blocking,
            has_whole_experts=self._has_whole_experts(layout),
        )
        num_blocks = layout.world_size // layout.tensor_parallel
        effort = EVALUATIONS if len(set(slowdowns.tolist())) > 1 else 0
        rules = self._space.order_rules
        try:
            solution = solve_step(
                costs,
                topology,
                evaluations=effort * _LARGE // max(_LARGE, num_blocks),
                exact_limit=EXACT_LIMIT if num_blocks <= _LARGE else 0,
                num_others=NUM_SOLVED - 1,
            )
        except PlanError:
            return []
        return [
            (np.array(order, dtype=np.int64), self._mapping(order))
            for order in (solution.slots, *solution.others)
            if is_legal([self._slots[index] for index in order], layout=layout, rules=rules)
        ]
