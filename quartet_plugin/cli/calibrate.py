"""`quartet calibrate`: the cost model's constants as profiles and trials on one cluster correct them."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet_plugin.cli.command import check_folder
from quartet_plugin.cli.output import show
from quartet_plugin.errors import ConfigError, QuartetError, UsageError

if TYPE_CHECKING:
    from quartet_plugin.calibration.constants_fit import Calibration
    from quartet_plugin.calibration.observations import Observation
    from quartet_plugin.cost.run import TrainingRun, UniformCluster
    from quartet_plugin.model.training_job import TrainingJob
    from quartet_plugin.trial.request import TrialResult

_DIRECTIONS = {"F": "forward", "I": "input_grad", "W": "weight_grad", "B": "backward"}
# Launches of one command on one machine repeat to about this.
_LEAST_SPREAD = 0.02
# A profile's iterations defer half of their weight gradients.
_PROFILE_SPREAD = 0.05


def calibrate_command(
    cluster: Annotated[
        Path,
        typer.Option(
            metavar="CLUSTER.json",
            help="The cluster file of the measured machines.",
            show_default=False,
        ),
    ],
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Run folders of quartet tune.", show_default=False),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A file that `quartet profile` wrote; may be repeated."),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The file to write.")] = Path(
        "calibration.json"
    ),
) -> None:
    """Correct the cost model's constants with a cluster's measurements, and print their intervals."""
    from quartet_plugin.calibration.constants_fit import calibrate, fixed_by_probe, write_calibration
    from quartet_plugin.cost.cluster import with_measured_hop
    from quartet_plugin.cost.constants import fitted
    from quartet_plugin.model.cluster import read_cluster

    if not runs and not profile:
        raise UsageError(
            "quartet calibrate: nothing measured; name run folders, or add --profile PROFILE.json"
        )
    check_folder(output)
    observations: list[Observation] = []
    for path in profile or ():
        observations += of_profile(path, cluster=cluster)
    for path in runs or ():
        observations += of_run_folder(path, cluster=cluster)
    content = read_cluster(cluster)
    # The shared constants, with the latency that the cluster file has.
    prior = with_measured_hop(fitted(), content)
    fixed = fixed_by_probe(observations) if content.links.measured else ()
    calibration = calibrate(observations, prior=prior, fixed=fixed)
    source = ", ".join(str(path) for path in (*(profile or ()), *(runs or ())))
    write_calibration(calibration, path=output, source=source)
    show(f"{output}:", *lines(calibration))


def lines(calibration: "Calibration") -> list[str]:
    """Every constant with its 95 % interval, and the prediction error of a new iteration."""
    terms = [
        f"{term.name:14}{term.value:10.4g} (95 % interval {term.low:.4g} to {term.high:.4g}; "
        f"prior {term.prior:.4g}); {term.num_measurements} measurements reduce its uncertainty by "
        f"{term.learned:.0%}"
        for term in calibration.terms
    ]
    return [
        *terms,
        f"{calibration.num_iterations} iterations and {calibration.num_parts} parts; prediction error of a "
        f"new iteration: ±{1.96 * calibration.iteration_error:.1%} (95 %), plus the uncertainty of the "
        "constants",
    ]


def of_profile(path: Path, *, cluster: Path) -> "list[Observation]":
    """The measurements in a profile. Raises ConfigError."""
    from quartet_plugin.calibration.measured_runs import measured_run
    from quartet_plugin.calibration.observations import Observation
    from quartet_plugin.calibration.profile import Profile, observations_of
    from quartet_plugin.model.schema import read_record
    from quartet_plugin.model.training_job import parse_training_job

    profile = read_record(Profile, path)
    job = parse_training_job(profile.job, where=f"{path}: job")
    on_cpu, is_single_rank = profile.ranks[0].device == "cpu", profile.played is not None
    run = measured_run(
        job,
        None,
        on_cpu=on_cpu,
        cluster=_cluster_of(job, cluster, on_cpu=on_cpu, where=str(path)),
        where=f"{path}: job",
        is_single_rank=is_single_rank,
    )
    observations = observations_of(run, profile.ranks, is_single_rank=is_single_rank)
    if profile.iteration_s:
        seconds = statistics.median(profile.iteration_s)
        observations.append(Observation(run=run, seconds=seconds, spread=_PROFILE_SPREAD))
    return observations


def of_run_folder(folder: Path, *, cluster: Path) -> "list[Observation]":
    """The measured trials of a run folder: their iterations, and their actions if the ranks recorded them.

    Raises ConfigError for a folder without any, and for a job that the cost model cannot price.
    """
    from quartet_plugin.calibration.observations import Observation
    from quartet_plugin.trial.attempt import read_result

    observations: list[Observation] = []
    for attempt in sorted((folder / "trials").glob("*/attempt-*")):
        result = read_result(attempt)
        if result is None or not result.is_measured or not result.iteration_s:
            continue
        run = _run_of_trial(result, cluster=cluster)
        if run is not None:
            seconds, spread = statistics.median(result.iteration_s), _spread(result.iteration_s)
            observations.append(Observation(run=run, seconds=seconds, spread=spread))
            observations += _of_actions(attempt, run=run)
    if not observations:
        raise ConfigError(f"{folder}: no measured trial; name a folder that quartet tune has filled")
    return observations


def _run_of_trial(result: "TrialResult", *, cluster: Path) -> "TrainingRun | None":
    """The trial's run; None without a report of the job, or for a model that is no list of layers."""
    from quartet_plugin.calibration.measured_runs import measured_run
    from quartet_plugin.model.files import read_json
    from quartet_plugin.model.plan import read_plan
    from quartet_plugin.model.training_job import parse_training_job

    if result.job is None:
        return None
    where = f"{result.folder}: job"
    job = parse_training_job(result.job, where=where)
    path = result.folder / "plan.json"
    plan = read_plan(path) if path.exists() else None
    source = plan or job
    if source.split is None:
        return None
    on_cpu = read_json(min(result.folder.glob("rank-*[0-9].json"))).get("device") == "cpu"
    known = _cluster_of(job, cluster, on_cpu=on_cpu, where=str(result.folder))
    return measured_run(job, plan, on_cpu=on_cpu, cluster=known, where=where)


def _cluster_of(job: "TrainingJob", path: Path, *, on_cpu: bool, where: str) -> "UniformCluster":
    """The cluster file's devices, equal ones, in the job's precision.

    Raises ConfigError for accelerators where the measurement `where` was made on processor cores.
    """
    from quartet_plugin.cost.cluster import look_up, uniform_cluster_of
    from quartet_plugin.cost.constants import fitted
    from quartet_plugin.model.cluster import read_cluster
    from quartet_plugin.planner.job import PROCESSORS

    cluster = uniform_cluster_of(look_up(read_cluster(path), precision=job.precision), fitted())
    if on_cpu and cluster.device.generation not in PROCESSORS:
        raise ConfigError(
            f"--cluster {path}: {cluster.device.name}; {where} was measured on processor cores, and the "
            "cluster file must have the measured devices: write it with `quartet probe --device cpu` on that "
            f"machine, or calibrate with measurements of the {cluster.device.name}"
        )
    return cluster


def _of_actions(folder: Path, *, run: "TrainingRun") -> "Iterator[Observation]":
    """Each stage's forward, input and weight gradient, as the last step's records have them."""
    from quartet_plugin.calibration.observations import Direction, Observation, Quantity
    from quartet_plugin.protocol.rank_files import read_actions, seconds_by_stage

    try:
        records = read_actions(folder)
    except QuartetError:
        return  # a schedule of Megatron's own leaves none
    for (stage, kind), times in seconds_by_stage(records).items():
        middle = statistics.median(times)
        if middle > 0 and stage < run.layout.num_stages:
            yield Observation(
                run=run,
                seconds=middle,
                spread=_spread(times),
                quantity=Quantity.STAGE,
                direction=Direction(_DIRECTIONS[kind]),
                index=stage,
            )


def _spread(times: Sequence[float]) -> float:
    from quartet_plugin.calibration.observations import spread_of

    return max(_LEAST_SPREAD, spread_of(times))
