"""Ranked layouts as plan files, compared with a plain layout of the same job."""

from dataclasses import dataclass, replace

from quartet_plugin import __version__
from quartet_plugin.cost.constants import Constants, fitted
from quartet_plugin.cost.iteration.assigned import AssignedRun
from quartet_plugin.cost.memory import peak_memory
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.mapping.orders import slots_of
from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.measurement import Prediction
from quartet_plugin.model.plan import Baseline, MadeFor, Mapping, Plan, Provenance, ScheduleChoice, Split
from quartet_plugin.planner.described_job import description_of
from quartet_plugin.planner.described_rules import rules_of
from quartet_plugin.planner.job import PlanRequest, searched_settings
from quartet_plugin.planner.layout_table import layout_table_of
from quartet_plugin.planner.order_search import custom_choice
from quartet_plugin.planner.ranking import Ranked, rank
from quartet_plugin.planner.table_rows import RECOMPUTE
from quartet_plugin.space.knobs.use_megatron_fsdp import USE_MEGATRON_FSDP
from quartet_plugin.space.layouts import stock_choice
from quartet_plugin.split.layers import even_split, even_split_with_ends, is_legal_split


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """The layout that plans are compared with, and its predicted seconds an iteration.

    `schedule` is its stock schedule; `is_users`: it is that of the user's command; `fits`: in memory.
    `is_mtp_before_last`: it has multi-token prediction on the stage before the last one.
    """

    layout: Layout
    split: tuple[int, ...]
    iteration_s: float
    schedule: ScheduleChoice
    is_users: bool = False
    fits: bool = True
    is_mtp_before_last: bool = False

    @property
    def stage_split(self) -> Split:
        """The split with the stage of multi-token prediction."""
        return Split.of(self.split, is_mtp_before_last=self.is_mtp_before_last)


def plain_layout(
    job: PlanRequest, *, best: Ranked | None = None, constants: Constants | None = None
) -> Plain:
    """The fewest model-parallel ranks that fit, micro-batch 1, an even split, no virtual stages.

    Recompute only where nothing fits without. Where the job allows none of these, the layout of the `best`
    plan, which is looked for where it is not given.
    """
    axes: dict[str, object] = {
        "virtual_stages": (1,),
        "micro_batch_size": (1,),
        "context_parallel": (1,),
        "schedule": ("stock",),
        "tensor_partition": ("stock",),
    }
    plain = replace(job, search=job.search.model_copy(update=axes))
    used = constants or fitted()
    # A setting that the job asks for may need what a plain layout leaves out.
    table = layout_table_of(plain, job.shape, is_checked=False)
    layouts = [table.layout(row) for row in range(len(table))]
    layouts.sort(
        key=lambda x: (
            RECOMPUTE.index(x.recompute),
            x.tensor_parallel * x.pipeline_parallel,
            x.pipeline_parallel,
        )
    )
    for layout in layouts:
        is_before_last = job.has_mtp_before_last and layout.pipeline_parallel > 1
        split = _plain_split(
            job.shape.num_layers, num_stages=layout.num_stages, is_mtp_before_last=is_before_last
        )
        run = job.run(job.shape, layout, split)
        if peak_memory(run).fits:
            return Plain(
                layout=layout,
                split=split,
                iteration_s=stock_time_s(job, run, used),
                schedule=stock_choice(layout),
                is_mtp_before_last=is_before_last,
            )
    best = best or rank(job, constants=used).best[0]
    split, time_s, is_before_last = best.split, best.iteration_s, best.is_mtp_before_last
    if best.shape != job.shape or best.schedule.is_custom:
        # Neither has multi-token prediction before the last stage.
        split = _plain_split(job.shape.num_layers, num_stages=best.layout.num_stages)
        time_s = stock_time_s(job, job.run(job.shape, best.layout, split), used)
    return Plain(
        layout=best.layout,
        split=split,
        iteration_s=time_s,
        schedule=stock_choice(best.layout),
        is_mtp_before_last=is_before_last,
    )


def _plain_split(num_layers: int, *, num_stages: int, is_mtp_before_last: bool = False) -> tuple[int, ...]:
    """The even split; of fewer layers than stages one whose ends are empty."""
    if is_mtp_before_last:
        return (*_plain_split(num_layers, num_stages=num_stages - 1), 0)
    split = even_split(num_layers, num_stages=num_stages)
    if is_legal_split(split, num_layers=num_layers, num_stages=num_stages):
        return split
    return even_split_with_ends(num_layers, num_stages=num_stages, embedding=0, head=0)


def users_layout(
    job: PlanRequest, *, layout: Layout, split: Split, schedule: ScheduleChoice, constants: Constants | None
) -> Plain:
    """The layout of the user's command as what plans are compared with.

    Raises ConfigError where it is none of the job's devices, layers or batch.
    """
    counts, is_before_last = split.transformer_layers_per_stage, bool(split.mtp_before_last)
    run = job.run(job.shape, layout, counts, is_mtp_before_last=is_before_last)
    return Plain(
        layout=layout,
        split=counts,
        iteration_s=stock_time_s(job, run, constants or fitted()),
        schedule=schedule,
        is_users=True,
        fits=peak_memory(run).fits,
        is_mtp_before_last=is_before_last,
    )


def stock_time_s(job: PlanRequest, run: TrainingRun, constants: Constants) -> float:
    """Seconds an iteration in the launcher's order of ranks."""
    if job.cluster is None:
        return predict(run, constants).iter_time_s
    assigned = AssignedRun(run, constants, job.topology(constants))
    return assigned.predict(tuple(range(run.layout.world_size))).iter_time_s


def plan_of(
    job: PlanRequest,
    ranked: Ranked,
    *,
    plain: Plain,
    name: str,
    place: int,
    constants: Constants | None = None,
) -> Plan:
    """The plan of one ranked layout, for the job's release of Megatron: predicted, not measured."""
    machines = job.machines
    nodes = job.nodes
    slots = slots_of(nodes)
    return Plan(
        made_for=MadeFor(
            framework=MEGATRON.framework,
            framework_version=job.release,
            shape=job.shape,
            global_batch_size=job.global_batch_size,
            baseline=Baseline(
                layout=plain.layout,
                split=plain.stage_split,
                schedule=plain.schedule,
            ),
            world_size=machines.num_devices,
            nodes=nodes,
            batching_features=job.batching_features or None,
            job=description_of(job),
            mtp_layers=job.mtp_layers or None,
        ),
        shape=ranked.shape,
        layout=_stated(job, ranked.layout),
        split=ranked.stage_split,
        schedule=schedule_of(job, ranked, constants=constants or fitted()),
        mapping=Mapping(slots=slots if ranked.slots is None else tuple(slots[slot] for slot in ranked.slots)),
        provenance=Provenance(run=name, trial=place, seed=0, quartet_version=__version__),
        prediction=Prediction(
            iteration_s=ranked.iteration_s,
            relative_cost=ranked.equal_work_s / plain.iteration_s,
            peak_memory_bytes=round(ranked.memory.total_bytes),
        ),
    )


def _stated(job: PlanRequest, layout: Layout) -> Layout:
    """The layout with every setting that the job searches, since no command of it says the others.

    Sharding of parameters is stated only where a plan changes it: a plan that states it has another format
    of checkpoints.
    """
    rules = rules_of(job)
    for knob in searched_settings(job.search):
        is_said = bool(knob.used_by) or knob is USE_MEGATRON_FSDP
        value = None if is_said else rules.job.setting(knob.name)
        if layout.setting(knob.name) is None and knob.applies(layout) and value is not None:
            layout = knob.put(layout, value)
    return layout


def schedule_of(job: PlanRequest, ranked: Ranked, *, constants: Constants) -> ScheduleChoice:
    """The schedule of a ranked layout as its plan has it."""
    if ranked.order is None and not ranked.schedule.is_custom:
        return stock_choice(ranked.layout, group=ranked.group)
    custom = ranked.order or custom_choice(job, ranked, constants=constants)
    return ScheduleChoice(name="custom", custom=custom)
