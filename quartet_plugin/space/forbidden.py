"""What the user forbids: the rules of `search.forbid`, judged as soon as a plan is known far enough.

A rule about layouts, or about layouts and schedules, takes those out of the space, so that nothing is
proposed that it meets. What any other rule meets is refused as a whole plan, before it is launched.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quartet_plugin.errors import PlanError
from quartet_plugin.mapping.orders import order_named
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import STOCK, NodeInfo, Plan
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.space.config import SEARCHED, Forbidden
from quartet_plugin.split.layers import even_split

_LAYOUT = ("tensor_parallel", "pipeline_parallel", "data_parallel", "virtual_stages", "micro_batch_size")

# Whether an axis has a value, for each axis that is known.
type _Facts = Mapping[str, Callable[[Any], bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prohibitions:
    """The rules over the plans of one job. Each method gives the first rule that is met, None for none."""

    rules: Sequence[Forbidden]
    job: TrainingJob
    nodes: tuple[NodeInfo, ...]

    def of_layout(self, layout: Layout) -> Forbidden | None:
        """Of the rules that name nothing but layouts."""
        return self._first(lambda: _layout_facts(layout))

    def of_schedule(self, layout: Layout, name: str) -> Forbidden | None:
        """Of the rules about layouts and schedules alone; `name` is the schedule's in the space."""
        return self._first(lambda: {**_layout_facts(layout), "schedule": self._is_schedule(name)})

    def of_plan(self, plan: Plan) -> Forbidden | None:
        """Of all rules. The user's own configuration is measured whatever they say; ask for others."""
        return self._first(lambda: self._facts(plan))

    def _first(self, facts_of: Callable[[], _Facts]) -> Forbidden | None:
        """Asked of every choice of a study, most of which has no rules: then nothing is made."""
        if not self.rules:
            return None
        facts = facts_of()
        return next((rule for rule in self.rules if _is_met(rule, facts)), None)

    def _facts(self, plan: Plan) -> _Facts:
        custom = plan.schedule.custom
        name = plan.schedule.name if custom is None else custom.named or SEARCHED
        return {
            **_layout_facts(plan.layout),
            "shape": plan.shape.label.__eq__,
            "schedule": self._is_schedule(name),
            "group": lambda group: plan.schedule.group == group,
            "split": lambda split: self._is_split(plan, split),
            "mapping": lambda order: self._is_mapped(plan, order),
        }

    def _is_schedule(self, name: str) -> Callable[[str], bool]:
        own = self.job.schedule.name
        return lambda word: name == (own if word == STOCK else word)

    def _is_split(self, plan: Plan, word: str) -> bool:
        counts = plan.split.transformer_layers_per_stage
        if word == STOCK:
            return self.job.split is not None and counts == self.job.split.transformer_layers_per_stage
        if word == "even":
            return counts == even_split(plan.shape.num_layers, num_stages=len(counts))
        return plan.split.label == word

    def _is_mapped(self, plan: Plan, word: str) -> bool:
        try:
            order = order_named(word, layout=plan.layout, nodes=self.nodes)
        except PlanError:
            return False  # not an order that this layout can have
        return order.mapping == plan.mapping


def _layout_facts(layout: Layout) -> dict[str, Callable[[Any], bool]]:
    return {name: getattr(layout, name).__eq__ for name in _LAYOUT}


def _is_met(rule: Forbidden, facts: _Facts) -> bool:
    """Whether all that the rule names is known and as it says."""
    return all(
        name in facts and any(facts[name](value) for value in values) for name, values in rule.axes.items()
    )
