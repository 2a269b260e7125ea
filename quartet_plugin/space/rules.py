"""The job, the nodes and the search section that the plans of a space must satisfy."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from quartet_plugin.mapping.order_rules import OrderRules
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import NodeInfo
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.space.config import SearchConfig
from quartet_plugin.space.features import WHOLE_NODES, Axis, objective_axes
from quartet_plugin.space.forbidden import Prohibitions
from quartet_plugin.space.knobs.cp_comm_type import HIERARCHICAL_SIZES, may_have_hierarchy
from quartet_plugin.space.knobs.token_dispatcher import TOKEN_DISPATCHER, is_flex, may_have_flex
from quartet_plugin.space.written_schedules import WrittenSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRules:
    """The job, the nodes and the search section that layouts must satisfy.

    `locked` has the axes that stay at stock, each with the feature that locks it. `no_custom_schedules` is
    the feature that rules custom schedules out, None where they are allowed. `written` are the schedules of
    the files that the search names, by file name. `is_planned`: nothing is launched, so that no command's own
    value is kept. `scale_up_devices` are the consecutive slots that fast links join, None where no file says
    it.
    """

    job: TrainingJob
    nodes: tuple[NodeInfo, ...]
    search: SearchConfig
    locked: Mapping[Axis, str] = field(default_factory=dict)
    no_custom_schedules: str | None = None
    written: Mapping[str, WrittenSchedule] = field(default_factory=dict)
    is_planned: bool = False
    scale_up_devices: int | None = None

    @property
    def joined_devices(self) -> int:
        """The number that a group must divide to stay inside fast links: a node's, where no file says it."""
        return self.scale_up_devices or self._smallest_node

    @property
    def _smallest_node(self) -> int:
        return math.gcd(*(node.num_slots for node in self.nodes))

    @property
    def slots_per_node(self) -> int:
        """The number that a TP group must divide: the greatest common divisor of the nodes' slots.

        Of a planned job it is what fast links join, so that no group leaves its node and domain.
        """
        return self.joined_devices if self.is_planned else self._smallest_node

    @property
    def order_rules(self) -> OrderRules:
        """What the orders of ranks keep, for the job's features and every setting that a plan may have.

        A study chooses the order before the dispatcher, and before sizes of hierarchical context parallelism.
        """
        return self._order_rules(keeps_experts=may_have_flex(self), has_hierarchy=may_have_hierarchy(self))

    def order_rules_of(self, layout: Layout) -> OrderRules:
        """What the orders of a layout keep: of a planned one, for its own dispatcher and sizes."""
        if not self.is_planned:
            return self.order_rules
        dispatcher = layout.setting(TOKEN_DISPATCHER.name) or self.job.setting(TOKEN_DISPATCHER.name)
        return self._order_rules(
            keeps_experts=is_flex(dispatcher, self),
            has_hierarchy=layout.setting(HIERARCHICAL_SIZES.name) is not None,
        )

    def _order_rules(self, *, keeps_experts: bool, has_hierarchy: bool) -> OrderRules:
        return OrderRules(
            keeps_nodes=has_hierarchy or not WHOLE_NODES.isdisjoint(self.job.features),
            keeps_experts=keeps_experts,
            domain_devices=self.scale_up_devices,
        )

    @property
    def prohibitions(self) -> Prohibitions:
        """The rules of `search.forbid`."""
        return Prohibitions(rules=self.search.forbid, job=self.job, nodes=self.nodes)

    def can_change_objective(self, layout: Layout) -> bool:
        """Whether the layout batches samples otherwise, in a job whose loss depends on it: class C."""
        command, axes = self.job.layout, objective_axes(self.job.features)
        return (Axis.MICRO_BATCH in axes and layout.micro_batch_size != command.micro_batch_size) or (
            Axis.DEGREES in axes and layout.data_parallel != command.data_parallel
        )
