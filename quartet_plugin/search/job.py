"""What trial 0 reported, as plans need it: what every plan is made for, the baseline, the slots."""

from collections.abc import Iterable, Sequence

from quartet_plugin import __version__
from quartet_plugin.errors import ConfigError
from quartet_plugin.mapping.orders import slots_of
from quartet_plugin.model.plan import Baseline, Crowd, MadeFor, Mapping, NodeInfo, Plan, Provenance
from quartet_plugin.search.features import batching_features
from quartet_plugin.trial.files import Job, RankReport, parse_job

__all__ = ["Job", "baseline_plan", "made_for", "nodes_of", "parse_job", "world_size_of"]


def world_size_of(job: Job) -> int:
    """Processes of the user's command."""
    return job.layout.world_size


def made_for(job: Job, *, nodes: Sequence[NodeInfo]) -> MadeFor:
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


def baseline_plan(job: Job, *, nodes: Sequence[NodeInfo], run: str, seed: int) -> Plan:
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


def nodes_of(reports: Iterable[RankReport]) -> tuple[NodeInfo, ...]:
    """The nodes that ranks ran on, in the launcher's order of ranks.

    Raises ConfigError where a node's local ranks are not 0, 1, ...: a slot could not be named.
    """
    locals_of: dict[str, list[int]] = {}
    device_of: dict[str, str] = {}
    known = sorted(reports, key=lambda report: report.launch_rank)
    for report in known:
        locals_of.setdefault(report.host, []).append(report.local_rank)
        device_of.setdefault(report.host, report.device)
    for host, local_ranks in locals_of.items():
        if sorted(local_ranks) != list(range(len(local_ranks))):
            raise ConfigError(
                f"host {host}: local ranks {sorted(local_ranks)}; "
                f"must be 0 to {len(local_ranks) - 1}, each once"
            )
    return tuple(
        NodeInfo(
            host=host,
            node_class=f"{device_of[host]} x{len(ranks)}",
            num_slots=len(ranks),
            crowds=_crowds([one for one in known if one.host == host]),
        )
        for host, ranks in locals_of.items()
    )


def _crowds(reports: Sequence[RankReport]) -> tuple[Crowd, ...] | None:
    """Ranks of one host that may use the same cores, fewer than they are."""
    locals_on: dict[tuple[int, ...], list[int]] = {}
    for report in reports:
        if report.cores:
            locals_on.setdefault(report.cores, []).append(report.local_rank)
    found = [
        Crowd(locals=tuple(sorted(there)), num_cores=len(cores))
        for cores, there in sorted(locals_on.items())
        if len(there) > len(cores)
    ]
    return tuple(found) or None
