"""The run of a profile or a trial as the cost model prices it, with all that its report says of the job.

A run that is priced as another one moves the constants towards what makes up for the difference. So jobs that
the cost model takes for simpler ones, and reports without what a price needs, are refused in one line.
"""

from dataclasses import replace

from quartet_plugin.cost.iteration.plan_terms import run_of_job
from quartet_plugin.cost.run import TrainingRun, UniformCluster
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.job_description import Experts
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.training_job import TrainingJob

# Features with which measurements of a job are refused, by name, and the reason.
UNPRICED = {
    "heterogeneous": "its layers have several sizes, which the cost model takes for like ones",
    "attention_variant": "some of its layers have an attention that the cost model does not know",
    "sliding_window": "the window of its attention is not in the report",
    "packing": "the lengths of the documents in its sequences are not in the report",
    "fp8": "the scales of its 8-bit products are not in the report",
    "fp4": "the scales of its 4-bit products are not in the report",
    "fsdp": "the precision of its sharded gradients is not in the report",
    "torch_fsdp": "its parameters are sharded over replicas, which the report does not describe",
    "weight_shards": "its weights are sharded over ranks, which the report does not describe",
    "cpu_offload": "whole layers' activations move to the host, which the cost model does not know",
    "activation_offload_part": "the part of its modules' activations on the host is not in the report",
    "optimizer_offload_part": "the part of the optimizer on the host is not in the report",
    "rampup_batch_size": "its batch changes while it trains",
    "cp_comm_by_layer": "its layers share sequences in several ways, which the cost model takes for one",
    "moe_capacity": "the report lacks the number of tokens that its experts drop; only experts padded to "
    "their capacity compute a known number",
    "expert_tensor_parallel": "its experts are cut in other shares than the cost model knows",
    "mtp_on_inner_stage": "it predicts further tokens where the cost model does not have them",
    "emerging_optimizer": "the state and the step of its optimizer are not those of Adam",
}
# The fix for a report that lacks what a prediction needs.
_FIX = "measure again with this release, or calibrate with other jobs"


def measured_run(
    job: TrainingJob,
    plan: Plan | None,
    *,
    on_cpu: bool,
    cluster: UniformCluster,
    where: str,
    is_single_rank: bool = False,
) -> TrainingRun:
    """The run of a reported job, under a plan or as the user wrote it, on its part of the cluster's devices.

    `is_single_rank`: one rank was run alone, without communication. Raises ConfigError for a job that cannot
    be priced as what it is; `where` names its report.
    """
    source = plan or job
    layout = source.layout
    if source.split is None:
        raise ConfigError(
            f"{where}.split: null; must be the layers of each stage, which only models that are lists of "
            "layers report; calibrate with measurements of other jobs"
        )
    _check_priced(job, where=where)
    if "hybrid" in job.features:
        _check_hybrid(source.shape, job, where=where)
    if is_single_rank and job.experts is not None and layout.tensor_parallel * layout.expert_parallel > 1:
        raise ConfigError(
            f"{where}.experts: {job.experts.label}; a rank that runs alone gets no other rank's tokens for "
            "them; profile all ranks of a smaller job"
        )
    return run_of_job(
        source,
        job,
        split=source.split,
        global_batch_size=job.global_batch_size,
        mtp_layers=job.mtp_layers or 0,
        on_cpu=on_cpu,
        cluster=replace(cluster, num_devices=layout.world_size),
    )


def _check_priced(job: TrainingJob, *, where: str) -> None:
    """Raises ConfigError for the first feature without a price, and for the first part that is missing."""
    features = frozenset(job.features)
    priced: set[str] = set()
    if job.packed is not None:
        # Packed sequences have a price where ranks counted their documents.
        priced.add("packing")
    if job.experts is not None and _has_exact_capacity(job.experts):
        priced.add("moe_capacity")
    unpriced = next((name for name in UNPRICED if name in features - priced), None)
    if unpriced is not None:
        raise ConfigError(
            f"{where}.features: {unpriced}; {UNPRICED[unpriced]}; calibrate with measurements of other jobs"
        )
    if "moe" in features and job.experts is None:
        raise ConfigError(
            f"{where}.experts: null; their number and sizes are missing: reports of older releases lack "
            f"them, and those of models with dense layers behind experts; {_FIX}"
        )
    if "multi_latent_attention" in features and job.latent is None:
        raise ConfigError(
            f"{where}.latent: null; the ranks and head sizes of latent attention are missing: reports of "
            f"older releases lack them, and those of models without compressed queries; {_FIX}"
        )
    if "mtp" in features and job.mtp_layers is None:
        raise ConfigError(
            f"{where}.mtp_layers: null; the number of layers of multi-token prediction is missing; {_FIX}"
        )
    if "activation_offload" in features and job.setting("offload_modules") is None:
        raise ConfigError(
            f"{where}.settings: no offload_modules; the report must name the offloaded modules, all of them "
            f"known to this release; {_FIX}"
        )
    if job.experts is not None and job.settings is None:
        raise ConfigError(f"{where}.settings: null; the experts' dispatcher and shares are missing; {_FIX}")


def _has_exact_capacity(experts: Experts) -> bool:
    """Whether a capacity leaves no number of tokens open: with padding every expert gets its limit."""
    capacity = experts.capacity
    return capacity is not None and capacity.is_padded and capacity.rank_factor is None


def _check_hybrid(shape: ModelShape, job: TrainingJob, *, where: str) -> None:
    """Raises ConfigError for a hybrid model whose layers are not known, or have no price, one by one."""
    if shape.pattern is None:
        raise ConfigError(
            f"{where}.shape.layer_kinds: no pattern; the order of its layers is missing: reports and plans "
            "of older releases lack it, and those of commands without --hybrid-layer-pattern; " + _FIX
        )
    assert shape.layer_kinds is not None, "a pattern is one of kinds"
    written = shape.layer_kinds.framework_pattern or shape.pattern
    if "G" in written:
        raise ConfigError(
            f"{where}.shape.layer_kinds: {written[:60]!r}; gated delta nets (G) are priced as state-space "
            "layers (M), whose scan they do not have; calibrate with measurements of other jobs"
        )
    if job.mtp_layers is not None and job.mtp_kinds is None:
        raise ConfigError(
            f"{where}.mtp_kinds: null; the layers of multi-token prediction are missing; {_FIX}"
        )
