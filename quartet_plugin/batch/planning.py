"""A job of a batch ranked by the planner, from its description or its command; nothing is started."""

from pathlib import Path
from typing import Any

from quartet_plugin.batch.config import Job
from quartet_plugin.calibration.constants_fit import read_calibration
from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.batch import BatchPaths, JobResult
from quartet_plugin.model.files import shown
from quartet_plugin.model.plan import write_plan
from quartet_plugin.model.sections import load_yaml
from quartet_plugin.planner.command_job import CommandJob, job_of_command
from quartet_plugin.planner.job import PlanRequest, parse_job
from quartet_plugin.planner.order_search import planned_ranking
from quartet_plugin.planner.plans import plain_layout, plan_of, users_layout
from quartet_plugin.report.formatting import clean
from quartet_plugin.report.planned import rates_of
from quartet_plugin.space.plan_label import plan_label
from quartet_plugin.tuner.config import TuneConfig

PLAN_NAME = "plan.json"


def planned(job: Job, *, config: TuneConfig, cwd: Path, paths: BatchPaths) -> JobResult:
    """The best predicted plan of a job, whose file is written into the job's folder.

    The job's command and the machine's files in q.yaml are looked for in `cwd`, as a search does. Raises
    ConfigError for a job that cannot be read, InfeasibleError where nothing fits.
    """
    request, command = _request_of(job, config=config, cwd=cwd)
    calibration = config.machine.calibration
    constants = None if calibration is None else read_calibration(cwd / calibration).constants
    best = planned_ranking(request, top=1, exhaustive=False, has_search=True, constants=constants).best[0]
    if command is None:
        plain = plain_layout(request, best=best, constants=constants)
    else:
        plain = users_layout(
            request,
            layout=command.layout,
            split=command.split,
            schedule=command.schedule,
            constants=constants,
        )
    plan = plan_of(request, best, plain=plain, name=job.name, place=1, constants=constants)
    path = paths.job(job.name) / PLAN_NAME
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_plan(plan, path=path)
    is_same_model = best.shape == request.shape
    return JobResult(
        name=job.name,
        kind="plan",
        state="done",
        priority=job.priority,
        best=clean(plan_label(plan), limit=300),
        predicted_s=best.iteration_s,
        tokens_per_s=rates_of(request, best.iteration_s, shape=best.shape).tokens_per_s,
        ratio=plain.iteration_s / best.iteration_s if is_same_model else None,
        peak_memory_bytes=round(best.memory.total_bytes),
        plan=str(path),
    )


def _request_of(job: Job, *, config: TuneConfig, cwd: Path) -> tuple[PlanRequest, CommandJob | None]:
    sections = _sections_of(job, config=config, cwd=cwd)
    folder = job.described.parent if isinstance(job.described, Path) else job.folder
    if not job.words:
        return parse_job(sections, where=f"jobs: {job.name}", folder=folder), None
    command = job_of_command(parse_command(job.words, cwd=cwd), sections=sections, folder=folder)
    return command.request, command


def _sections_of(job: Job, *, config: TuneConfig, cwd: Path) -> dict[str, Any]:
    """The sections of the job's JOB.yaml; missing parts of cluster and search come from its q.yaml."""
    content = load_yaml(job.described) if isinstance(job.described, Path) else job.described
    if content is not None and not isinstance(content, dict):
        raise ConfigError(
            f"{job.described}: a job is a mapping with model, cluster and batch: {shown(content)}"
        )
    sections = dict(content or {})
    if config.machine.cluster is not None:
        sections.setdefault("cluster", {"file": str(cwd / config.machine.cluster)})
    if job.config is not None and "search" not in sections:
        settings = load_yaml(job.config)
        if isinstance(settings, dict) and isinstance(settings.get("search"), dict):
            sections["search"] = settings["search"]
    return sections
