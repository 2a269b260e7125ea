"""The study's search space: shape, then layout, schedule, split and mapping, legal by construction.

Every choice offers only what the earlier ones leave legal. Optuna requires that the choices of a parameter
never change, so a parameter whose choices depend on earlier ones has them, or the choice they depend on, in
its name. A parameter with one choice is not a parameter.
"""

from collections.abc import Mapping as MappingABC
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from quartet_plugin import __version__
from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.mapping.order_rules import OrderRules
from quartet_plugin.mapping.orders import (
    STOCK,
    RankOrder,
    legal_orders,
    listed_slots,
    order_named,
    slots_of,
)
from quartet_plugin.model.layout import Layout
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
from quartet_plugin.schedule.placement import Placement
from quartet_plugin.space.choices import ParamSource, choose
from quartet_plugin.space.config import SEARCHED, STOCK_NAMES, SearchConfig
from quartet_plugin.space.expert_stages import (
    ExpertLayers,
    fault_of_counts,
    fault_of_plan,
    fault_of_split,
    fault_on_any_ranks,
    split_with_experts,
    stock_placement,
)
from quartet_plugin.space.features import Axis, batching_features, locked_axes
from quartet_plugin.space.knobs.knob import KnobContext
from quartet_plugin.space.knobs.mtp_stage import (
    BEFORE_LAST,
    LAST,
    MTP_STAGE,
    may_be_before_last,
    mtp_stages_of,
)
from quartet_plugin.space.knobs.registry import BEFORE_SCHEDULE, OPTIONS
from quartet_plugin.space.knobs.virtual_stages import VIRTUAL_STAGES
from quartet_plugin.space.layouts import (
    fault_of_request,
    faults_of_written,
    legal_layouts,
    nearest_request,
    requested_groups,
    schedules_of,
    stock_choice,
    undivided_request,
    unused_request,
)
from quartet_plugin.space.order_exchanges import choose_order, lengths_to_choose
from quartet_plugin.space.param_sources import (
    SPLIT_EMBEDDING,
    SPLIT_HEAD,
    SPLIT_MTP,
    Params,
    degree_label,
    param_encoders,
    param_name,
    param_text,
)
from quartet_plugin.space.rules import LayoutRules
from quartet_plugin.space.schedules import CustomOrder, custom_order, placement_of
from quartet_plugin.space.searched_orders import ORDER, stored_order
from quartet_plugin.space.split_shifts import (
    choose_split,
    decoded_end_loads,
    lone_head_load_in,
    stated_split,
)
from quartet_plugin.space.written_schedules import WrittenSchedule, written_order
from quartet_plugin.split.layers import EndLoads, even_split, is_legal_split, split_for_end_loads

# Features of models whose first or last stage holds nothing beside its layers.
BARE_STAGES = ("bare_first_stage", "bare_last_stage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All plans of a run, made by `build_space`; `baseline` is the user's configuration.

    `written` are the schedules of the files that the search names, by file name; `is_planned` and
    `scale_up_devices` are as in `LayoutRules`.
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
    written: MappingABC[str, WrittenSchedule] = field(default_factory=dict)
    is_planned: bool = False
    scale_up_devices: int | None = None
    _orders: dict[object, tuple[RankOrder, ...]] = field(default_factory=dict)
    _schedules: dict[tuple[Layout, ModelShape], tuple[str, ...]] = field(default_factory=dict)
    _groups: dict[ModelShape, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    _by_degrees: dict[ModelShape, dict[str, list[Layout]]] = field(default_factory=dict)

    def decode(self, source: ParamSource, *, trial: int) -> Plan:
        """The plan of the source's choices. Always legal."""
        shape = self._shape(source)
        layout = self._layout(source, shape)
        names = self.schedules_of(layout, shape=shape)
        name = choose(source, schedule_param(names), names)
        if name in STOCK_NAMES:
            split = self._split(source, shape, layout)
            schedule = self._stock_schedule(source, layout)
        else:
            order = self._custom_order(source, shape, layout, name=name)
            split = Split(transformer_layers_per_stage=order.split)
            schedule = ScheduleChoice(name="custom", custom=order.custom)
        mapping = self._mapping(source, layout)
        layout = self._with_options(source, shape, layout, is_custom=schedule.custom is not None)
        return Plan(
            made_for=self.baseline.made_for,
            shape=shape,
            layout=layout,
            split=split,
            schedule=schedule,
            mapping=mapping,
            provenance=Provenance(run=self.run, trial=trial, seed=self.seed, quartet_version=__version__),
        )

    def schedule_name(self, params: Params, plan: Plan) -> str:
        """The schedule that `params`, which lead to `plan`, name; that of a searched order is `searched`."""
        names = self.schedules_of(plan.layout, shape=plan.shape)
        return names[0] if len(names) == 1 else str(params[schedule_param(names)])

    def params_of(self, plan: Plan) -> Params | None:
        """Choices that lead to `plan`; None where the space does not hold it.

        The end loads of a named custom schedule are guessed; for a rare plan no guess is right.
        """
        encoders = param_encoders(
            plan, orders_of=self.orders_of, lengths_of=self.run_lengths_of, written=tuple(self.written)
        )
        for encoder in encoders:
            try:
                decoded = self.decode(encoder, trial=plan.provenance.trial)
            except KeyError:
                continue
            if decoded.key == plan.key:
                return encoder.params
        return None

    def schedules_of(self, layout: Layout, *, shape: ModelShape) -> tuple[str, ...]:
        """The schedules to choose from for `layout`, the stock one first where it is requested.

        Where splits are fixed, the split of a file's schedule must be one of them.
        """
        key = (layout, shape)
        if key not in self._schedules:
            self._schedules[key] = self._schedules_of(layout, shape=shape)
        return self._schedules[key]

    def _schedules_of(self, layout: Layout, *, shape: ModelShape) -> tuple[str, ...]:
        names = schedules_of(layout, shape=shape, rules=self.rules())
        if self.job.mtp_layers:
            names = tuple(name for name in names if self._has_mtp_stage(name, layout, shape))
        if self._expert_layers:
            names = tuple(name for name in names if self._may_have_experts(name, layout, shape))
        if not self.written:
            return names
        fixed = self.fixed_splits(shape, layout)
        is_split = {
            name: fixed is None or file.split(shape.num_layers) in fixed
            for name, file in self.written.items()
        }
        return tuple(name for name in names if is_split.get(name, True))

    def refusal_of(self, plan: Plan) -> str | None:
        """The rule that forbids the plan, although the space holds it; None without one.

        It is one of the user's, or that a stage of a model without ends needs a layer, or a device experts.
        """
        counts = plan.split.transformer_layers_per_stage
        ends = (counts[0], counts[plan.split.mtp_stage_index])
        for feature, count, least in zip(BARE_STAGES, ends, self.least_of_end_stages, strict=True):
            if count < least:
                return f"split: {plan.split.label} leaves a stage without any layer ({feature})"
        if (fault := fault_of_plan(plan, self._expert_layers)) is not None:
            return fault
        rule = self.rules().prohibitions.of_plan(plan)
        return None if rule is None else f"search.forbid has {rule.label}"

    @property
    def least_of_end_stages(self) -> tuple[int, int]:
        """The fewest layers of the first and the last stage: 1 where it holds nothing else.

        With multi-token prediction on the stage before the last one, that stage is meant.
        """
        first, last = (int(feature in self.job.features) for feature in BARE_STAGES)
        return first, last

    def rules(self) -> LayoutRules:
        """The job, the nodes and the request, which the knobs look at."""
        return LayoutRules(
            job=self.job,
            nodes=self.nodes,
            search=self.search,
            locked=self.locked,
            no_custom_schedules=self.no_custom_schedules,
            written=self.written,
            is_planned=self.is_planned,
            scale_up_devices=self.scale_up_devices,
        )

    @property
    def order_rules(self) -> OrderRules:
        """What the orders of ranks keep, for the job's features and every dispatcher that a plan may have."""
        return self.rules().order_rules

    def layout_groups(self, shape: ModelShape) -> tuple[str, tuple[str, ...]]:
        """The layout parameter of `shape`: its name, and its choices (degrees, without the micro-batch)."""
        if not self._groups:
            labels = {other: _degree_labels(self.layouts[other]) for other in self.shapes}
            distinct = list(dict.fromkeys(labels.values()))
            for other, choices in labels.items():
                index = distinct.index(choices)
                self._groups[other] = ("layout" if index == 0 else f"layout.{index + 1}"), choices
        return self._groups[shape]

    def orders_of(self, layout: Layout) -> tuple[RankOrder, ...]:
        """The rank orders to choose from for `layout`, the stock one first where it is requested."""
        if layout.degrees not in self._orders:
            self._orders[layout.degrees] = self._requested_orders(layout)
        return self._orders[layout.degrees]

    def run_lengths_of(self, layout: Layout) -> tuple[int, ...]:
        """The lengths of the runs of slots that may be exchanged in these orders; none where they are all."""
        if Axis.MAPPING in self.locked or self.search.mapping is not None:
            return ()
        return lengths_to_choose(layout, nodes=self.nodes, rules=self.order_rules)

    def _requested_orders(self, layout: Layout) -> tuple[RankOrder, ...]:
        stock = order_named(STOCK, layout=layout, nodes=self.nodes)
        if Axis.MAPPING in self.locked:
            return (stock,)
        if self.search.mapping is None:
            return legal_orders(layout, nodes=self.nodes, rules=self.order_rules) or (stock,)
        requested = []
        for name in self.search.mapping:
            try:
                requested.append(order_named(name, layout=layout, nodes=self.nodes, rules=self.order_rules))
            except PlanError:
                continue  # not an order of this layout
        return tuple(dict.fromkeys(requested)) or (stock,)

    def _shape(self, source: ParamSource) -> ModelShape:
        labels = [shape.label_beside(self.job.shape) for shape in self.shapes]
        return self.shapes[labels.index(choose(source, "shape", labels))]

    def _layout(self, source: ParamSource, shape: ModelShape) -> Layout:
        name, choices = self.layout_groups(shape)
        degrees = choose(source, name, choices)
        candidates = self._layouts_with(shape, degrees)
        for knob in BEFORE_SCHEDULE:
            if knob is VIRTUAL_STAGES or not knob.is_of(self.job.framework):
                continue  # the former is one of the degrees
            texts = [param_text(knob, layout) for layout in candidates]
            distinct = list(dict.fromkeys(texts))
            chosen = choose(source, param_name(knob, distinct), distinct)
            candidates = [x for x, text in zip(candidates, texts, strict=True) if text == chosen]
        (layout,) = candidates
        return layout

    def _layouts_with(self, shape: ModelShape, degrees: str) -> list[Layout]:
        """The layouts of `shape` whose degrees have this label, in their order."""
        if not self._by_degrees:
            for other, layouts in self.layouts.items():
                labelled = self._by_degrees.setdefault(other, {})
                for layout in layouts:
                    labelled.setdefault(degree_label(layout), []).append(layout)
        return self._by_degrees[shape].get(degrees, [])

    def _with_options(
        self, source: ParamSource, shape: ModelShape, layout: Layout, *, is_custom: bool
    ) -> Layout:
        rules = self.rules()
        for knob in OPTIONS:
            values = knob.choices(KnobContext(layout=layout, shape=shape, rules=rules, is_custom=is_custom))
            if len(values) == 1:
                value = values[0]
            else:
                texts = [knob.text(value) for value in values]
                value = values[texts.index(choose(source, param_name(knob, texts), texts))]
            if value != knob.in_layout(layout):
                layout = knob.put(layout, value)
        return layout

    def mtp_stages_of(self, layout: Layout, *, shape: ModelShape) -> tuple[str, ...]:
        """The stages of multi-token prediction to choose from for a layout with a schedule of the framework.

        Without such layers it is the last stage. Where splits are fixed, those are left out that none has.
        """
        if not self.job.mtp_layers:
            return (LAST,)
        return tuple(
            stage
            for stage in mtp_stages_of(layout, self.rules())
            if self._has_split(shape, layout, is_mtp_before_last=stage == BEFORE_LAST)
        )

    def _has_mtp_stage(self, name: str, layout: Layout, shape: ModelShape) -> bool:
        """Whether a schedule has some stage for multi-token prediction: a custom one the last stage alone."""
        if name in STOCK_NAMES:
            return bool(self.mtp_stages_of(layout, shape=shape))
        return name in self.written or self._has_split(shape, layout)

    def _split(self, source: ParamSource, shape: ModelShape, layout: Layout) -> Split:
        if layout.num_stages == 1:
            return Split(transformer_layers_per_stage=(shape.num_layers,))
        stages = self.mtp_stages_of(layout, shape=shape)
        stage = choose(source, f"{MTP_STAGE.name}[{','.join(stages)}]", stages)
        counts = self._stock_counts(source, shape, layout, is_mtp_before_last=stage == BEFORE_LAST)
        return Split.of(counts, is_mtp_before_last=stage == BEFORE_LAST)

    def _stock_counts(
        self, source: ParamSource, shape: ModelShape, layout: Layout, *, is_mtp_before_last: bool
    ) -> tuple[int, ...]:
        """The layers of each stage under a schedule of the framework."""
        fixed = self._fixed_split(source, shape, layout, is_mtp_before_last=is_mtp_before_last)
        if fixed is not None:
            return fixed
        if is_mtp_before_last and layout.num_stages == 2:
            return (shape.num_layers, 0)
        lone_head_load = lone_head_load_in(shape, self.job.mtp_layers) if is_mtp_before_last else None
        origin = split_for_end_loads(
            shape.num_layers,
            num_devices=layout.pipeline_parallel,
            num_chunks=layout.virtual_stages,
            end_loads=_end_loads(source, shape, lone_head_load=lone_head_load),
        )
        moved = choose_split(source, origin, is_mtp_before_last=is_mtp_before_last)
        return self.with_experts(moved or origin, stock_placement(layout))

    def with_experts(self, split: tuple[int, ...], placement: Placement) -> tuple[int, ...]:
        """A split near to this one by which every pipeline rank has an expert layer, where each needs one.

        Where there is no such split, it is the same.
        """
        return split_with_experts(split, placement=placement, expert_layers=self._expert_layers)

    @property
    def _expert_layers(self) -> ExpertLayers:
        """The layers of which every device needs one."""
        return self.job.logged_expert_layers or ()

    def _may_have_experts(self, name: str, layout: Layout, shape: ModelShape) -> bool:
        """Whether some split has an expert layer on every device that the schedule places stages on."""
        if name in self.written:
            return True
        ranks, chunks = layout.pipeline_parallel, layout.virtual_stages
        placement = stock_placement(layout)
        if name == SEARCHED:
            placement = self.search.family_limits.placement_of(ranks, chunks) or placement
        elif name not in STOCK_NAMES:
            placement = placement_of(name, num_devices=ranks, num_chunks=chunks)
        split = self.with_experts(even_split(shape.num_layers, num_stages=layout.num_stages), placement)
        return fault_of_split(split, placement=placement, expert_layers=self._expert_layers) is None

    def _fixed_split(
        self, source: ParamSource, shape: ModelShape, layout: Layout, *, is_mtp_before_last: bool = False
    ) -> tuple[int, ...] | None:
        """The split chosen out of those requested; None where the split is tuned."""
        fixed = self.fixed_splits(shape, layout, is_mtp_before_last=is_mtp_before_last)
        if fixed is None:
            return None
        labels = ["+".join(str(count) for count in counts) for counts in fixed]
        return fixed[labels.index(choose(source, f"split[{','.join(labels)}]", labels))]

    def _custom_order(
        self, source: ParamSource, shape: ModelShape, layout: Layout, *, name: str
    ) -> CustomOrder:
        """The custom order of a schedule; where the split is tuned, both are for the source's end loads.

        Of a split with shifted boundaries, or of one that the source has, only the order is. A file says
        both. A searched order that the source has is taken as it is.
        """
        if name in self.written:
            return written_order(self.written[name], shape=shape, mtp_layers=self.job.mtp_layers)
        num_devices, num_chunks = layout.pipeline_parallel, layout.virtual_stages
        split, end_loads = self._fixed_split(source, shape, layout), None
        origin, is_fixed = split or (), split is not None
        if split is None:
            end_loads = _end_loads(source, shape).rounded()
            placement = placement_of(name, num_devices=num_devices, num_chunks=num_chunks)
            origin = split_for_end_loads(
                shape.num_layers,
                num_devices=num_devices,
                num_chunks=num_chunks,
                end_loads=end_loads,
                placement=placement,
            )
            split = choose_split(source, origin)
            if len(origin) == 2:
                split = stated_split(source, shape.num_layers)
        num_microbatches = layout.num_microbatches(self.job.global_batch_size)
        text = source.attribute(ORDER) if name == SEARCHED else None
        if text is not None:
            return stored_order(text, layout=layout, num_microbatches=num_microbatches, split=split or origin)
        order_of = partial(
            custom_order,
            name,
            shape=shape,
            num_devices=num_devices,
            num_chunks=num_chunks,
            num_microbatches=num_microbatches,
            end_loads=end_loads,
            mtp_layers=self.job.mtp_layers,
            limits=self.search.family_limits,
        )
        order = order_of(split=split)
        legal = order.split if is_fixed else self.with_experts(order.split, order.custom.placement)
        return order if legal == order.split else order_of(split=legal)

    def fixed_splits(
        self, shape: ModelShape, layout: Layout, *, is_mtp_before_last: bool = False
    ) -> tuple[tuple[int, ...], ...] | None:
        """The requested splits that fit; None where the split is tuned."""
        names = ("stock",) if Axis.SPLIT in self.locked else self.search.split
        if names is None:
            return None
        is_legal = partial(
            is_legal_split,
            num_layers=shape.num_layers,
            num_stages=layout.num_stages,
            is_mtp_before_last=is_mtp_before_last,
        )
        even = partial(
            even_split,
            shape.num_layers,
            num_stages=layout.num_stages,
            is_mtp_before_last=is_mtp_before_last,
        )
        splits = []
        for name in names:
            if name == "stock":
                counts = self.baseline.split.transformer_layers_per_stage
                if not is_legal(counts):
                    counts = even()
            elif name == "even":
                counts = even()
            else:
                counts = tuple(int(count) for count in name.split("+"))
            num_ranks = layout.pipeline_parallel
            if is_legal(counts) and fault_of_counts(counts, self._expert_layers, num_ranks=num_ranks) is None:
                splits.append(counts)
        return tuple(dict.fromkeys(splits))

    def has_split(self, shape: ModelShape, layout: Layout) -> bool:
        """Whether a requested split fits the layout, or none is needed."""
        return self._has_split(shape, layout) or bool(
            self.job.mtp_layers and self.mtp_stages_of(layout, shape=shape)
        )

    def _has_split(self, shape: ModelShape, layout: Layout, *, is_mtp_before_last: bool = False) -> bool:
        """The same of splits with multi-token prediction on one of its stages."""
        if layout.num_stages == 1:
            return True
        return self.fixed_splits(shape, layout, is_mtp_before_last=is_mtp_before_last) != ()

    def _stock_schedule(self, source: ParamSource, layout: Layout) -> ScheduleChoice:
        if stock_schedule(layout) != "interleaved":
            return stock_choice(layout)
        groups = [str(group) for group in requested_groups(layout, rules=self.rules())]
        return stock_choice(layout, group=int(choose(source, f"group[{','.join(groups)}]", groups)))

    def _mapping(self, source: ParamSource, layout: Layout) -> Mapping:
        orders = self.orders_of(layout)
        names = [order.name for order in orders]
        name = choose(source, f"mapping[{degree_label(layout)}]", names)
        order = orders[names.index(name)]
        lengths = self.run_lengths_of(layout)
        return choose_order(source, order, lengths=lengths, layout=layout, rules=self.order_rules)


def baseline_plan(job: TrainingJob, *, nodes: Sequence[NodeInfo], run: str, seed: int) -> Plan:
    """The user's configuration as a plan; every plan of the run is made for the same job.

    Raises ConfigError for a model that has no split, PlanError where the report contradicts itself.
    """
    if job.split is None:
        raise ConfigError(
            "the model is not one list of layers (encoder-decoder): its stages cannot be planned; "
            "tune a GPTModel or a HybridModel"
        )
    if job.mtp_layers and 0 in job.split.transformer_layers_per_stage[1 : job.split.mtp_stage_index]:
        raise ConfigError(
            "--pipeline-model-parallel-layout: a stage has no layers beside multi-token prediction; put its "
            "layers on the last stage (Ett|tmL), or on the stage before the last one (Ett|tm|L)"
        )
    baseline = Baseline(layout=job.layout, split=job.split, schedule=job.schedule)
    return Plan(
        made_for=MadeFor(
            framework=job.framework,
            framework_version=job.framework_version,
            shape=job.shape,
            global_batch_size=job.global_batch_size,
            baseline=baseline,
            mtp_layers=job.mtp_layers,
            precision=job.product_precision,
            experts=job.experts,
            latent_attention=job.latent,
            packed=job.packed,
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


def schedule_param(names: Sequence[str]) -> str:
    """The parameter that chooses among schedules."""
    return f"schedule[{','.join(names)}]"


def build_space(
    job: TrainingJob,
    *,
    nodes: Sequence[NodeInfo],
    search: SearchConfig,
    run: str,
    seed: int,
    written: MappingABC[str, WrittenSchedule] | None = None,
    is_planned: bool = False,
    scale_up_devices: int | None = None,
) -> Space:
    """The space around the user's job; `written` are the schedules of the files that the search names.

    `scale_up_devices` are the consecutive slots that fast links join, where a cluster file says it.
    Raises ConfigError where the search section leaves no plan, or no layout for one of these files.
    """
    baseline = baseline_plan(job, nodes=nodes, run=run, seed=seed)
    locked = locked_axes(job.features, change_class=search.change_class)
    shapes: tuple[ModelShape, ...] = (job.shape,)
    if search.scaling is not None and Axis.SCALING not in locked:
        rule = BudgetRule(**search.scaling.model_dump())
        rule.check_proportions(job.shape)
        shapes = equal_shapes(job.shape, rule=rule)
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
        no_custom_schedules=job.no_custom_schedules,
        written=written or {},
        is_planned=is_planned,
        scale_up_devices=scale_up_devices,
    )
    _check_splits(draft)
    _check_orders(draft)
    rules = draft.rules()
    layouts = {}
    for shape in shapes:
        kept = tuple(
            layout
            for layout in legal_layouts(shape, rules=rules)
            if draft.has_split(shape, layout) and draft.schedules_of(layout, shape=shape)
        )
        if kept:
            layouts[shape] = kept
    check_written(draft, layouts)
    if not layouts:
        num_devices = job.layout.world_size // job.layout.context_parallel
        fault = undivided_request(search, num_devices=num_devices) or fault_of_request(job.shape, rules=rules)
        nearest = nearest_request(job.shape, rules=rules)
        if fault is not None:
            raise ConfigError(f"{fault}{nearest}; choose another, or auto")
        raise ConfigError(
            f"search: no layout of {job.layout.world_size} processes, "
            f"global batch size {job.global_batch_size} and {job.shape.num_layers} layers "
            f"fits what is asked{nearest}; set more axes to auto, or forbid less"
        )
    unused = unused_request(layouts, rules=rules) or _unused_split(draft, layouts)
    unused = unused or _unused_order(draft, layouts)
    if unused is not None:
        raise ConfigError(unused)
    return replace(draft, shapes=tuple(layouts), layouts=layouts, _groups={}, _by_degrees={})


def check_written(space: Space, layouts: MappingABC[ModelShape, Sequence[Layout]]) -> None:
    """Raises ConfigError for a file whose schedule none of the layouts has, naming what differs least."""
    offered = {
        name
        for shape, legal in layouts.items()
        for layout in legal
        for name in (space.schedules_of(layout, shape=shape) if space.written else ())
    }
    for name in space.written.keys() - offered:
        reason = space.no_custom_schedules or space.locked.get(Axis.SCHEDULE)
        if reason is not None:
            raise ConfigError(f"search.schedule: {name}: custom schedules cannot run, because of {reason}")
        free = replace(space.rules(), search=space.search.model_copy(update={"schedule": None}), written={})
        faults = [
            faults_of_written(space.written[name], layout, shape=shape, job=space.job)
            for shape in space.shapes
            for layout in legal_layouts(shape, rules=free)
        ]
        nearest = min(faults, key=len, default=[])
        rule = nearest[0] if nearest else "its layouts or its split are ruled out by the other keys of search"
        raise ConfigError(f"search.schedule: {name}: {rule}")


def _check_splits(space: Space) -> None:
    """Raises ConfigError for a split by numbers that no shape can have, on any number of stages."""
    sums = sorted({shape.num_layers for shape in space.shapes})
    for name, counts in _written_splits(space).items():
        rule = None
        if sum(counts) not in sums:
            rule = f"must sum to the layers ({' or '.join(map(str, sums))}), not {sum(counts)}"
        elif 0 in counts[1:-1] and not _is_before_last(counts, space):
            rule = "every stage between the first and the last needs a layer"
        else:
            rule = fault_on_any_ranks(counts, space.job.logged_expert_layers or ())
        if rule is not None:
            raise ConfigError(f"search.split: {name}; {rule}")


def _is_before_last(counts: tuple[int, ...], space: Space) -> bool:
    """Whether a split may have multi-token prediction on a stage of its own, before the head alone."""
    return may_be_before_last(space.rules()) and is_legal_split(
        counts, num_layers=sum(counts), num_stages=len(counts), is_mtp_before_last=True
    )


def _unused_split(space: Space, layouts: MappingABC[ModelShape, Sequence[Layout]]) -> str | None:
    """That no layout has the stages of any requested split; None where one has, or a split goes by name."""
    written = _written_splits(space)
    if not written or len(written) < len(space.search.split):
        return None
    offered = {(shape.num_layers, layout.num_stages) for shape, kept in layouts.items() for layout in kept}
    if any((sum(counts), len(counts)) in offered for counts in written.values()):
        return None
    name, counts = next(iter(written.items()))
    return f"search.split: {name}; no layout of the search has {len(counts)} stages for {sum(counts)} layers"


def _written_splits(space: Space) -> dict[str, tuple[int, ...]]:
    """The requested splits by numbers; none where the split is kept."""
    names = () if Axis.SPLIT in space.locked else space.search.split or ()
    return {name: tuple(map(int, name.split("+"))) for name in names if name not in (STOCK, "even")}


def _check_orders(space: Space) -> None:
    """Raises ConfigError for a list of slots that are not those of the nodes."""
    for name in space.search.mapping or ():
        if name[0].isdigit() and Axis.MAPPING not in space.locked:
            try:
                listed_slots(name, nodes=space.nodes)
            except PlanError as error:
                raise ConfigError(f"search.{error}") from error


def _unused_order(space: Space, layouts: MappingABC[ModelShape, Sequence[Layout]]) -> str | None:
    """The rule by which no layout has any of the requested orders; None where one has."""
    if Axis.MAPPING in space.locked:
        return None
    fault = None
    distinct = {layout.degrees: layout for kept in layouts.values() for layout in kept}
    for name in space.search.mapping or ():
        for layout in distinct.values():
            try:
                order_named(name, layout=layout, nodes=space.nodes, rules=space.order_rules)
            except PlanError as error:
                fault = fault or f"search.{error}"
            else:
                return None
    return fault


def _degree_labels(layouts: Sequence[Layout]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(degree_label(layout) for layout in layouts))


def _end_loads(source: ParamSource, shape: ModelShape, *, lone_head_load: float | None = None) -> EndLoads:
    """The source's end loads; `lone_head_load` is that of a head that is alone on the last stage."""
    last = SPLIT_HEAD if lone_head_load is None else SPLIT_MTP
    shares = source.unit_float(SPLIT_EMBEDDING), source.unit_float(last)
    return decoded_end_loads(shares, shape.num_layers, lone_head_load=lone_head_load)
