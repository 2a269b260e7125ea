"""The rules of `search.forbid`: judged for a plan as soon as its axes are known, and for a table of layouts.

A rule about layouts, or about layouts and schedules, takes those out of the space, so that none is proposed.
What any other rule meets is refused as a complete plan, before it is launched.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.mapping.orders import order_named
from quartet_plugin.model.costs import IntArray
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import STOCK, NodeInfo, Plan
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.space.config import SEARCHED, TABLE_SCHEDULES, Forbidden
from quartet_plugin.space.knobs.knob import LayoutKnob, Value
from quartet_plugin.space.knobs.mtp_stage import MTP_STAGE
from quartet_plugin.space.knobs.registry import BEFORE_SCHEDULE, DEGREES, OPTIONS
from quartet_plugin.split.layers import even_split

# The columns of a table of layouts that rules are about.
_COLUMNS = ("tensor_parallel", "pipeline_parallel", "data_parallel", "virtual_stages", "micro_batch_size")

# Whether an axis has a value, for each axis that is known: one answer, or one a row of a table.
type _Facts = Mapping[str, Callable[[Any], Any]]


def _is_met(rule: Forbidden, facts: _Facts) -> Any:
    """Whether every axis that the rule names is known and has one of the rule's values."""
    if any(axis not in facts for axis in rule.axes):
        return False
    return reduce(and_, (reduce(or_, map(facts[axis], values)) for axis, values in rule.axes.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prohibitions:
    """The rules over the plans of one job. Each method returns the first rule that is met, None for none."""

    rules: Sequence[Forbidden]
    job: TrainingJob
    nodes: tuple[NodeInfo, ...]

    def of_layout(self, layout: Layout) -> Forbidden | None:
        """The first rule that names nothing but axes of the layout."""
        return self._first(lambda: self._layout_facts(layout))

    def of_schedule(self, layout: Layout, name: str) -> Forbidden | None:
        """The first rule about layouts and schedules alone; `name` is the schedule's in the space."""
        return self._first(lambda: {**self._layout_facts(layout), "schedule": self._is_schedule(name)})

    def of_plan(self, plan: Plan) -> Forbidden | None:
        """The first of all rules. The baseline is measured whatever they say; ask about other plans."""
        return self._first(lambda: self._facts(plan))

    def of_mapping(self, plan: Plan) -> Forbidden | None:
        """The first rule that the plan meets with any split."""
        return self._first(
            lambda: {axis: fact for axis, fact in self._facts(plan).items() if axis != "split"}
        )

    def _first(self, facts_of: Callable[[], _Facts]) -> Forbidden | None:
        """Called for every choice of a study; most studies have no rules, and then no facts are computed."""
        if not self.rules:
            return None
        facts = facts_of()
        return next((rule for rule in self.rules if _is_met(rule, facts)), None)

    def _facts(self, plan: Plan) -> _Facts:
        custom = plan.schedule.custom
        name = plan.schedule.name if custom is None else custom.named or SEARCHED
        return {
            **self._layout_facts(plan.layout),
            **{knob.name: _equals(self._setting(plan.layout, knob)) for knob in OPTIONS},
            "shape": plan.shape.label.__eq__,
            "schedule": self._is_schedule(name),
            "group": lambda group: plan.schedule.group == group,
            MTP_STAGE.name: _equals(MTP_STAGE.value_of(plan)),
            "split": lambda split: self._is_split(plan, split),
            "mapping": lambda order: self._is_mapped(plan, order),
        }

    def _layout_facts(self, layout: Layout) -> dict[str, Callable[[Any], bool]]:
        """What is known before the settings are chosen."""
        return {knob.name: _equals(knob.in_layout(layout)) for knob in (*DEGREES, *BEFORE_SCHEDULE)}

    def _setting(self, layout: Layout, knob: LayoutKnob) -> Value | None:
        """A setting's value in a plan: its own, or the command's."""
        value = knob.in_layout(layout)
        return self.job.setting(knob.name) if value is None else value

    def _is_schedule(self, name: str) -> Callable[[str], bool]:
        stock = self.job.schedule.name
        return lambda word: name == (stock if word == STOCK else word)

    def _is_split(self, plan: Plan, word: str) -> bool:
        split = plan.split.transformer_layers_per_stage
        if word == STOCK:
            return self.job.split is not None and split == self.job.split.transformer_layers_per_stage
        if word == "even":
            return split == even_split(
                plan.shape.num_layers,
                num_stages=len(split),
                is_mtp_before_last=bool(plan.split.mtp_before_last),
            )
        return plan.split.label == word

    def _is_mapped(self, plan: Plan, word: str) -> bool:
        try:
            order = order_named(word, layout=plan.layout, nodes=self.nodes)
        except PlanError:
            return False  # not an order that this layout can have
        return order.mapping == plan.mapping


def _equals(value: Value | None) -> Callable[[Any], bool]:
    return lambda other: other == value


def check_table_rules(rules: Sequence[Forbidden]) -> None:
    """Raises ConfigError for a rule over what a plan without a run does not choose."""
    for rule in rules:
        fault = _fault_in_table(rule)
        if fault is not None:
            raise ConfigError(f"search.forbid: {rule.label}: {fault}")


def table_rules(rules: Sequence[Forbidden]) -> tuple[Forbidden, ...]:
    """The rules over nothing but what a plan without a run chooses."""
    return tuple(rule for rule in rules if _fault_in_table(rule) is None)


def _fault_in_table(rule: Forbidden) -> str | None:
    """What in a rule a plan without a run does not choose, and what it does; None where it has nothing."""
    for axis, values in rule.axes.items():
        if axis not in (*_COLUMNS, "schedule"):
            return (
                f"{axis}; a rule of `quartet plan` may use only {', '.join(_COLUMNS)} and schedule; use "
                "`quartet tune` for other axes"
            )
        unknown = [value for value in values if axis == "schedule" and value not in TABLE_SCHEDULES]
        if unknown:
            named = f"{', '.join(TABLE_SCHEDULES[:-1])} or {TABLE_SCHEDULES[-1]}"
            return f"{unknown[0]}; `quartet plan` supports {named}"
    return None


def forbidden_rows(
    rules: Sequence[Forbidden], columns: Mapping[str, IntArray], *, num_rows: int
) -> NDArray[np.bool_]:
    """Whether each row of a table of layouts meets a rule [num_rows].

    `columns` has the rows' values by axis, schedules as indices of `TABLE_SCHEDULES`.
    """
    facts: dict[str, Callable[[Any], Any]] = {name: columns[name].__eq__ for name in _COLUMNS}
    facts["schedule"] = lambda name: columns["schedule"] == TABLE_SCHEDULES.index(name)
    return reduce(or_, (_is_met(rule, facts) for rule in rules), np.zeros(num_rows, dtype=np.bool_))
