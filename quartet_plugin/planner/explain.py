"""The prediction of a plan with its terms, its memory, and the best layout beside it.

A plan file holds the predicted time and memory alone; the terms are computed here, from the plan and the job
or the cluster it was made for. What neither says is assumed, and the assumption is part of the result.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from quartet_plugin.calibration.machine_prior import PROCESSOR_CORE, library_device
from quartet_plugin.calibration.predictor import PlanPredictor
from quartet_plugin.cost.cluster import look_up, uniform_cluster_of
from quartet_plugin.cost.constants import Constants, fitted
from quartet_plugin.cost.devices import DeviceSpec, device_named
from quartet_plugin.cost.iteration.assigned import AssignedRun
from quartet_plugin.cost.iteration.step import RowPrediction
from quartet_plugin.cost.memory import Memory, memory_by_device
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import (
    ScheduleKind,
    TrainingRun,
    schedule_group,
    schedule_kind,
    uniform_cluster_of_device,
)
from quartet_plugin.errors import ConfigError, InfeasibleError, PlanError
from quartet_plugin.mapping.orders import slots_of
from quartet_plugin.model.cluster import Cluster
from quartet_plugin.model.job_description import JobPrecision, words_of_model
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Mapping as SlotMapping
from quartet_plugin.model.plan import NodeInfo, Plan
from quartet_plugin.model.schema import dump
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.shape_curve import ShapeCurve
from quartet_plugin.planner.described_job import request_of
from quartet_plugin.planner.job import PlanRequest, PlanSearch
from quartet_plugin.planner.plans import schedule_of
from quartet_plugin.planner.ranking import Ranked, best_plans, shapes_of
from quartet_plugin.scaling.shape_curve import shape_curve

# Plans of the ranking, beside those that a run measured, among which the best other layout is looked for.
NUM_OTHERS = 20
# What is assumed of the model of a plan that does not describe its job.
PLAIN_MODEL = "dense layers with plain attention (the plan does not say more)"
# The least chance that one of them fits in memory.
LEAST_CHANCE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPlan:
    """The best other layout as a plan; `equal_work_s` is its time for the FLOPs of the explained plan.

    `trial` is the number of the run's trial that measured it, None where none did.
    """

    plan: Plan
    equal_work_s: float
    prediction: RowPrediction
    trial: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """The prediction of a plan; `memory` has an entry a pipeline rank; `other` the best other layout.

    `baseline` is the prediction of the configuration that the plan is compared with, None where that is the
    plan itself or the model cannot predict it.

    `available_bytes` is a device's usable memory, None where no file says it. `assumed` is what the plan does
    not say and where it was taken from. `shape_curve` has the best plan of each shape, where the job searches
    several.
    """

    prediction: RowPrediction
    memory: tuple[Memory, ...]
    available_bytes: float | None
    num_microbatches: int
    other: OtherPlan | None
    assumed: Mapping[str, str]
    baseline: RowPrediction | None = None
    shape_curve: ShapeCurve | None = None


def explained(
    plan: Plan,
    job: PlanRequest,
    *,
    assumed: Mapping[str, str],
    constants: Constants | None = None,
    predictor: PlanPredictor | None = None,
) -> Explained:
    """The plan's prediction on the job's cluster, and the best layout beside it.

    A `predictor` that has learned a run's trials, and knows the plan, predicts in place of `constants`.
    Raises PlanError where the plan was made for another model, batch or number of devices.
    """
    _check_made_for(plan, job)
    used = constants or fitted()
    run = _run_of(plan, job)
    memory = tuple(memory_by_device(run))
    return Explained(
        prediction=_predicted(plan, job, used) if predictor is None else predictor.predict_terms(plan),
        baseline=_baseline(plan, job, used, predictor),
        memory=memory,
        available_bytes=None if job.machines.device is PROCESSOR_CORE else memory[0].available_bytes,
        num_microbatches=run.num_microbatches,
        other=_other(plan, job, used) if predictor is None else _learned_other(plan, job, used, predictor),
        assumed=assumed,
        shape_curve=planned_shapes(job, used),
    )


def planned_shapes(job: PlanRequest, constants: Constants) -> ShapeCurve | None:
    """The best plan of every shape of the job by its predicted time for equal work; None of one shape."""
    scaling = job.search.scaling
    # Shapes of one label differ in the size of their heads: the better one counts.
    shapes = list({shape.label: shape for shape in reversed(shapes_of(job))}.values())
    if scaling is None or len(shapes) < 2:
        return None
    best_s: dict[ModelShape, float] = {}
    for shape in shapes:
        alone = scaling.model_copy(update={"shapes": (shape.label,)})
        request = replace(job, search=job.search.model_copy(update={"scaling": alone}))
        with contextlib.suppress(InfeasibleError):
            best_s[shape] = best_plans(request, top=1, constants=constants).best[0].equal_work_s
    reference = best_s.get(job.shape, min(best_s.values(), default=1.0))
    return shape_curve(
        shapes,
        objective="model_flops_per_s_per_device",
        of_command=job.shape,
        measured={},
        predicted={shape: reference / seconds for shape, seconds in best_s.items()},
    )


def job_of_cluster(
    plan: Plan, cluster: Cluster, *, devices: Mapping[str, DeviceSpec] | None = None
) -> tuple[PlanRequest, dict[str, str]]:
    """The plan's job on a cluster that is described in full, and what was assumed.

    A plan that says nothing of precision and search has those of the cluster's devices and `auto`, and a
    dense model. Raises PlanError where it has experts nevertheless.
    """
    said = plan.made_for.job
    if said is not None:
        return request_of(plan, replace(said, devices=None, cluster=cluster), devices=devices), {}
    _check_dense(plan)
    formats = {name for values in cluster.devices.values() for name in values.peak_flops}
    precision: JobPrecision = "fp32" if formats and not formats & {"bf16", "fp16"} else "bf16"
    planned = look_up(cluster, precision=precision, devices=devices)
    job = PlanRequest(
        shape=plan.made_for.shape,
        machines=uniform_cluster_of(planned, fitted()),
        global_batch_size=plan.made_for.global_batch_size,
        precision=precision,
        search=PlanSearch(),
        mtp_layers=plan.made_for.mtp_layers or 0,
        cluster=planned,
    )
    return job, {"precision": precision, "model": PLAIN_MODEL, "search": "auto"}


def job_of_plan(
    plan: Plan, *, devices: Mapping[str, DeviceSpec] | None = None
) -> tuple[PlanRequest, dict[str, str]]:
    """The plan's job, and what was assumed: nothing where the plan describes the job.

    Elsewhere it is the job of a dense model on the plan's own nodes. Raises PlanError where those are
    unequal, or where the plan has experts nevertheless.
    """
    if plan.made_for.job is not None:
        return request_of(plan, plan.made_for.job, devices=devices), {}
    _check_dense(plan)
    nodes = plan.made_for.nodes
    classes = {(node.node_class, node.num_slots) for node in nodes}
    name, _, count = nodes[0].node_class.rpartition(" x")
    if len(classes) > 1 or count != str(nodes[0].num_slots):
        raise PlanError(
            f"made_for.nodes: {nodes[0].node_class!r}; does not describe a cluster of equal devices; add "
            "--cluster CLUSTER.json or --cluster JOB.yaml"
        )
    device, assumed = _device_of(name, devices)
    machines = uniform_cluster_of_device(
        device, num_devices=plan.made_for.world_size, devices_per_node=nodes[0].num_slots
    )
    precision: JobPrecision = "bf16"
    if device is PROCESSOR_CORE:
        # No layout is ruled out for a memory that is not known.
        precision, machines = "fp32", replace(machines, memory_bytes=2**50)
    job = PlanRequest(
        shape=plan.made_for.shape,
        machines=machines,
        global_batch_size=plan.made_for.global_batch_size,
        precision=precision,
        search=PlanSearch(),
        mtp_layers=plan.made_for.mtp_layers or 0,
    )
    return job, {
        **assumed,
        "precision": precision,
        "model": PLAIN_MODEL,
        "links": "library values for this device",
        "search": "auto",
    }


def _check_dense(plan: Plan) -> None:
    """Raises PlanError where the plan, or the command it is compared with, has experts on several ranks."""
    layouts = {"layout": plan.layout, "made_for.baseline.layout": plan.made_for.baseline.layout}
    for name, layout in layouts.items():
        if layout.expert_parallel > 1:
            raise PlanError(
                f"{name}.expert_parallel: {layout.expert_parallel}; must be 1 where the plan does not "
                "describe the experts; add --cluster JOB.yaml, or explain the run that made the plan"
            )


def _device_of(name: str, devices: Mapping[str, DeviceSpec] | None) -> tuple[DeviceSpec, dict[str, str]]:
    """The device that a node's class names, and what stands for it where no file describes it."""
    try:
        return device_named(name, extra=devices), {}
    except ConfigError:
        if name.lower().startswith("cpu"):
            words = "generic CPU core (your CPU's speed and memory are not known; add --cluster)"
            return PROCESSOR_CORE, {"device": words}
        device, is_known = library_device(name)
        remark = "" if is_known else f" ({name} is not in the device library; add --hardware or --cluster)"
        return device, {"device": f"{device.name}{remark}"}


def _check_made_for(plan: Plan, job: PlanRequest) -> None:
    sizes = {"world_size": job.machines.num_devices, "global_batch_size": job.global_batch_size}
    model = {**dump(job.shape), "mtp_layers": job.mtp_layers or None}
    for name, planned in plan.made_for.differences({**sizes, **model}).items():
        words = "shape: the job has another model"
        if name in sizes:
            label = "devices" if name == "world_size" else name
            words = f"{label}: {planned}; the job has {sizes[name]}"
        raise PlanError(f"made_for: {words}: explain a plan with the job it was made for")
    said = plan.made_for.job
    here = words_of_model(job.precision, job.experts, job.latent)
    for name, planned in ({} if said is None else said.model_words).items():
        if planned != here[name]:
            raise PlanError(
                f"made_for: {name}: {planned}; the job has {here[name]}: explain a plan with the job it was "
                "made for"
            )


def _run_of(plan: Plan, job: PlanRequest) -> TrainingRun:
    split = plan.split
    run = job.run(
        plan.shape,
        plan.layout,
        split.transformer_layers_per_stage,
        is_mtp_before_last=bool(split.mtp_before_last),
    )
    return replace(
        run,
        schedule=schedule_kind(plan.schedule),
        group=schedule_group(plan.schedule),
        custom=plan.schedule.custom,
    )


def baseline_of(plan: Plan) -> Plan:
    """The configuration that a plan is compared with, as a plan: ranks lie in the launcher's order."""
    baseline = plan.made_for.baseline
    return replace(
        plan,
        shape=plan.made_for.shape,
        layout=baseline.layout,
        split=baseline.split,
        schedule=baseline.schedule,
        mapping=SlotMapping(slots=tuple(sorted(plan.mapping.slots))),
        prediction=None,
        measurement=None,
    )


def _baseline(
    plan: Plan, job: PlanRequest, constants: Constants, predictor: PlanPredictor | None
) -> RowPrediction | None:
    """The prediction of what the plan is compared with; None where it is the plan, or not to be predicted."""
    with contextlib.suppress(ConfigError, PlanError):
        baseline = baseline_of(plan)
        if baseline.key == plan.key:
            return None
        if predictor is None:
            return _predicted(baseline, job, constants)
        return predictor.predict_terms(baseline) if predictor.knows(baseline) else None
    return None


def _predicted(plan: Plan, job: PlanRequest, constants: Constants) -> RowPrediction:
    run = _run_of(plan, job)
    if plan.mapping.is_stock and job.cluster is None:
        return predict(run, constants)
    topology = job.topology(constants)
    index = {slot: number for number, slot in enumerate(topology.slots)}
    unknown = next((slot for slot in plan.mapping.slots if slot not in index), None)
    if unknown is not None:
        raise PlanError(
            f"mapping.slots: node {unknown.node}, local {unknown.local}; the job's cluster has no such device"
        )
    slots = tuple(index[slot] for slot in plan.mapping.slots)
    return AssignedRun(run, constants, topology).predict(slots)


def _other(plan: Plan, job: PlanRequest, constants: Constants) -> OtherPlan | None:
    """The best ranked layout and named schedule that are not the plan's."""
    ranked = next(
        (
            candidate
            for candidate in _ranked(job, constants, top=3)
            if not _is_own(plan, candidate.shape, candidate.layout, candidate.schedule)
        ),
        None,
    )
    if ranked is None:
        return None
    scale = plan.shape.model_flops_per_sequence / job.shape.model_flops_per_sequence
    # The terms are those of an iteration of its own shape.
    prediction = RowPrediction(
        iter_time_s=ranked.iteration_s, terms=ranked.terms, compute_terms={}, bubble_fraction=0.0
    )
    return OtherPlan(
        plan=_plan_of(ranked, plan, job, constants, nodes=job.nodes),
        equal_work_s=ranked.equal_work_s * scale,
        prediction=prediction,
    )


def _learned_other(
    plan: Plan, job: PlanRequest, constants: Constants, predictor: PlanPredictor
) -> OtherPlan | None:
    """The best other layout by what a run's trials taught: of their plans and of the ranking's first."""
    ranked = _ranked(job, constants, top=NUM_OTHERS)
    nodes = plan.made_for.nodes
    candidates = list(predictor.measured.values())
    candidates += [_plan_of(row, plan, job, constants, nodes=nodes) for row in ranked]
    others = [
        other
        for other in candidates
        if not _is_own(plan, other.shape, other.layout, schedule_kind(other.schedule))
        and predictor.knows(other)
        and predictor.feasibility.chance(other) >= LEAST_CHANCE
    ]
    if not others:
        return None
    flops = plan.shape.model_flops_per_sequence
    seconds = [
        predicted.iteration_s * flops / other.shape.model_flops_per_sequence
        for other, predicted in zip(others, predictor.predict(others), strict=True)
    ]
    equal_work_s, index = min(zip(seconds, range(len(others)), strict=True))
    best = others[index]
    trials = {measured.execution: number for number, measured in predictor.measured.items()}
    return OtherPlan(
        plan=best,
        equal_work_s=equal_work_s,
        prediction=predictor.predict_terms(best),
        trial=trials.get(best.execution),
    )


def _ranked(job: PlanRequest, constants: Constants, *, top: int) -> tuple[Ranked, ...]:
    """The best ranked plans; none where no layout is legal and fits."""
    try:
        return best_plans(job, top=top, constants=constants).best
    except InfeasibleError:
        return ()


def _is_own(plan: Plan, shape: ModelShape, layout: Layout, kind: ScheduleKind) -> bool:
    """Whether a layout is the plan's own, with its schedule."""
    custom = plan.schedule.custom
    # A searched order is compared with the best layout that is not its own.
    planned = None if custom is not None and custom.named is None else schedule_kind(plan.schedule)
    return (shape, layout) == (plan.shape, plan.layout) and planned in (None, kind)


def _plan_of(
    ranked: Ranked, plan: Plan, job: PlanRequest, constants: Constants, *, nodes: tuple[NodeInfo, ...]
) -> Plan:
    """A ranked layout as a plan of the same job on `nodes`."""
    slots = slots_of(nodes)
    return replace(
        plan,
        made_for=replace(plan.made_for, nodes=nodes),
        shape=ranked.shape,
        layout=ranked.layout,
        split=ranked.stage_split,
        schedule=schedule_of(job, ranked, constants=constants),
        mapping=SlotMapping(
            slots=slots if ranked.slots is None else tuple(slots[slot] for slot in ranked.slots)
        ),
        prediction=None,
        measurement=None,
    )
