"""A planned job as the description that its plans carry, and back."""

from collections.abc import Mapping

from quartet_plugin.cost.cluster import look_up, uniform_cluster_of
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.devices import DeviceSpec
from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.model.job_description import EqualDevices, JobDescription
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.schema import dump
from quartet_plugin.model.sections import validate
from quartet_plugin.planner.job import ClusterSection, CostSection, PlanRequest, PlanSearch, machines_of


def description_of(job: PlanRequest) -> JobDescription:
    """What the job's file says beside shape and batch."""
    machines = job.machines
    devices = EqualDevices(
        device=machines.device.name,
        num_nodes=machines.num_devices // machines.devices_per_node,
        devices_per_node=machines.devices_per_node,
        scale_up_bandwidth_bytes_per_s=machines.scale_up_bytes_per_s,
        scale_out_bandwidth_bytes_per_s=machines.scale_out_bytes_per_s,
        memory_bytes=machines.memory_bytes,
    )
    return JobDescription(
        precision=job.precision,
        search=job.search.stated(),
        experts=job.experts,
        latent_attention=job.latent,
        devices=devices if job.cluster is None else None,
        cluster=None if job.cluster is None else job.cluster.cluster,
        price_per_device_hour=job.cost.price_per_device_hour,
        num_tokens=job.cost.tokens,
        vocab_size=job.vocab_size,
        features=job.features or None,
        settings=job.settings or None,
        mtp_kinds=job.mtp_kinds,
        logged_expert_layers=job.logged_expert_layers or None,
    )


def request_of(
    plan: Plan, said: JobDescription, *, devices: Mapping[str, DeviceSpec] | None = None
) -> PlanRequest:
    """The job that a plan's description says; `devices` go before the library's.

    Raises PlanError for a description that no job can have, ConfigError for an unknown device.
    """
    try:
        search = validate(PlanSearch, dict(said.search), where="made_for.job.search")
    except ConfigError as error:
        raise PlanError(str(error)) from error
    if said.cluster is not None:
        cluster = look_up(said.cluster, precision=said.precision, devices=devices)
        machines = uniform_cluster_of(cluster, fitted())
    else:
        assert said.devices is not None  # an invariant of JobDescription
        cluster = None
        machines = machines_of(ClusterSection(**dump(said.devices)), devices)
    return PlanRequest(
        shape=plan.made_for.shape,
        machines=machines,
        global_batch_size=plan.made_for.global_batch_size,
        precision=said.precision,
        search=search,
        experts=said.experts,
        latent=said.latent_attention,
        cluster=cluster,
        cost=CostSection(price_per_device_hour=said.price_per_device_hour, tokens=said.num_tokens),
        vocab_size=said.vocab_size,
        mtp_layers=plan.made_for.mtp_layers or 0,
        mtp_kinds=said.mtp_kinds,
        logged_expert_layers=said.logged_expert_layers or (),
        features=said.features or (),
        settings=said.settings or (),
        batching_features=plan.made_for.batching_features or (),
        baseline_split=plan.made_for.baseline.split.transformer_layers_per_stage,
        release=plan.made_for.framework_version,
    )
