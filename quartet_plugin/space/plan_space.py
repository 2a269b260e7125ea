"""The study's search space: shape, then layout, schedule, split and mapping, legal by construction.

Every choice offers only what the earlier ones leave legal. Optuna requires that the choices of a parameter
never change, so a parameter whose choices depend on earlier ones has them, or the choice they depend on, in
its name. A parameter with one choice is not a parameter.
"""

from collections.abc import Mapping as MappingABC
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from quartet_plugin import __version__
from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.mapping.orders import STOCK, RankOrder, legal_orders, order_named, slots_of
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.measurement import Prediction
from quartet_plugin.model.plan import (
    Baseline,
    MadeFor,
    Mapping,
    NodeInfo,
    Plan,
    Provenance,
    ScheduleChoice,
    Split,
    stock_schedule,
)
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.scaling.shapes import BudgetRule, equal_shapes
from quartet_plugin.space.config import STOCK_NAMES, SearchConfig
from quartet_plugin.space.features import Axis, batching_features, locked_axes, no_custom_schedules
from quartet_plugin.space.layouts import (
    LayoutRules,
    bucket_sizes,
    fault_of_tensor_parallel,
    legal_layouts,
    requested_groups,
    schedules_of,
    stock_choice,
    undivided_request,
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
    """Predicts a plan's time for equal work over the baseline's, as `cost.relative_cost` does."""

    def __call__(self, plan: Plan, *, baseline: Plan, makespan: float | None) -> float:
        """The ratio; `makespan` is a custom schedule's, in forwards of one layer."""


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

    def decode(self, source: ParamSource, *, trial: int) -> Plan:
        """The plan of the source's choices. Always legal."""
        shape = self._shape(source)
        layout = self._layout(source, shape)
        order = None
        names = self.schedules_of(layout)
        name = _choose(source, f"schedule[{','.join(names)}]", names)
        if name in STOCK_NAMES:
            split = self._split(source, shape, layout)
            schedule = self._stock_schedule(source, layout)
        else:
            order = self._custom_order(source, shape, layout, name=name)
            split, schedule = order.split, ScheduleChoice(name="custom", custom=order.custom)
        mapping = self._mapping(source, layout)
        layout = self._with_buckets(source, shape, layout)
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
        makespan = None if order is None else order.makespan
        cost = self.relative_cost(plan, baseline=self.baseline, makespan=makespan)
        return replace(
            plan, prediction=Prediction(iteration_s=None, relative_cost=cost, peak_memory_bytes=None)
        )

    def params_of(self, plan: Plan) -> Params | None:
        """Choices that lead to `plan`; None where the space does not hold it.

        The end loads of a custom schedule are guessed; for a rare plan no guess is right.
        """
        for encoder in param_encoders(plan, orders_of=self.orders_of):
            try:
                decoded = self.decode(encoder, trial=plan.provenance.trial)
            except KeyError:
                continue
            if decoded.key == plan.key:
                return encoder.params
        return None

    def schedules_of(self, layout: Layout) -> tuple[str, ...]:
        """The schedules to choose from for `layout`, the stock one first where it is requested."""
        return schedules_of(layout, rules=self._rules())

    def refusal_of(self, plan: Plan) -> str | None:
        """The rule of the user that forbids the plan, although the space holds it; None without one."""
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
        index = known.index(choices)
        return ("layout" if index == 0 else f"layout.{index + 1}"), choices

    def orders_of(self, layout: Layout) -> tuple[RankOrder, ...]:
        """The rank orders to choose from for `layout`, the stock one first where it is requested."""
        if layout not in self._orders:
            self._orders[layout] = self._requested_orders(layout)
        return self._orders[layout]

    def _requested_orders(self, layout: Layout) -> tuple[RankOrder, ...]:
        stock = order_named(STOCK, layout=layout, nodes=self.nodes)
        if Axis.MAPPING in self.locked:
            return (stock,)
        if self.search.mapping is None:
            return legal_orders(layout, nodes=self.nodes) or (stock,)
        requested = []
        for name in self.search.mapping:
            try:
                requested.append(order_named(name, layout=layout, nodes=self.nodes))
            except PlanError:
                continue  # not an order of this layout
        return tuple(dict.fromkeys(requested)) or (stock,)

    def _shape(self, source: ParamSource) -> ModelShape:
        labels = [shape.label for shape in self.shapes]
        return self.shapes[labels.index(_choose(source, "shape", labels))]

    def _layout(self, source: ParamSource, shape: ModelShape) -> Layout:
        name, choices = self.layout_groups(shape)
        degrees = _choose(source, name, choices)
        candidates = [layout for layout in self.layouts[shape] if degree_label(layout) == degrees]
        sizes = list(dict.fromkeys(str(layout.micro_batch_size) for layout in candidates))
        size = _choose(source, f"micro_batch_size[{','.join(sizes)}]", sizes)
        candidates = [layout for layout in candidates if str(layout.micro_batch_size) == size]
        forms = [optimizer_label(layout) for layout in candidates]
        return candidates[forms.index(_choose(source, "optimizer", forms))]

    def _with_buckets(self, source: ParamSource, shape: ModelShape, layout: Layout) -> Layout:
        chosen: dict[str, Any] = {}
        for name, sizes in bucket_sizes(layout, shape=shape, rules=self._rules()).items():
            labels = [bucket_label(size) for size in sizes]
            chosen[name] = sizes[labels.index(_choose(source, f"{name}[{','.join(labels)}]", labels))]
        return replace(layout, **chosen)

    def _split(self, source: ParamSource, shape: ModelShape, layout: Layout) -> tuple[int, ...]:
        if layout.num_stages == 1:
            return (shape.num_layers,)
        fixed = self._fixed_split(source, shape, layout)
        if fixed is not None:
            return fixed
        return split_for_end_loads(
            shape.num_layers,
            num_devices=layout.pipeline_parallel,
            chunks=layout.virtual_stages,
            ends=_end_loads(source, shape),
        )

    def _fixed_split(self, source: ParamSource, shape: ModelShape, layout: Layout) -> tuple[int, ...] | None:
        """The split chosen out of those requested; None where the split is tuned."""
        fixed = self.fixed_splits(shape, layout)
        if fixed is None:
            return None
        labels = ["+".join(str(count) for count in counts) for counts in fixed]
        return fixed[labels.index(_choose(source, f"split[{','.join(labels)}]", labels))]

    def _custom_order(
        self, source: ParamSource, shape: ModelShape, layout: Layout, *, name: str
    ) -> CustomOrder:
        """The custom order of a schedule; where the split is tuned, both are for the source's end loads."""
        fixed = self._fixed_split(source, shape, layout)
        ends = None
        if fixed is None:
            ends = _end_loads(source, shape).rounded()
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
        """The requested splits that fit; None where the split is tuned."""
        names = ("stock",) if Axis.SPLIT in self.locked else self.search.split
        if names is None:
            return None
        splits = []
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
                splits.append(counts)
        return tuple(dict.fromkeys(splits))

    def _stock_schedule(self, source: ParamSource, layout: Layout) -> ScheduleChoice:
        if stock_schedule(layout) != "interleaved":
            return stock_choice(layout)
        groups = [str(group) for group in requested_groups(layout, rules=self._rules())]
        return stock_choice(layout, group=int(_choose(source, f"group[{','.join(groups)}]", groups)))

    def _mapping(self, source: ParamSource, layout: Layout) -> Mapping:
        orders = self.orders_of(layout)
        names = [order.name for order in orders]
        name = _choose(source, f"mapping[{degree_label(layout)}]", names)
        return orders[names.index(name)].mapping


def baseline_plan(job: TrainingJob, *, nodes: Sequence[NodeInfo], run: str, seed: int) -> Plan:
    """The user's own configuration as a plan; every plan of the run is made for the same job.

    Raises ConfigError for a model that has no split, PlanError where the report contradicts itself.
    """
    if job.split is None:
        raise ConfigError(
            "the model is not one list of like layers (hybrid or encoder-decoder): "
            "its stages cannot be planned; tune a GPTModel"
        )
    baseline = Baseline(layout=job.layout, split=job.split, schedule=job.schedule)
    return Plan(
        made_for=MadeFor(
            framework=job.framework,
            framework_version=job.framework_version,
            shape=job.shape,
            global_batch_size=job.global_batch_size,
            baseline=baseline,
            batching_features=batching_features(job.features) or None,
            world_size=job.layout.world_size,
            nodes=tuple(nodes),
        ),
        shape=job.shape,
        layout=baseline.layout,
        split=baseline.split,
        schedule=baseline.schedule,
        mapping=Mapping(slots=slots_of(nodes)),
        provenance=Provenance(run=run, trial=0, seed=seed, quartet_version=__version__),
    )


def build_space(
    job: TrainingJob,
    *,
    nodes: Sequence[NodeInfo],
    search: SearchConfig,
    run: str,
    seed: int,
    relative_cost: RelativeCost | None = None,
) -> Space:
    """The space around the user's job. Raises ConfigError where the search section leaves no plan."""
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
        num_devices = job.layout.world_size // job.layout.context_parallel
        fault = undivided_request(search, num_devices=num_devices) or fault_of_tensor_parallel(
            job.shape, rules=rules
        )
        if fault is not None:
            raise ConfigError(f"{fault}; choose another, or auto")
        raise ConfigError(
            f"search: no layout of {job.layout.world_size} processes, "
            f"global batch size {job.global_batch_size} and {job.shape.num_layers} layers "
            "fits what is asked; set more axes to auto, or forbid less"
        )
    return replace(draft, shapes=tuple(layouts), layouts=layouts)


def _degree_labels(layouts: Sequence[Layout]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(degree_label(layout) for layout in layouts))


def _end_loads(source: ParamSource, shape: ModelShape) -> EndLoads:
    embedding, head = source.unit_float(SPLIT_EMBEDDING), source.unit_float(SPLIT_HEAD)
    return EndLoads(embedding=embedding * shape.num_layers, head=head * shape.num_layers)


def _choose(source: ParamSource, name: str, choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else source.category(name, choices)
