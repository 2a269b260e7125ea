"""The search space of a run: around the job of trial 0, or made again from its folder without a launch."""

from collections.abc import Sequence
from pathlib import Path

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.plan import NodeInfo
from quartet_plugin.model.training_job import TrainingJob, parse_training_job
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.attempts import read_launch
from quartet_plugin.tuner.finalists import BASELINE
from quartet_plugin.tuner.history import open_run
from quartet_plugin.tuner.proposer import kept_machine
from quartet_plugin.tuner.run_folder import TuningRun
from quartet_plugin.tuner.schedule_files import kept_schedules
from quartet_plugin.tuner.trial_backend import nodes_of


def space_around(job: TrainingJob, *, nodes: Sequence[NodeInfo], run: TuningRun) -> Space:
    """The space around a job under the configuration of `run`. Raises ConfigError where it has no plan."""
    return build_space(
        job,
        nodes=nodes,
        search=run.config.search,
        run=run.name,
        seed=run.config.study.seed,
        written=kept_schedules(run.config.search, folder=run.folder),
        scale_up_devices=kept_machine(run.folder).scale_up_devices,
    )


def space_of_run(path: Path) -> Space:
    """The space of the run in `path`. Raises ConfigError where its baseline was not measured yet."""
    run = open_run(path)
    faults: list[str] = []
    launch = read_launch(run.folder.trial(BASELINE), faults=faults)
    if launch.result is None or launch.result.job is None:
        raise ConfigError(f"{path}: the command was not measured yet, so its knobs are unknown")
    job = parse_training_job(launch.result.job, where=str(launch.result.folder))
    return space_around(job, nodes=nodes_of(launch.reports), run=run)
