"""What runs beside experts' exchange of tokens: the shared expert, or another microbatch, with or without its
weight gradients.
"""

from packaging.version import Version

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.releases import release_of
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, SettingKnob, Value, kept_fault, off_and_on
from quartet_plugin.space.knobs.token_dispatcher import ALLGATHER, TOKEN_DISPATCHER, refuses_shared_overlap

SHARED, OVERLAP, DELAY = (
    "moe_shared_expert_overlap",
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
)
# Features beside which another value was not tried: graphs are captured for one order of work, and sharded
# or offloaded tensors come and go in one.
_BOUND = ("cuda_graphs", "fsdp", "cpu_offload", "activation_offload")
# The release from which on it runs without a pipeline, too, beside a layer of multi-token prediction.
_MTP_ON_ONE_STAGE = Version("0.18")


def _exchanges(layout: Layout) -> bool:
    """Whether tokens leave their device."""
    return layout.expert_parallel * layout.tensor_parallel > 1


def _kept_on_device(rules: KnobRules) -> str | None:
    """Why no value but the command's can run on its devices; None where others can."""
    features = rules.job.features
    if "moe" not in features:
        return "the model has no experts"
    if rules.job.layer_impl == "local":
        return "it runs on streams of a GPU; needs --transformer-impl transformer_engine, which no CPU has"
    return next((name for name in _BOUND if name in features), None)


def _dispatcher_fault(context: KnobContext) -> str | None:
    has_it = context.setting(TOKEN_DISPATCHER.name) != ALLGATHER
    return None if has_it else "needs --moe-token-dispatcher-type alltoall or flex"


def _kept_beside_shared(rules: KnobRules) -> str | None:
    if (kept := _kept_on_device(rules)) is not None:
        return kept
    experts = rules.job.experts
    if experts is None:
        return "no plan describes these experts"
    return None if experts.shared_ffn_hidden_size else "the model has no shared expert"


def _fault_beside_shared(value: Value, context: KnobContext) -> str | None:
    command = context.rules.job.setting(SHARED) is True
    if kept := kept_fault(value, command, _kept_beside_shared(context.rules)):
        return kept
    if not value:
        return None
    if context.is_on(OVERLAP, feature="overlap_moe"):
        return "not supported with --overlap-moe-expert-parallel-comm"
    if context.layout.recompute == "selective" and "shared_experts" in context.recomputed_modules:
        return "not supported with recompute of shared_experts"
    if refuses_shared_overlap(context.setting(TOKEN_DISPATCHER.name), context.rules):
        return "needs --moe-token-dispatcher-type alltoall before Megatron 0.18"
    return _dispatcher_fault(context)


def _kept_beside_microbatch(rules: KnobRules) -> str | None:
    job = rules.job
    if (kept := _kept_on_device(rules)) is not None:
        return kept
    if job.precision == "fp32":
        return "not supported in fp32"
    if "hybrid" in job.features:
        return "HybridModel makes no plan of such a schedule"
    if (job.mtp_layers or 0) > 1:
        return "not supported with more than one layer of multi-token prediction"
    return None


def _fault_beside_microbatch(value: Value, context: KnobContext) -> str | None:
    job, layout = context.rules.job, context.layout
    if kept := kept_fault(value, job.setting(OVERLAP) is True, _kept_beside_microbatch(context.rules)):
        return kept
    if not value:
        return "the command's --delay-wgrad-compute needs it" if job.setting(DELAY) is True else None
    if layout.expert_parallel == 1:
        return "needs EP above 1"
    if layout.pipeline_parallel > 1 and layout.virtual_stages == 1:
        return "needs virtual stages in a pipeline"
    if (
        layout.pipeline_parallel == 1
        and job.mtp_layers
        and release_of(job.framework_version) < _MTP_ON_ONE_STAGE
    ):
        return f"with multi-token prediction needs PP above 1 before Megatron {_MTP_ON_ONE_STAGE}"
    if context.is_custom:
        return "runs in the framework's own schedules alone"
    if layout.recompute == "full":
        return "not supported with full recompute"
    if "moe" in context.recomputed_modules:
        return "not supported with recompute of moe"
    if context.is_on(SHARED, feature="moe_shared_expert_overlap"):
        return "not supported with --moe-shared-expert-overlap"
    return _dispatcher_fault(context)


def _delay_fault(value: Value, context: KnobContext) -> str | None:
    command = context.rules.job.setting(DELAY) is True
    if kept := kept_fault(value, command, _kept_beside_microbatch(context.rules)):
        return kept
    is_overlapped = context.is_on(OVERLAP, feature="overlap_moe")
    return "needs --overlap-moe-expert-parallel-comm" if value and not is_overlapped else None


SHARED_EXPERT_OVERLAP = SettingKnob(
    name=SHARED,
    label=SHARED,
    meaning="the shared expert runs during the exchange of tokens",
    kind="switch",
    axis=Axis.OPTIONS,
    change_class="B",
    rule="a shared expert, dispatcher alltoall, or flex from Megatron 0.18 on; not with "
    "overlap_moe_expert_parallel_comm or recompute of shared_experts "
    "(megatron/core/transformer/transformer_config.py); needs a GPU "
    "(megatron/core/transformer/moe/shared_experts.py)",
    flag="--moe-shared-expert-overlap",
    destination="moe_shared_expert_overlap",
    needs_gpu=True,
    default="stock",
    offers=off_and_on,
    fault=_fault_beside_shared,
    kept=_kept_beside_shared,
    read_back=lambda live: getattr(live.model, "moe_shared_expert_overlap", None),
    framework=MEGATRON.framework,
    applies=_exchanges,
)
EXPERT_OVERLAP = SettingKnob(
    name=OVERLAP,
    label=OVERLAP,
    meaning="experts' exchange of tokens of one microbatch runs during another's computation",
    kind="switch",
    axis=Axis.OPTIONS,
    change_class="B",
    rule="EP above 1, virtual stages in a pipeline, the framework's schedules, dispatcher alltoall or flex, "
    "fp16 or bf16, at most one layer of multi-token prediction, before 0.18 only in a pipeline; not with "
    "moe_shared_expert_overlap, full recompute or recompute of moe "
    "(megatron/core/transformer/transformer_config.py); needs a GPU "
    "(megatron/core/pipeline_parallel/combined_1f1b.py)",
    flag="--overlap-moe-expert-parallel-comm",
    destination="overlap_moe_expert_parallel_comm",
    needs_gpu=True,
    default="stock",
    offers=off_and_on,
    fault=_fault_beside_microbatch,
    kept=_kept_beside_microbatch,
    read_back=lambda live: getattr(live.model, "overlap_moe_expert_parallel_comm", None),
    framework=MEGATRON.framework,
    applies=_exchanges,
)
DELAYED_WEIGHT_GRADIENTS = SettingKnob(
    name=DELAY,
    label=DELAY,
    meaning="weight gradients run during the exchange of tokens, which does not wait for them",
    kind="switch",
    axis=Axis.OPTIONS,
    change_class="A",
    rule="with overlap_moe_expert_parallel_comm (megatron/core/transformer/transformer_config.py) and "
    "Transformer Engine's layers (megatron/training/arguments.py); needs a GPU",
    flag="--delay-wgrad-compute",
    destination="delay_wgrad_compute",
    needs_gpu=True,
    default="stock",
    offers=off_and_on,
    fault=_delay_fault,
    kept=_kept_beside_microbatch,
    read_back=lambda live: getattr(live.model, "delay_wgrad_compute", None),
    framework=MEGATRON.framework,
    applies=_exchanges,
)
