"""The best order of ranks for a job whose features limit it: the solver knows nothing of these limits."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from quartet_plugin.errors import PlanError
from quartet_plugin.mapping.exchanges import exchanged, pairs_of_runs, run_lengths
from quartet_plugin.mapping.order_rules import NO_RULES, OrderRules
from quartet_plugin.mapping.orders import STOCK, is_legal, order_named, slots_of
from quartet_plugin.mapping.solve import NEVER_S, Solution
from quartet_plugin.mapping.topology import Topology
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import NodeInfo
from quartet_plugin.planner.closed_form import StepCosts, step_s
from quartet_plugin.planner.described_rules import rules_of
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.space.features import WHOLE_NODES
from quartet_plugin.space.knobs.cp_comm_type import HIERARCHICAL_SIZES

type SlotIndices = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedOrders:
    """What the orders of a layout's ranks keep; `nodes` hold the slots of `topology`."""

    topology: Topology
    nodes: tuple[NodeInfo, ...]
    rules: OrderRules

    def is_legal(self, slots: SlotIndices, *, layout: Layout) -> bool:
        """Whether an order keeps the rules; without any every order does."""
        if not self.rules.limits_orders:
            return True
        order = [self.topology.slots[slot] for slot in slots]
        return is_legal(order, layout=layout, rules=self.rules)

    def best(
        self,
        solution: Solution,
        costs: StepCosts,
        *,
        inside: frozenset[str],
        evaluations: int,
        num_others: int,
    ) -> Solution | None:
        """The best legal one of the solver's orders, of the launcher's, and of exchanges of runs in the best.

        At most `evaluations` exchanges are tried. `solution` itself without rules; None if no order is legal.
        """
        if not self.rules.limits_orders:
            return solution
        layout = costs.layout
        seconds: dict[SlotIndices, float] = {}

        def least_after(order: SlotIndices) -> bool:
            """Whether an order, now evaluated, has the least step so far."""
            so_far = min(seconds.values(), default=math.inf)
            seconds[order] = step_s(costs, self.topology, order, inside=inside)
            return seconds[order] < so_far

        best: SlotIndices = tuple(range(layout.world_size))
        for order in (best, solution.slots, *solution.others):
            if order not in seconds and self.is_legal(order, layout=layout) and least_after(order):
                best = order
        is_better = True
        while is_better:
            is_better = False
            for order in self._exchanges(best, layout=layout):
                if evaluations == 0:
                    break
                if order not in seconds:
                    evaluations -= 1
                    if least_after(order):
                        best, is_better = order, True
        if not seconds or seconds[best] >= NEVER_S:
            return None
        # An order whose groups leave their domain (`inside`) takes NEVER_S: it is none to predict.
        legal = [order for order in sorted(seconds, key=seconds.__getitem__) if seconds[order] < NEVER_S]
        others = [order for order in legal if order != best]
        return replace(
            solution, slots=best, step_s=seconds[best], exact=False, others=tuple(others[:num_others])
        )

    def _exchanges(self, order: SlotIndices, *, layout: Layout) -> Iterator[SlotIndices]:
        """The legal orders after one exchange of two runs, the longest runs first."""
        slots = self.topology.slots
        index = {slot: number for number, slot in enumerate(slots)}
        placed = [slots[number] for number in order]
        lengths = run_lengths(layout, nodes=self.nodes, rules=self.rules)
        # A tensor-parallel group moves as a whole: the closed form knows none that leaves its domain.
        for length in (length for length in lengths if length % layout.tensor_parallel == 0):
            for pair in pairs_of_runs(layout.world_size // length):
                moved = exchanged(placed, [pair], length=length, layout=layout, rules=self.rules)
                yield tuple(index[slot] for slot in moved)


def requested_orders(job: PlanRequest, layout: Layout, topology: Topology) -> dict[str, SlotIndices]:
    """The orders beside `stock` that `search.mapping` names and the layout may have, by name."""
    names = [name for name in job.search.mapping or () if name != STOCK]
    if not names or not (job.cluster is None or job.cluster.has_equal_nodes):
        return {}
    nodes, rules = job.nodes, rules_of(job).order_rules_of(layout)
    index = {slot: number for number, slot in enumerate(slots_of(nodes))}
    orders = {}
    for name in names:
        try:
            order = order_named(name, layout=layout, nodes=nodes, rules=rules)
        except PlanError:
            continue  # not an order of this layout
        slots = tuple(index[slot] for slot in order.mapping.slots)
        groups = topology.domain_of_slot[list(slots)].reshape(-1, layout.tensor_parallel)
        if (groups == groups[:, :1]).all():
            orders[name] = slots
    return orders


def limited_orders_of(job: PlanRequest, topology: Topology, *, layout: Layout) -> LimitedOrders:
    """The limits of a layout's orders, by the job's features and the layout's dispatcher and sizes."""
    has_sizes = layout.setting(HIERARCHICAL_SIZES.name) is not None
    if job.experts is None and not has_sizes and WHOLE_NODES.isdisjoint(job.features):
        return LimitedOrders(topology=topology, nodes=(), rules=NO_RULES)
    return LimitedOrders(topology=topology, nodes=job.nodes, rules=rules_of(job).order_rules_of(layout))
