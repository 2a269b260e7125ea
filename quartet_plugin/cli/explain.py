"""`quartet explain`: what a plan's predicted step and memory are made of, and what came next."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet_plugin.cli.command import CalibrationFile, HardwareFolder, constants_of, devices_of

if TYPE_CHECKING:
    from quartet_plugin.cost.devices import DeviceSpec
    from quartet_plugin.model.plan import Plan
    from quartet_plugin.model.shape_curve import ShapeCurve
    from quartet_plugin.planner.explain import Explained
    from quartet_plugin.planner.job import PlanRequest
    from quartet_plugin.report.explain import Explanation


def explain_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan.", show_default=False)],
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A JOB.yaml or a cluster file. Default: the job or the nodes that the plan names.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    hardware: HardwareFolder = None,
    calibration: CalibrationFile = None,
) -> None:
    """Show what a plan's predicted time and memory are made of, and the next best layout."""
    from rich.console import Console

    from quartet_plugin.model.plan import read_plan
    from quartet_plugin.planner.explain import explained
    from quartet_plugin.report.explain import show

    content = read_plan(plan)
    job, assumed = _job(content, cluster, devices_of(hardware))
    prediction = explained(content, job, assumed=assumed, constants=constants_of(calibration))
    explanation = replace(_explanation(content, job, prediction), shape_curve=_shapes(plan, prediction))
    if as_json:
        typer.echo(json.dumps(explanation.as_data(), indent=1, allow_nan=False))
        return
    # Without a terminal nothing is cut: a pipe has no width of its own.
    console = Console(highlight=False)
    show(explanation, console=console if console.is_terminal else Console(highlight=False, width=160))


def _shapes(plan: Path, explained: "Explained") -> "ShapeCurve | None":
    """Throughput against shape: measured by the run that the plan is of, or planned."""
    from quartet_plugin.model.shape_curve import FILE_NAME, read_shape_curve

    beside = plan.with_name(FILE_NAME)
    return read_shape_curve(beside) if beside.is_file() else explained.shape_curve


def _job(
    plan: "Plan", cluster: Path | None, devices: "Mapping[str, DeviceSpec] | None"
) -> "tuple[PlanRequest, dict[str, str]]":
    """The plan's job: a JOB.yaml has all of it, a cluster file and the plan's nodes leave things open."""
    from quartet_plugin.model.cluster import read_cluster
    from quartet_plugin.planner.explain import job_of_cluster, job_of_plan
    from quartet_plugin.planner.job import read_job

    if cluster is None:
        return job_of_plan(plan, devices=devices)
    if cluster.suffix == ".json":
        return job_of_cluster(plan, read_cluster(cluster), devices=devices)
    return read_job(cluster, devices=devices), {}


def _explanation(plan: "Plan", job: "PlanRequest", explained: "Explained") -> "Explanation":
    from quartet_plugin.report.explain import Explanation, RunnerUp, StageMemory, layout_words
    from quartet_plugin.report.planned import cost_of_job, rates_of

    prediction, other = explained.prediction, explained.other
    counts, ranks = plan.split.transformer_layers_per_stage, plan.layout.pipeline_parallel
    placement = plan.schedule.placement or tuple(k % ranks for k in range(len(counts)))
    layers = [
        sum(n for n, device in zip(counts, placement, strict=True) if device == rank) for rank in range(ranks)
    ]
    # Of a job without devices that the library knows no peak is known.
    rates = rates_of(
        job, prediction.iter_time_s, shape=plan.shape, has_peak=explained.available_bytes is not None
    )
    scale = plan.shape.model_flops_per_sequence / job.shape.model_flops_per_sequence
    return Explanation(
        title=_title(plan, explained.num_microbatches),
        iteration_s=prediction.iter_time_s,
        stated_s=None if plan.prediction is None else plan.prediction.iteration_s,
        terms=prediction.terms,
        compute_terms=prediction.compute_terms,
        bubble_fraction=prediction.bubble_fraction,
        memory=[
            StageMemory(rank=rank, num_layers=layers[rank], total_bytes=memory.total, terms=memory.terms)
            for rank, memory in enumerate(explained.memory)
        ],
        available_bytes=explained.available_bytes,
        runner_up=None
        if other is None
        else RunnerUp(
            label=f"{layout_words(other.layout, separator=' ')} {other.schedule_label}",
            equal_work_s=other.equal_work_s * scale,
            # Equal work over an iteration of its own shape.
            terms={
                name: value * scale * (other.equal_work_s / other.iteration_s)
                for name, value in other.terms.items()
            },
        ),
        assumed=explained.assumed,
        rates=rates,
        cost=cost_of_job(job, rates),
    )


def _title(plan: "Plan", num_microbatches: int) -> list[tuple[str, str]]:
    from quartet_plugin.report.explain import layout_words
    from quartet_plugin.space.plan_label import plan_label

    shape, split = plan.shape, plan.split.label
    return [
        ("plan", f"{plan.digest[:12]} for {plan.made_for.world_size} devices"),
        ("parts", plan_label(plan)),
        ("shape", f"{shape.num_layers} layers, hidden {shape.hidden_size}, sequences of {shape.seq_length}"),
        ("layout", f"{layout_words(plan.layout)}, {num_microbatches} microbatches"),
        ("split", split if len(split) <= 80 else f"{split[:77]}..."),
        ("schedule", plan.schedule.label),
        ("mapping", plan.mapping.label),
    ]
