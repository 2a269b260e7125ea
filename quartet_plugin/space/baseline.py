"""What trial 0 reported, as plans need it: what every plan is made for, the baseline, the slots."""

from collections.abc import Sequence

from quartet_plugin import __version__
from quartet_plugin.errors import ConfigError
from quartet_plugin.mapping.orders import slots_of
from quartet_plugin.model.plan import Baseline, MadeFor, Mapping, NodeInfo, Plan, Provenance
from quartet_plugin.model.training_job import TrainingJob, parse_training_job
from quartet_plugin.space.features import batching_features

__all__ = ["TrainingJob", "baseline_plan", "made_for", "parse_training_job", "world_size_of"]


def world_size_of(job: TrainingJob) -> int:
    """Processes of the user's command."""
    return job.layout.world_size


def made_for(job: TrainingJob, *, nodes: Sequence[NodeInfo]) -> MadeFor:
    """What every plan of the run is for. Raises ConfigError for a model that has no split."""
    if job.split is None:
        raise ConfigError(
            "the model is not one list of like layers (hybrid or encoder-decoder): "
            "its stages cannot be planned; tune a GPTModel"
        )
    return MadeFor(
        framework=job.framework,
        framework_version=job.framework_version,
        shape=job.shape,
        global_batch_size=job.global_batch_size,
        baseline=Baseline(layout=job.layout, split=job.split, schedule=job.schedule),
        batching_features=batching_features(job.features) or None,
        world_size=world_size_of(job),
        nodes=tuple(nodes),
    )


def baseline_plan(job: TrainingJob, *, nodes: Sequence[NodeInfo], run: str, seed: int) -> Plan:
    """The user's own configuration as a plan.

    Raises ConfigError for a model that has no split, PlanError where the report contradicts itself.
    """
    fits = made_for(job, nodes=nodes)
    return Plan(
        made_for=fits,
        shape=job.shape,
        layout=fits.baseline.layout,
        split=fits.baseline.split,
        schedule=fits.baseline.schedule,
        mapping=Mapping(slots=slots_of(nodes)),
        provenance=Provenance(run=run, trial=0, seed=seed, quartet_version=__version__),
    )
