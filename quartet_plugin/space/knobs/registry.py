"""Every knob, in the order in which a plan's values are chosen."""

from argparse import Namespace

from quartet_plugin.errors import PlanError
from quartet_plugin.model.layout import Setting
from quartet_plugin.model.megatron_arguments import (
    LINEAR_ATTENTION_HEADS,
    linear_attention_heads_of,
    value_in_words,
)
from quartet_plugin.space.knobs.context_parallel import CONTEXT_PARALLEL
from quartet_plugin.space.knobs.cp_comm_type import CP_COMM_TYPE, HIERARCHICAL_SIZES
from quartet_plugin.space.knobs.cuda_graph_modules import CUDA_GRAPH_MODULES
from quartet_plugin.space.knobs.data_parallel import DATA_PARALLEL
from quartet_plugin.space.knobs.ddp_bucket_size import DDP_BUCKET_SIZE
from quartet_plugin.space.knobs.distributed_optimizer import DISTRIBUTED_OPTIMIZER
from quartet_plugin.space.knobs.expert_overlap import (
    DELAYED_WEIGHT_GRADIENTS,
    EXPERT_OVERLAP,
    SHARED_EXPERT_OVERLAP,
)
from quartet_plugin.space.knobs.expert_parallel import EXPERT_PARALLEL
from quartet_plugin.space.knobs.expert_tensor_parallel import EXPERT_TENSOR_PARALLEL
from quartet_plugin.space.knobs.group import GROUP
from quartet_plugin.space.knobs.knob import Knob, LayoutKnob, LiveJob, SettingKnob, Value
from quartet_plugin.space.knobs.mapping import MAPPING
from quartet_plugin.space.knobs.micro_batch_size import MICRO_BATCH_SIZE
from quartet_plugin.space.knobs.moe_grouped_gemm import MOE_GROUPED_GEMM
from quartet_plugin.space.knobs.mtp_stage import MTP_STAGE
from quartet_plugin.space.knobs.offload_modules import OFFLOAD_MODULES
from quartet_plugin.space.knobs.optimizer_cpu_offload import OPTIMIZER_CPU_OFFLOAD
from quartet_plugin.space.knobs.optimizer_offload_fraction import OPTIMIZER_OFFLOAD_FRACTION
from quartet_plugin.space.knobs.overlap_grad_reduce import OVERLAP_GRAD_REDUCE
from quartet_plugin.space.knobs.overlap_param_gather import OVERLAP_PARAM_GATHER
from quartet_plugin.space.knobs.pipeline_parallel import PIPELINE_PARALLEL
from quartet_plugin.space.knobs.recompute import RECOMPUTE
from quartet_plugin.space.knobs.recompute_layers import RECOMPUTE_METHOD, RECOMPUTE_NUM_LAYERS
from quartet_plugin.space.knobs.recompute_modules import RECOMPUTE_MODULES
from quartet_plugin.space.knobs.schedule import SCHEDULE
from quartet_plugin.space.knobs.sequence_parallel import SEQUENCE_PARALLEL
from quartet_plugin.space.knobs.shape import SHAPE
from quartet_plugin.space.knobs.split import SPLIT
from quartet_plugin.space.knobs.tensor_parallel import TENSOR_PARALLEL
from quartet_plugin.space.knobs.tensor_partition import TENSOR_PARTITION
from quartet_plugin.space.knobs.token_dispatcher import TOKEN_DISPATCHER
from quartet_plugin.space.knobs.use_megatron_fsdp import USE_MEGATRON_FSDP
from quartet_plugin.space.knobs.virtual_stages import VIRTUAL_STAGES
from quartet_plugin.space.knobs.zero_buckets import ALLGATHER_BUCKET_SIZE, REDUCE_BUCKET_SIZE
from quartet_plugin.space.knobs.zero_stage import ZERO_STAGE

# Chosen together, as one parameter of the study: their product is the number of processes.
DEGREES: tuple[LayoutKnob, ...] = (
    TENSOR_PARALLEL,
    CONTEXT_PARALLEL,
    PIPELINE_PARALLEL,
    DATA_PARALLEL,
    EXPERT_PARALLEL,
)
# Chosen one after the other, before the schedule, which depends on them.
BEFORE_SCHEDULE: tuple[LayoutKnob, ...] = (
    VIRTUAL_STAGES,
    MICRO_BATCH_SIZE,
    ZERO_STAGE,
    DISTRIBUTED_OPTIMIZER,
    SEQUENCE_PARALLEL,
    TENSOR_PARTITION,
    RECOMPUTE,
)
# Chosen last: no other choice depends on them.
SETTINGS: tuple[SettingKnob, ...] = (
    EXPERT_TENSOR_PARALLEL,
    TOKEN_DISPATCHER,
    SHARED_EXPERT_OVERLAP,
    EXPERT_OVERLAP,
    DELAYED_WEIGHT_GRADIENTS,
    MOE_GROUPED_GEMM,
    CUDA_GRAPH_MODULES,
    OVERLAP_GRAD_REDUCE,
    OVERLAP_PARAM_GATHER,
    DDP_BUCKET_SIZE,
    OPTIMIZER_CPU_OFFLOAD,
    OPTIMIZER_OFFLOAD_FRACTION,
    CP_COMM_TYPE,
    HIERARCHICAL_SIZES,
    OFFLOAD_MODULES,
    RECOMPUTE_METHOD,
    RECOMPUTE_NUM_LAYERS,
    RECOMPUTE_MODULES,
    USE_MEGATRON_FSDP,
)
OPTIONS: tuple[LayoutKnob, ...] = (REDUCE_BUCKET_SIZE, ALLGATHER_BUCKET_SIZE, *SETTINGS)
LAYOUT_KNOBS: tuple[LayoutKnob, ...] = (*DEGREES, *BEFORE_SCHEDULE, *OPTIONS)
KNOBS: tuple[Knob, ...] = (
    SHAPE,
    *DEGREES,
    *BEFORE_SCHEDULE,
    SCHEDULE,
    GROUP,
    MTP_STAGE,
    SPLIT,
    MAPPING,
    *OPTIONS,
)
BY_NAME: dict[str, Knob] = {knob.name: knob for knob in KNOBS}


def knobs_read_back(live: LiveJob, *, framework: str) -> dict[str, Value]:
    """The values of the framework's knobs in a job that runs, by name; those that it lacks are absent."""
    known = [knob for knob in LAYOUT_KNOBS if knob.is_of(framework)]
    values = {knob.name: value_in_words(knob.read_back(live)) for knob in known}
    return {name: value for name, value in values.items() if value is not None}


def settings_of(args: Namespace) -> list[Setting]:
    """The values of the settings that a plan can change, as Megatron's arguments have them.

    With a fact that rules need, the heads of linear attention.
    """
    values = {knob.name: knob.read(args) for knob in SETTINGS}
    values[LINEAR_ATTENTION_HEADS] = linear_attention_heads_of(args)
    return [Setting(name=name, value=value) for name, value in values.items() if value is not None]


def setting_knob(setting: Setting) -> SettingKnob:
    """The knob of a plan's setting. Raises PlanError for a setting, or a value, that no knob has."""
    knob = next((knob for knob in SETTINGS if knob.name == setting.name), None)
    if knob is None:
        names = ", ".join(knob.name for knob in SETTINGS)
        raise PlanError(f"layout.settings: {setting.name}; this release knows {names}")
    if not knob.takes(setting.value):
        raise PlanError(f"layout.settings.{setting.name}: {setting.value!r}; must be a {knob.kind}")
    return knob
