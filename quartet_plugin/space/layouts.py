"""The parallel layouts a job can have: every choice of the layout's knobs that is legal for the framework."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.frameworks import capabilities
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import STOCK, ScheduleChoice, stock_schedule
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.space.config import CUSTOM_NAMES, STOCK_NAMES, SearchConfig
from quartet_plugin.space.expert_stages import fault_of_split
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.context_parallel import CONTEXT_PARALLEL
from quartet_plugin.space.knobs.cp_comm_type import has_no_type
from quartet_plugin.space.knobs.divisors import nearest_words
from quartet_plugin.space.knobs.expert_parallel import EXPERT_PARALLEL
from quartet_plugin.space.knobs.knob import KnobContext, LayoutKnob, SettingKnob, Value
from quartet_plugin.space.knobs.micro_batch_size import MICRO_BATCH_SIZE
from quartet_plugin.space.knobs.mtp_stage import (
    BEFORE_LAST,
    MTP_STAGE,
    fault_of_before_last,
    may_be_last,
    mtp_stages_of,
)
from quartet_plugin.space.knobs.pipeline_parallel import most_stages
from quartet_plugin.space.knobs.registry import BEFORE_SCHEDULE, DEGREES, LAYOUT_KNOBS, OPTIONS, SETTINGS
from quartet_plugin.space.knobs.sequence_parallel import divides_sequence
from quartet_plugin.space.knobs.tensor_parallel import TENSOR_PARALLEL
from quartet_plugin.space.knobs.tensor_partition import TENSOR_PARTITION
from quartet_plugin.space.knobs.virtual_stages import VIRTUAL_STAGES
from quartet_plugin.space.option_values import option_values
from quartet_plugin.space.rules import LayoutRules
from quartet_plugin.space.schedules import MAX_SEARCHED_ACTIONS, custom_schedules_of
from quartet_plugin.space.written_schedules import WrittenSchedule

MAX_GROUPS = 8


def legal_layouts(shape: ModelShape, *, rules: LayoutRules) -> tuple[Layout, ...]:
    """Every layout for `shape`, in a fixed order; the baseline's is among them unless it was ruled out."""
    layouts = (
        layout
        for degrees, choices in choices_by_degrees(shape, rules=rules)
        for layout in _of_choices(degrees, choices, shape, rules)
    )
    return tuple(dict.fromkeys(layout for layout in layouts if _runs(layout, shape=shape, rules=rules)))


def choices_by_degrees(
    shape: ModelShape, *, rules: LayoutRules
) -> Iterator[tuple[Layout, dict[LayoutKnob, tuple[Value | None, ...]]]]:
    """The legal degrees in a fixed order, each with the choices of other knobs before the schedule.

    They are those whose choices depend on degrees alone, so that a layout takes any of them; the partition of
    a layer depends on the micro-batch, too. Knobs that the framework does not have are not there. Degrees
    with which a kept micro-batch does not divide the batch are left out, and those that the command's
    communication of shared sequences does not have.
    """
    # Chunks need a pipeline, which the degrees are about to decide.
    bare = replace(rules.job.layout, virtual_stages=1)
    has = [knob for knob in BEFORE_SCHEDULE if knob.is_of(rules.job.framework)]
    knobs = [knob for knob in has if knob is not TENSOR_PARTITION]
    for degrees in chosen_layouts([bare], DEGREES, shape, rules):
        layout = _of_degrees(degrees, shape, rules)
        context = KnobContext(layout=layout, shape=shape, rules=rules)
        # A kept value is a knob's only choice, whatever rule it breaks.
        if Axis.MICRO_BATCH in rules.locked and MICRO_BATCH_SIZE.fault(layout.micro_batch_size, context):
            continue
        if has_no_type(context):
            continue
        yield layout, {knob: knob.choices(context) for knob in knobs}


def _of_choices(
    degrees: Layout,
    choices: Mapping[LayoutKnob, Sequence[Value | None]],
    shape: ModelShape,
    rules: LayoutRules,
) -> Iterable[Layout]:
    """The layouts of some degrees, the last knob varying fastest."""
    layouts: Iterable[Layout] = [degrees]
    for knob in BEFORE_SCHEDULE:
        if knob in choices:
            layouts = [knob.put(layout, value) for layout in layouts for value in choices[knob]]
        else:
            layouts = chosen_layouts(layouts, [knob], shape, rules)
    return layouts


def chosen_layouts(
    layouts: Iterable[Layout],
    knobs: Sequence[LayoutKnob],
    shape: ModelShape,
    rules: LayoutRules,
    *,
    is_custom: bool = False,
) -> Iterable[Layout]:
    """The layouts with every legal choice of the knobs, the last knob varying fastest, one at a time.

    `is_custom`: the layouts have a custom schedule.
    """
    for knob in knobs:
        layouts = _with_choices(layouts, knob, shape, rules, is_custom=is_custom)
    return layouts


def _with_choices(
    layouts: Iterable[Layout], knob: LayoutKnob, shape: ModelShape, rules: LayoutRules, *, is_custom: bool
) -> Iterator[Layout]:
    for layout in layouts:
        context = KnobContext(layout=layout, shape=shape, rules=rules, is_custom=is_custom)
        for value in knob.choices(context):
            yield knob.put(layout, value)


def _of_degrees(layout: Layout, shape: ModelShape, rules: LayoutRules) -> Layout:
    """The layout before the knobs that depend on degrees: the command's values as far as they fit.

    A command without tensor parallelism says nothing about sequence parallelism: it is on where its layers
    have it, as in every recipe, and where experts need it.
    """
    command = rules.job.layout
    is_same = layout.pipeline_parallel == command.pipeline_parallel
    is_on = command.sequence_parallel
    if command.tensor_parallel == 1:
        has_it = rules.job.layer_impl == "transformer_engine" or "moe" in rules.job.features
        is_on = has_it and divides_sequence(layout, shape)
    return replace(
        layout,
        virtual_stages=command.virtual_stages if is_same else 1,
        # Without tensor parallelism there is nothing to split.
        sequence_parallel=is_on and layout.tensor_parallel > 1,
    )


def legal_groups(layout: Layout, *, num_microbatches: int) -> tuple[int, ...]:
    """Group sizes (microbatches a chunk before the next one) that Megatron's interleaved schedule accepts.

    At most eight are offered, from the pipeline's degree (stock) by doublings to all microbatches; leftover
    microbatches must be none or fill the pipeline.
    """
    least = layout.pipeline_parallel
    doublings = [least * 2**power for power in range(MAX_GROUPS)]
    candidates = [group for group in doublings if group < num_microbatches] + [num_microbatches]
    return tuple(
        group for group in candidates if is_legal_group(group, layout, num_microbatches=num_microbatches)
    )


def is_legal_group(group: int, layout: Layout, *, num_microbatches: int) -> bool:
    """Whether Megatron's interleaved schedule accepts the group."""
    rest = num_microbatches % group
    return layout.pipeline_parallel <= group <= num_microbatches and (
        rest == 0 or rest >= layout.pipeline_parallel
    )


def _runs(layout: Layout, *, shape: ModelShape, rules: LayoutRules) -> bool:
    """Whether the layout fills its stages and sequences, no rule forbids it and a schedule runs it."""
    if layout.sequence_parallel and not divides_sequence(layout, shape):
        return False
    # Where the schedule is kept, another pipeline has one stage a device, which not every feature runs with.
    context = KnobContext(layout=layout, shape=shape, rules=rules)
    if Axis.SCHEDULE in rules.locked and VIRTUAL_STAGES.fault(layout.virtual_stages, context):
        return False
    if rules.prohibitions.of_layout(layout) is not None:
        return False
    return layout.num_stages <= most_stages(shape) and bool(schedules_of(layout, shape=shape, rules=rules))


def schedules_of(
    layout: Layout, *, shape: ModelShape, rules: LayoutRules, most_actions: float = MAX_SEARCHED_ACTIONS
) -> tuple[str, ...]:
    """The names of the schedules to choose from for a layout, stock's first; none where it cannot be run.

    Those of files come last, where the layout and the shape have their counts. An order is searched for steps
    of `most_actions` at most.

    The parity gate compares with the baseline, so a layout that may change the objective has no custom ones.
    """
    stock = stock_schedule(layout)
    is_kept = Axis.SCHEDULE in rules.locked
    names: list[str] = []
    if (
        (is_kept or _is_stock_requested(stock, rules))
        and (layout.virtual_stages == 1 or _has_group(layout, rules=rules))
        and mtp_stages_of(layout, rules)
    ):
        names.append(stock)
    # A requested group requests the interleaved schedule.
    is_grouped = layout.virtual_stages > 1 and rules.search.group and not rules.search.schedule
    is_custom = not is_kept and not is_grouped and rules.no_custom_schedules is None
    # The plugin's schedules run multi-token prediction on the last stage.
    is_custom = is_custom and may_be_last(rules)
    if is_custom and not rules.can_change_objective(layout):
        job = rules.job
        names += custom_schedules_of(
            layout,
            num_microbatches=layout.num_microbatches(rules.job.global_batch_size),
            requested=rules.search.schedule,
            splits_backward=layout.recompute != "full" and job.full_backward is None,
            limits=rules.search.family_limits,
            most_actions=most_actions,
        )
        names += [
            name
            for name, written in rules.written.items()
            if not faults_of_written(written, layout, shape=shape, job=rules.job)
        ]
    prohibitions = rules.prohibitions
    return tuple(name for name in names if prohibitions.of_schedule(layout, name) is None)


def runs_custom_schedules(layout: Layout, *, shape: ModelShape, rules: LayoutRules) -> bool:
    """Whether the plugin's schedules run with the settings that the layout states."""
    context = KnobContext(layout=layout, shape=shape, rules=rules, is_custom=True)
    stated = {setting.name: setting.value for setting in layout.settings or ()}
    return all(knob.fault(stated[knob.name], context) is None for knob in SETTINGS if knob.name in stated)


def faults_of_written(
    written: WrittenSchedule, layout: Layout, *, shape: ModelShape, job: TrainingJob
) -> list[str]:
    """A line for each count of a file's schedule that a layout of the search does not have.

    Also for a split that a rule of the job's experts refuses.
    """
    lines = written.faults(
        num_layers=shape.num_layers,
        pipeline_parallel=layout.pipeline_parallel,
        virtual_stages=layout.virtual_stages,
        num_microbatches=layout.num_microbatches(job.global_batch_size),
        whose=f"{layout.label}, the nearest layout of the search",
    )
    split = written.split(shape.num_layers)
    if split is None or not job.logged_expert_layers:
        return lines
    placement = written.schedule.placement
    fault = fault_of_split(split, placement=placement, expert_layers=job.logged_expert_layers)
    return lines if fault is None else [*lines, f"layers_per_stage: {fault}"]


def stock_choice(layout: Layout, *, group: int | None = None) -> ScheduleChoice:
    """The stock schedule of a layout as plans hold it; without `group` an interleaved one has PP's."""
    name = stock_schedule(layout)
    return ScheduleChoice(
        name=name, group=(group or layout.pipeline_parallel) if name == "interleaved" else None
    )


def requested_groups(layout: Layout, *, rules: LayoutRules) -> tuple[int, ...]:
    """The groups to choose from for an interleaved layout; none where it cannot run as requested."""
    num_microbatches = layout.num_microbatches(rules.job.global_batch_size)
    if rules.search.group:
        return tuple(
            group
            for group in rules.search.group
            if is_legal_group(group, layout, num_microbatches=num_microbatches)
        )
    groups = legal_groups(layout, num_microbatches=num_microbatches)
    if Axis.SCHEDULE not in rules.locked:
        return groups
    command = rules.job.schedule.group
    is_kept = command is not None and is_legal_group(command, layout, num_microbatches=num_microbatches)
    return (command,) if is_kept and command is not None else groups[:1]


def _has_group(layout: Layout, *, rules: LayoutRules) -> bool:
    """Whether there are `requested_groups`: without a request one of all microbatches, if they fill PP."""
    if rules.search.group:
        return bool(requested_groups(layout, rules=rules))
    return layout.num_microbatches(rules.job.global_batch_size) >= layout.pipeline_parallel


def _is_stock_requested(name: str, rules: LayoutRules) -> bool:
    """Whether the stock schedule is requested, or left where the requested custom ones are ruled out."""
    requested = rules.search.schedule
    if not requested or name in requested or ("stock" in requested and name == rules.job.schedule.name):
        return True
    return rules.no_custom_schedules is not None and set(requested) <= set(CUSTOM_NAMES)


def is_requested[T](requested: Sequence[T] | None, value: T) -> bool:
    """Whether the search allows `value`; None is `auto`."""
    return not requested or value in requested


def undivided_request(search: SearchConfig, *, num_devices: int) -> str | None:
    """The first degree of which no requested value divides the devices, and the rule; None without one."""
    for knob in DEGREES:
        values = search.requested(knob.name)
        if values and STOCK not in values and all(num_devices % value for value in values):
            asked = values[0] if len(values) == 1 else list(values)
            return f"search.{knob.name}: {asked}; must divide the {num_devices} devices"
    return None


def fault_of_request(shape: ModelShape, *, rules: LayoutRules) -> str | None:
    """The first degree of which no requested value can be had, with the rule; None without one."""
    context = KnobContext(layout=rules.job.layout, shape=shape, rules=rules)
    for knob in (TENSOR_PARALLEL, CONTEXT_PARALLEL, EXPERT_PARALLEL):
        values = [value for value in rules.search.requested(knob.name) or () if value != STOCK]
        faults = [knob.fault(value, context) for value in values]
        if faults and None not in faults:
            return f"search.{knob.name}: {values[0]}; {faults[0]}"
    if rules.search.requested(MTP_STAGE.name) == (BEFORE_LAST,) and MTP_STAGE.axis not in rules.locked:
        # Of a layout that has no fault of its own.
        layout = replace(rules.job.layout, pipeline_parallel=2, virtual_stages=1)
        fault = fault_of_before_last(layout, rules)
        return None if fault is None else f"search.{MTP_STAGE.name}: {BEFORE_LAST}; {fault}"
    return None


def nearest_request(shape: ModelShape, *, rules: LayoutRules) -> str:
    """`; nearest: ...` for the first number of the request that alone leaves no layout; "" without one."""
    for knob in (*DEGREES, *BEFORE_SCHEDULE):
        values = [value for value in rules.search.requested(knob.name) or () if isinstance(value, int)]
        if not values or knob.kind != "degree":
            continue
        free = replace(rules, search=rules.search.model_copy(update={knob.name: None}))
        legal = {int(knob.in_layout(layout) or 0) for layout in legal_layouts(shape, rules=free)}
        if legal and not legal & set(values):
            return nearest_words(values[0], sorted(legal)).replace(": ", f": {knob.name} ", 1)
    return ""


def _may_stay_stock(knob: LayoutKnob, rules: LayoutRules) -> bool:
    """Whether a list of partitions has stock, so that those which cannot be had are left out."""
    return knob.kind == "partition" and STOCK in (rules.search.requested(knob.name) or ())


def _is_used_by_other(knob: LayoutKnob) -> bool:
    """Whether a knob does something beside some value of another setting alone, which names its fault."""
    return isinstance(knob, SettingKnob) and bool(knob.used_by)


def _with_free(
    knob: LayoutKnob, layouts: Mapping[ModelShape, Sequence[Layout]], rules: LayoutRules
) -> dict[ModelShape, list[Layout]]:
    """The layouts that a knob does something in, had the request not ruled them out by its values."""
    free = replace(rules, search=rules.search.model_copy(update={knob.name: None}))
    return {shape: list(filter(knob.applies, legal_layouts(shape, rules=free))) for shape in layouts}


def check_offered(
    knobs: Sequence[LayoutKnob],
    layouts: Sequence[Layout],
    *,
    shape: ModelShape,
    rules: LayoutRules,
    is_custom: bool = False,
) -> None:
    """Raises ConfigError for a knob if none of the layouts, which it offers, has any of its requested values.

    `is_custom`: all layouts have a custom schedule. It is for knobs that are chosen last, so that a value can
    be refused by any layout that has the knob.
    """
    for knob in knobs:
        wanted = [value for value in rules.search.requested(knob.name) or () if value != STOCK]
        commands = {rules.job.setting(knob.name)} if isinstance(knob, SettingKnob) else set()
        if not wanted or _is_used_by_other(knob):
            continue
        if {*commands, *(knob.in_layout(layout) for layout in layouts)} & set(wanted):
            continue
        contexts = (
            KnobContext(layout=layout, shape=shape, rules=rules, is_custom=is_custom)
            for layout in layouts
            if knob.applies(layout)
        )
        words = _first_fault(knob, wanted[0], contexts)
        if commands == {None}:
            words = knob.kept(rules) or "the command's own value is not known"
        raise ConfigError(f"search.{knob.name}: {knob.request_text(wanted[0])}; {words}")


def _first_fault(knob: LayoutKnob, value: Value, contexts: Iterable[KnobContext]) -> str:
    """The first rule that the value breaks in these layouts; without one no layout has the knob."""
    faults = (knob.fault(value, context) for context in contexts)
    return next(filter(None, faults), "it does nothing in any layout of the search")


def unused_request(layouts: Mapping[ModelShape, Sequence[Layout]], *, rules: LayoutRules) -> str | None:
    """The first knob of whose requested values no layout has one, and why; None where each can be had."""
    for knob in LAYOUT_KNOBS:
        wanted = [value for value in rules.search.requested(knob.name) or () if value != STOCK]
        if not wanted or knob.axis in rules.locked or _may_stay_stock(knob, rules) or _is_used_by_other(knob):
            continue
        name = f"search.{knob.name}: {knob.request_text(wanted[0])}"
        if not knob.is_of(rules.job.framework):
            return f"{name}; {capabilities(rules.job.framework).title} has no such knob: leave it out"
        if _is_offered(knob, wanted, layouts, rules=rules):
            continue
        if isinstance(knob, SettingKnob) and rules.job.setting(knob.name) is None:
            return f"{name}; the framework did not report the command's own value"
        able = {shape: list(filter(knob.applies, kept)) for shape, kept in layouts.items()}
        if not any(able.values()):
            able = _with_free(knob, layouts, rules)
        return f"{name}; {_first_fault(knob, wanted[0], _contexts(knob, able, rules=rules))}"
    return _unused_group(layouts, rules=rules) or unused_mtp_stage(layouts, rules=rules)


def unused_mtp_stage(layouts: Mapping[ModelShape, Iterable[Layout]], *, rules: LayoutRules) -> str | None:
    """That no layout has multi-token prediction before the last stage where that is requested; else None."""
    asked = rules.search.requested(MTP_STAGE.name) or ()
    if BEFORE_LAST not in asked or MTP_STAGE.axis in rules.locked:
        return None
    faults: list[str] = []
    for shape, kept in layouts.items():
        for layout in kept:
            fault = _fault_of_before_last(layout, shape=shape, rules=rules)
            if fault is None:
                return None
            faults.append(fault)
    return f"search.{MTP_STAGE.name}: {BEFORE_LAST}; {faults[0]}"


def _fault_of_before_last(layout: Layout, *, shape: ModelShape, rules: LayoutRules) -> str | None:
    """Why no plan of the layout has multi-token prediction before the last stage; None where one may."""
    fault = fault_of_before_last(layout, rules)
    if fault is None and not set(STOCK_NAMES).intersection(schedules_of(layout, shape=shape, rules=rules)):
        return "needs a schedule of the framework"
    return fault


def _is_offered(
    knob: LayoutKnob,
    wanted: Collection[Value],
    layouts: Mapping[ModelShape, Sequence[Layout]],
    *,
    rules: LayoutRules,
) -> bool:
    """Whether a layout has one of the wanted values; no further layout is looked at then."""
    asked = set(wanted)
    each = ((shape, layout) for shape, kept in layouts.items() for layout in kept)
    if knob not in OPTIONS:
        return any(knob.in_layout(layout) in asked for _, layout in each)
    before = _options_before(knob)
    return any(
        not asked.isdisjoint(values)
        for shape, layout in each
        for values in option_values(knob, layout, before=before, shape=shape, rules=rules)
    )


def _options_before(knob: LayoutKnob) -> tuple[LayoutKnob, ...]:
    return OPTIONS[: OPTIONS.index(knob)] if knob in OPTIONS else ()


def _contexts(
    knob: LayoutKnob, layouts: Mapping[ModelShape, Sequence[Layout]], *, rules: LayoutRules
) -> Iterator[KnobContext]:
    """The layouts before a knob's turn: for an option with each choice of the options before it."""
    for shape, kept in layouts.items():
        for layout in chosen_layouts(kept, _options_before(knob), shape, rules):
            yield KnobContext(layout=layout, shape=shape, rules=rules)


def _unused_group(layouts: Mapping[ModelShape, Sequence[Layout]], *, rules: LayoutRules) -> str | None:
    """That no interleaved layout has any of the requested groups; None where one has."""

    def offered(layouts: Mapping[ModelShape, Sequence[Layout]], rules: LayoutRules) -> Iterator[int]:
        for kept in layouts.values():
            for layout in kept:
                if layout.virtual_stages > 1:
                    yield from requested_groups(layout, rules=rules)

    asked = rules.search.group
    if not asked or Axis.SCHEDULE in rules.locked or any(offered(layouts, rules)):
        return None
    free = replace(rules, search=rules.search.model_copy(update={"group": None}))
    legal = set(offered({shape: legal_layouts(shape, rules=free) for shape in layouts}, free))
    words = nearest_words(asked[0], sorted(legal)) or ": none is interleaved"
    return f"search.group: {asked[0]}; no layout of the search has this group{words}"
