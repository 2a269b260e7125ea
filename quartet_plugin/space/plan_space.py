"""The study's search space: shape, then layout, schedule, split and mapping, legal by construction.

Every choice is made from what the earlier ones leave legal. Optuna asks that the choices of a parameter
never change, so a parameter whose choices depend on earlier ones carries them, or the choice they depend
on, in its name. A parameter with one choice is not a parameter.
"""

from collections.abc import Mapping as MappingABC
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from quartet_plugin import __version__
from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.mapping.orders import STOCK, RankOrder, order_named, orders
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.measurement import Prediction
from quartet_plugin.model.plan import Mapping, NodeInfo, Plan, Provenance, ScheduleChoice, Split
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.scaling.shapes import BudgetRule, equal_shapes
from quartet_plugin.space.baseline import baseline_plan
from quartet_plugin.space.config import STOCK_NAMES, SearchConfig
from quartet_plugin.space.features import Axis, locked_axes, no_custom_schedules
from quartet_plugin.space.layouts import (
    LayoutRules,
    asked_groups,
    bucket_sizes,
    legal_layouts,
    schedules_of,
    stock_schedule,
)
from quartet_plugin.space.param_sources import (
    SPLIT_EMBEDDING,
    SPLIT_HEAD,
    Params,
    ParamSource,
    bucket_label,
    degree_label,
    optimizer_label,
    param_encoders,
)
from quartet_plugin.space.schedules import CustomOrder, custom_order
from quartet_plugin.split.layers import EndLoads, even_split, is_legal_split, split_for_end_loads


class RelativeCost(Protocol):
    """Predicts a plan's time for equal work over the baseline's; `cost.estimate.relative_cost` is one."""

    def __call__(self, plan: Plan, *, baseline: Plan, makespan: float | None) -> float:
        """`makespan` is a custom schedule's, in forwards of one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All plans of a run, made by `build_space`; `baseline` is the user's own configuration.

    With `relative_cost` every plan carries its prediction.
    """

    job: TrainingJob
    nodes: tuple[NodeInfo, ...]
    search: SearchConfig
    run: str
    seed: int
    baseline: Plan
    locked: MappingABC[Axis, str]
    shapes: tuple[ModelShape, ...]
    layouts: MappingABC[ModelShape, tuple[Layout, ...]]
    no_custom_schedules: str | None = None
    relative_cost: RelativeCost | None = None
    _orders: dict[Layout, tuple[RankOrder, ...]] = field(default_factory=dict)

    def decode(self, choose: ParamSource, *, trial: int) -> Plan:
        """The plan of the choices. Always legal."""
        shape = self._shape(choose)
        layout = self._layout(choose, shape)
        own = None
        names = self.schedules_of(layout)
        name = _choose(choose, f"schedule[{','.join(names)}]", names)
        if name in STOCK_NAMES:
            split = self._split(choose, shape, layout)
            schedule = self._stock_schedule(choose, layout)
        else:
            own = self._custom_order(choose, shape, layout, name=name)
            split, schedule = own.split, ScheduleChoice(name="custom", custom=own.custom)
        mapping = self._mapping(choose, layout)
        layout = self._with_buckets(choose, shape, layout)
        plan = Plan(
            made_for=self.baseline.made_for,
            shape=shape,
            layout=layout,
            split=Split(transformer_layers_per_stage=split),
            schedule=schedule,
            mapping=mapping,
            provenance=Provenance(run=self.run, trial=trial, seed=self.seed, quartet_version=__version__),
        )
        if self.relative_cost is None:
            return plan
        makespan = None if own is None else own.makespan
        cost = self.relative_cost(plan, baseline=self.baseline, makespan=makespan)
        return replace(
            plan, prediction=Prediction(iteration_s=None, relative_cost=cost, peak_memory_bytes=None)
        )

    def params_of(self, plan: Plan) -> Params | None:
        """Choices that lead to `plan`; None where the space does not hold it.

        Of a schedule of ours the weights of the ends are guessed; a rare plan cannot be read off.
        """
        for recorder in param_encoders(plan, orders_of=self.orders_of):
            try:
                made = self.decode(recorder, trial=plan.provenance.trial)
            except KeyError:
                continue
            if made.key == plan.key:
                return recorder.params
        return None

    def schedules_of(self, layout: Layout) -> tuple[str, ...]:
        """The schedules to choose from for `layout`, the framework's own first where it is asked for."""
        return schedules_of(layout, rules=self._rules())

    def refusal_of(self, plan: Plan) -> str | None:
        """Why the user does not want the plan, although the space holds it."""
        rule = self._rules().prohibitions.of_plan(plan)
        return None if rule is None else f"search.forbid has {rule.label}"

    def _rules(self) -> LayoutRules:
        return LayoutRules(
            job=self.job,
            nodes=self.nodes,
            search=self.search,
            locked=frozenset(self.locked),
            no_custom_schedules=self.no_custom_schedules,
        )

    def layout_groups(self, shape: ModelShape) -> tuple[str, tuple[str, ...]]:
        """The layout parameter of `shape`: its name, and its choices (degrees, without the micro-batch)."""
        choices = _degree_labels(self.layouts[shape])
        known: list[tuple[str, ...]] = []
        for other in self.shapes:
            labels = _degree_labels(self.layouts[other])
            if labels not in known:
                known.append(labels)
        at = known.index(choices)
        return ("layout" if at == 0 else f"layout.{at + 1}"), choices

    def orders_of(self, layout: Layout) -> tuple[RankOrder, ...]:
        """The rank orders to choose from for `layout`, the stock one first where it is asked for."""
        if layout not in self._orders:
            self._orders[layout] = self._find_orders(layout)
        return self._orders[layout]

    def _find_orders(self, layout: Layout) -> tuple[RankOrder, ...]:
        stock = order_named(STOCK, layout=layout, nodes=self.nodes)
        if Axis.MAPPING in self.locked:
            return (stock,)
        if self.search.mapping is None:
            return orders(layout, nodes=self.nodes) or (stock,)
        found = []
        for name in self.search.mapping:
            try:
                found.append(order_named(name, layout=layout, nodes=self.nodes))
            except PlanError:
                continue  # asked for, but not for this layout
        return tuple(dict.fromkeys(found)) or (stock,)

    def _shape(self, choose: ParamSource) -> ModelShape:
        labels = [shape.label for shape in self.shapes]
        return self.shapes[labels.index(_choose(choose, "shape", labels))]

    def _layout(self, choose: ParamSource, shape: ModelShape) -> Layout:
        name, choices = self.layout_groups(shape)
        degrees = _choose(choose, name, choices)
        candidates = [layout for layout in self.layouts[shape] if degree_label(layout) == degrees]
        sizes = list(dict.fromkeys(str(layout.micro_batch_size) for layout in candidates))
        size = _choose(choose, f"micro_batch_size[{','.join(sizes)}]", sizes)
        candidates = [layout for layout in candidates if str(layout.micro_batch_size) == size]
        forms = [optimizer_label(layout) for layout in candidates]
        return candidates[forms.index(_choose(choose, "optimizer", forms))]

    def _with_buckets(self, choose: ParamSource, shape: ModelShape, layout: Layout) -> Layout:
        found: dict[str, Any] = {}
        for name, sizes in bucket_sizes(layout, shape=shape, rules=self._rules()).items():
            labels = [bucket_label(size) for size in sizes]
            found[name] = sizes[labels.index(_choose(choose, f"{name}[{','.join(labels)}]", labels))]
        return replace(layout, **found)

    def _split(self, choose: ParamSource, shape: ModelShape, layout: Layout) -> tuple[int, ...]:
        if layout.num_stages == 1:
            return (shape.num_layers,)
        fixed = self._fixed_split(choose, shape, layout)
        if fixed is not None:
            return fixed
        return split_for_end_loads(
            shape.num_layers,
            num_devices=layout.pipeline_parallel,
            chunks=layout.virtual_stages,
            ends=_end_loads(choose, shape),
        )

    def _fixed_split(self, choose: ParamSource, shape: ModelShape, layout: Layout) -> tuple[int, ...] | None:
        """The split chosen out of those asked for; None where the split is tuned."""
        fixed = self.fixed_splits(shape, layout)
        if fixed is None:
            return None
        labels = ["+".join(str(count) for count in counts) for counts in fixed]
        return fixed[labels.index(_choose(choose, f"split[{','.join(labels)}]", labels))]

    def _custom_order(
        self, choose: ParamSource, shape: ModelShape, layout: Layout, *, name: str
    ) -> CustomOrder:
        """A schedule of ours; where the split is tuned, both for ends as heavy as the sampler says."""
        fixed = self._fixed_split(choose, shape, layout)
        ends = None
        if fixed is None:
            ends = _end_loads(choose, shape).rounded()
        return custom_order(
            name,
            shape=shape,
            num_devices=layout.pipeline_parallel,
            chunks=layout.virtual_stages,
            num_microbatches=layout.num_microbatches(self.job.global_batch_size),
            ends=ends,
            split=fixed,
        )

    def fixed_splits(self, shape: ModelShape, layout: Layout) -> tuple[tuple[int, ...], ...] | None:
        """The splits asked for that fit; None where the split is tuned."""
        names = ("stock",) if Axis.SPLIT in self.locked else self.search.split
        if names is None:
            return None
        found = []
        for name in names:
            if name == "stock":
                counts = self.baseline.split.transformer_layers_per_stage
                if not is_legal_split(counts, num_layers=shape.num_layers, num_stages=layout.num_stages):
                    counts = even_split(shape.num_layers, num_stages=layout.num_stages)
            elif name == "even":
                counts = even_split(shape.num_layers, num_stages=layout.num_stages)
            else:
                counts = tuple(int(count) for count in name.split("+"))
            if is_legal_split(counts, num_layers=shape.num_layers, num_stages=layout.num_stages):
                found.append(counts)
        return tuple(dict.fromkeys(found))

    def _stock_schedule(self, choose: ParamSource, layout: Layout) -> ScheduleChoice:
        name = stock_schedule(layout)
        if name != "interleaved":
            return ScheduleChoice(name=name)
        groups = [str(group) for group in asked_groups(layout, rules=self._rules())]
        group = _choose(choose, f"group[{','.join(groups)}]", groups)
        return ScheduleChoice(name=name, group=int(group))

    def _mapping(self, choose: ParamSource, layout: Layout) -> Mapping:
        found = self.orders_of(layout)
        names = [order.name for order in found]
        name = _choose(choose, f"mapping[{degree_label(layout)}]", names)
        return found[names.index(name)].mapping


def build_space(
    job: TrainingJob,
    *,
    nodes: Sequence[NodeInfo],
    search: SearchConfig,
    run: str,
    seed: int,
    relative_cost: RelativeCost | None = None,
) -> Space:
    """The space around the user's job. Raises ConfigError where what was asked leaves no plan."""
    baseline = baseline_plan(job, nodes=nodes, run=run, seed=seed)
    locked = locked_axes(job.features, change_class=search.change_class)
    shapes: tuple[ModelShape, ...] = (job.shape,)
    if search.scaling is not None and Axis.SCALING not in locked:
        shapes = equal_shapes(job.shape, rule=BudgetRule(**search.scaling.model_dump()))
    draft = Space(
        job=job,
        nodes=tuple(nodes),
        search=search,
        run=run,
        seed=seed,
        baseline=baseline,
        locked=locked,
        shapes=shapes,
        layouts={},
        no_custom_schedules=no_custom_schedules(job.features),
        relative_cost=relative_cost,
    )
    rules = draft._rules()
    layouts = {}
    for shape in shapes:
        kept = tuple(
            layout
            for layout in legal_layouts(shape, rules=rules)
            if draft.fixed_splits(shape, layout) != () or layout.num_stages == 1
        )
        if kept:
            layouts[shape] = kept
    if not layouts:
        raise ConfigError(
            f"search: no layout of {job.layout.world_size} processes, "
            f"global batch size {job.global_batch_size} and {job.shape.num_layers} layers "
            "fits what is asked; set more axes to auto, or forbid less"
        )
    return replace(draft, shapes=tuple(layouts), layouts=layouts)


def _degree_labels(layouts: Sequence[Layout]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(degree_label(layout) for layout in layouts))


def _end_loads(choose: ParamSource, shape: ModelShape) -> EndLoads:
    embedding, head = choose.unit_float(SPLIT_EMBEDDING), choose.unit_float(SPLIT_HEAD)
    return EndLoads(embedding=embedding * shape.num_layers, head=head * shape.num_layers)


def _choose(choose: ParamSource, name: str, choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else choose.category(name, choices)
