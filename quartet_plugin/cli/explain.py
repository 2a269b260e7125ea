"""`quartet explain`: what the predicted step and memory of a plan are made of, and of the user's command.

Where the plan is the winner of a run, the model predicts as the trials of that run calibrated it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet_plugin.cli.command import (
    RUNS,
    CalibrationFile,
    HardwareFolder,
    PlanOrRun,
    RunsFolder,
    TrialOfRun,
    constants_of,
    devices_of,
    find_plan,
)
from quartet_plugin.errors import QuartetError

if TYPE_CHECKING:
    from quartet_plugin.cost.devices import DeviceSpec
    from quartet_plugin.model.plan import Plan
    from quartet_plugin.model.shape_curve import ShapeCurve
    from quartet_plugin.planner.explain import Explained, OtherPlan
    from quartet_plugin.planner.job import PlanRequest
    from quartet_plugin.report.explain import BaselineTerms, Explanation, RunnerUp
    from quartet_plugin.tuner.learned_run import LearnedRun


def explain_command(
    plan: PlanOrRun,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A JOB.yaml or a cluster file. Default: the run, job or nodes named in the plan.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trial: TrialOfRun = None,
    hardware: HardwareFolder = None,
    calibration: CalibrationFile = None,
    run_dir: RunsFolder = RUNS,
) -> None:
    """Show the terms of a plan's predicted time and memory, those of your command, and the next best plan."""
    from rich.console import Console

    from quartet_plugin.cli.trial_plan import plan_of_trial
    from quartet_plugin.model.plan import read_plan
    from quartet_plugin.planner.explain import explained
    from quartet_plugin.report.explain import show

    of_trial = None if trial is None else plan_of_trial(plan, trial, run_dir=run_dir)
    path = find_plan(plan, run_dir=run_dir) if of_trial is None else of_trial.best_plan
    content = read_plan(path) if of_trial is None else of_trial.plan
    is_described = not (cluster is None and hardware is None and calibration is None)
    basis = _Basis(words=_NOT_CALIBRATED) if is_described else _basis(path, content)
    if calibration is not None:
        basis = _Basis(words=f"the constants of {calibration}")
    if basis.learned is None:
        job, assumed = _job(content, cluster, devices_of(hardware))
        prediction = explained(content, job, assumed=assumed, constants=constants_of(calibration))
    else:
        learned = basis.learned
        job = learned.request
        prediction = explained(
            content, job, assumed={}, constants=learned.constants, predictor=learned.predictor
        )
    measured = _measured_of(content) if of_trial is None else (of_trial.measured_s, of_trial.baseline_s)
    explanation = replace(
        _explanation(
            content,
            job,
            prediction,
            basis,
            measured=measured,
            is_measured_in_rounds=of_trial is None or of_trial.comparison is not None,
        ),
        shape_curve=_shapes(path, prediction),
    )
    if as_json:
        typer.echo(json.dumps(explanation.as_data(), indent=1, allow_nan=False))
        return
    # Without a terminal nothing is cut: a pipe has no width of its own.
    console = Console(highlight=False)
    show(explanation, console=console if console.is_terminal else Console(highlight=False, width=160))


# Seconds an iteration of a plan and of what it is compared with; None of what was not measured.
type _Measured = tuple[float | None, float | None]

_NOT_CALIBRATED = "not calibrated by trials: only the shares and ratios of these figures are meaningful"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Basis:
    """The calibration of the figures: the trials of a run, if the run can be read.

    `is_stand_in`: the run measured another configuration than the user's own as its baseline.
    """

    words: str
    learned: "LearnedRun | None" = None
    is_stand_in: bool = False


def _basis(path: Path, plan: "Plan") -> _Basis:
    """The basis of a plan file's figures: the run whose winner it is, if that run contains the plan."""
    run = path.absolute().parent.parent
    if path.absolute().parent.name != "best" or not (run / "config.json").is_file():
        return _Basis(words=_NOT_CALIBRATED)
    from quartet_plugin.cli.runs import read_whole
    from quartet_plugin.tuner.learned_run import learned_run

    is_stand_in = False
    try:
        history, study, fault = read_whole(run)
        is_stand_in = bool(history.baseline_note)
        learned = None if study is None else learned_run(run, history=history, study=study)
        reason = "" if fault is None else f" ({fault})"
    except QuartetError as error:
        learned, reason = None, f" ({error})"
    if learned is None or not learned.predictor.knows(plan):
        return _Basis(words=f"{_NOT_CALIBRATED}{reason}", is_stand_in=is_stand_in)
    num = len(learned.predictor.measured)
    words = f"the cost model as {num} measured trials of the run calibrated it"
    return _Basis(words=words, learned=learned, is_stand_in=is_stand_in)


def _shapes(plan: Path, explained: "Explained") -> "ShapeCurve | None":
    """Throughput against shape: measured by the plan's run, or planned."""
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


def _measured_of(plan: "Plan") -> _Measured:
    """The measured seconds that a plan file has."""
    measurement = plan.measurement
    if measurement is None:
        return None, None
    return measurement.plan.iteration_s.median, measurement.baseline.iteration_s.median


def _explanation(
    plan: "Plan",
    job: "PlanRequest",
    explained: "Explained",
    basis: _Basis,
    *,
    measured: _Measured,
    is_measured_in_rounds: bool,
) -> "Explanation":
    from quartet_plugin.report.explain import Explanation, StageMemory
    from quartet_plugin.report.final_choice import choice_lines
    from quartet_plugin.report.planned import cost_of_job, rates_of
    from quartet_plugin.report.speedups import speedup_pair

    prediction = explained.prediction
    counts, ranks = plan.split.transformer_layers_per_stage, plan.layout.pipeline_parallel
    placement = plan.schedule.placement or tuple(k % ranks for k in range(len(counts)))
    layers = [
        sum(n for n, device in zip(counts, placement, strict=True) if device == rank) for rank in range(ranks)
    ]
    # Of a job without devices that the library knows no peak is known.
    rates = rates_of(
        job, prediction.iter_time_s, shape=plan.shape, has_peak=explained.available_bytes is not None
    )
    return Explanation(
        title=_title(plan, explained.num_microbatches),
        choice=choice_lines(plan),
        iteration_s=prediction.iter_time_s,
        stated_s=None if plan.prediction is None else plan.prediction.iteration_s,
        terms=prediction.terms,
        compute_terms=prediction.compute_terms,
        bubble_fraction=prediction.bubble_fraction,
        memory=[
            StageMemory(
                rank=rank, num_layers=layers[rank], total_bytes=memory.total_bytes, terms=memory.terms
            )
            for rank, memory in enumerate(explained.memory)
        ],
        available_bytes=explained.available_bytes,
        runner_up=_runner_up(explained.other),
        assumed=explained.assumed,
        rates=rates,
        cost=cost_of_job(job, rates),
        basis=basis.words,
        num_trials=None if basis.learned is None else len(basis.learned.predictor.measured),
        measured_s=measured[0],
        is_measured_in_rounds=is_measured_in_rounds,
        speedup="" if plan.measurement is None else speedup_pair(plan),
        baseline=_baseline(plan, explained, measured_s=None if basis.is_stand_in else measured[1]),
    )


def _runner_up(other: "OtherPlan | None") -> "RunnerUp | None":
    from quartet_plugin.report.explain import RunnerUp
    from quartet_plugin.space.plan_label import plan_label

    if other is None:
        return None
    # Equal work over an iteration of its own shape.
    scale = other.equal_work_s / other.prediction.iter_time_s
    return RunnerUp(
        label=plan_label(other.plan),
        equal_work_s=other.equal_work_s,
        trial=other.trial,
        terms={name: value * scale for name, value in other.prediction.terms.items()},
    )


def _baseline(plan: "Plan", explained: "Explained", *, measured_s: float | None) -> "BaselineTerms | None":
    """The iteration of the plan's baseline, to compare with the plan's own."""
    from quartet_plugin.report.explain import PLAIN_BASELINE, YOUR_COMMAND, BaselineTerms

    prediction = explained.baseline
    if prediction is None:
        return None
    return BaselineTerms(
        # A plan of a described job is compared with a plain layout where no command was given.
        name=YOUR_COMMAND if plan.made_for.job is None else PLAIN_BASELINE,
        iteration_s=prediction.iter_time_s,
        terms=prediction.terms,
        compute_terms=prediction.compute_terms,
        bubble_fraction=prediction.bubble_fraction,
        measured_s=measured_s,
    )


def _title(plan: "Plan", num_microbatches: int) -> list[tuple[str, str]]:
    from quartet_plugin.report.explain import layout_words
    from quartet_plugin.report.formatting import microbatch_words
    from quartet_plugin.schedule.choice import origin_words
    from quartet_plugin.space.plan_label import plan_label

    shape, mtp_layers, custom = plan.shape, plan.made_for.mtp_layers, plan.schedule.custom
    order = None if custom is None else origin_words(custom)
    split = plan.split.label if len(plan.split.label) <= 80 else f"{plan.split.label[:77]}..."
    place = "on the stage before the last one" if plan.split.mtp_before_last else "last"
    return [
        ("plan", f"{plan.digest[:12]} for {plan.made_for.world_size} devices"),
        ("parts", plan_label(plan)),
        ("shape", f"{shape.num_layers} layers, hidden {shape.hidden_size}, sequences of {shape.seq_length}"),
        ("layout", f"{layout_words(plan.layout)}, {microbatch_words(num_microbatches)}"),
        ("split", f"{split}, multi-token prediction ({mtp_layers}) {place}" if mtp_layers else split),
        ("schedule", plan.schedule.label),
        *([] if order is None else [("order", order)]),
        ("mapping", plan.mapping.label),
    ]
