"""The rules of the space for a job that is described and not run: no command's own value is kept."""

from dataclasses import replace

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import STOCK, Split
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.planner.job import PlanRequest, PlanSearch
from quartet_plugin.space.config import SEARCHED, STOCK_NAMES
from quartet_plugin.space.knobs.tensor_partition import REFUSED_FEATURES
from quartet_plugin.space.layouts import stock_choice
from quartet_plugin.space.rules import LayoutRules
from quartet_plugin.space.runtime_refusals import REFUSED, engine_layers_refusal

_ARGUMENTS = {"cuda_graphs": "cuda_graph_impl", "overlap_moe": "overlap_moe_expert_parallel_comm"}

# Of one device, micro-batch 1.
_ONE = Layout(
    tensor_parallel=1,
    pipeline_parallel=1,
    data_parallel=1,
    virtual_stages=1,
    context_parallel=1,
    expert_parallel=1,
    micro_batch_size=1,
    sequence_parallel=False,
    distributed_optimizer=False,
    recompute="none",
)


def rules_of(job: PlanRequest) -> LayoutRules:
    """The rules that the planned layouts of a job must satisfy, those of `search.forbid` left out.

    Where it asks for searched orders alone, every layout has its named ones, which the search begins from.
    """
    if job.rules is not None:
        return job.rules
    search = described_search(job)
    schedule = None if search.schedule == (SEARCHED,) else search.schedule
    return LayoutRules(
        job=training_job_of(
            job,
            layout=replace(
                _ONE,
                data_parallel=job.machines.num_devices,
                # Where a locked axis or another flag keeps it, the search has only the command's value
                # (`kept_axes`). Layouts with one copy of the model have that value, too.
                distributed_optimizer=job.search.distributed_optimizer == (True,),
            ),
            split=Split.of((job.shape.num_layers,)),
        ),
        nodes=job.nodes,
        search=search.model_copy(update={"schedule": schedule, "forbid": ()}),
        is_planned=True,
        scale_up_devices=job.largest_tensor_parallel,
        no_custom_schedules=job.no_custom_schedules or _refusal_of(job.features),
    )


def _refusal_of(features: tuple[str, ...]) -> str | None:
    """Why no custom schedule runs with a command of these features, as far as they tell."""
    arguments = {_ARGUMENTS[name] for name in features if name in _ARGUMENTS}
    return next(
        (f"{refused.flag}: {refused.reason}" for refused in REFUSED if refused.dest in arguments), None
    )


def described_search(job: PlanRequest) -> PlanSearch:
    """The search section; `stock` is the framework's own schedule of every layout: no command has another."""
    words = [STOCK_NAMES if name == STOCK else (name,) for name in job.search.schedule or ()]
    names = tuple(dict.fromkeys(name for names in words for name in names))
    search: PlanSearch = job.search.model_copy(update={"schedule": names or None})
    return search


def training_job_of(job: PlanRequest, *, layout: Layout, split: Split) -> TrainingJob:
    """The job as trial 0 would report it: Transformer Engine's layers in a stock layout of its devices."""
    present = {
        "fp8": job.precision == "fp8",
        "mtp": job.mtp_layers > 0,
        "moe": job.experts is not None,
        "multi_latent_attention": job.latent is not None,
    }
    kinds = [each for each in (job.shape.layer_kinds, job.mtp_kinds) if each is not None]
    return TrainingJob(
        framework=MEGATRON.framework,
        framework_version=job.release,
        torch_version="",
        shape=job.shape,
        layout=layout,
        split=split,
        schedule=stock_choice(layout),
        global_batch_size=job.global_batch_size,
        train_iters=0,
        precision=job.half,
        features=(*job.features, *(name for name, is_on in present.items() if is_on)),
        neutralised=(),
        settings=job.settings or None,
        full_backward=engine_layers_refusal(
            has_experts=job.experts is not None, has_state_space=any(each.state_space for each in kinds)
        ),
        layer_impl="transformer_engine",
        experts=job.experts,
        latent=job.latent,
        normalization=job.normalization,
        mtp_layers=job.mtp_layers or None,
        mtp_kinds=job.mtp_kinds,
        logged_expert_layers=job.logged_expert_layers or None,
        no_tensor_partition=next((REFUSED_FEATURES[name] for name in _special_layers(job)), None),
    )


def _special_layers(job: PlanRequest) -> list[str]:
    """The features whose layers have no partition; no axis of a plan is locked by them."""
    present = {
        "moe": job.experts is not None,
        "multi_latent_attention": job.latent is not None,
        "mtp": job.mtp_layers > 0,
        "hybrid": job.shape.layer_kinds is not None,
    }
    return [name for name, is_there in present.items() if is_there]
