"""Every function and class of Megatron that the plugin replaces or relies on, each declared once.

Which sources of them are known is data: one file a release, beside this one.
"""

from quartet_plugin.megatron.seams import declare

_ARGUMENTS = "megatron.training.arguments"
_TRAINING = "megatron.training.training"
_CHECKPOINTING = "megatron.training.checkpointing"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_UTILS = "megatron.core.pipeline_parallel.utils"
_STATE = "megatron.core.parallel_state"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"
_DDP = "megatron.core.distributed.distributed_data_parallel"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer"
_BUCKET_GROUP = "_ParamAndGradBucketGroup"
_LAYERS = "megatron.core.tensor_parallel.layers"
_LAYOUT = "megatron.core.transformer.pipeline_parallel_layer_layout"
_LINEAR = "LinearWithGradAccumulationAndAsyncCommunication"
_WITH, _WITHOUT = (f"forward_backward_pipelining_{how}_interleaving" for how in ("with", "without"))

# Every plan and every trial. Megatron's parser is asked for its flags; the others are wrapped.
ARGUMENTS = declare(_ARGUMENTS, "add_megatron_arguments")
TOKENIZER = declare("megatron.training.global_vars", "_build_tokenizer")
TRAIN_STEP = declare(_TRAINING, "train_step")
# Where Megatron has no `train_step`: the function that runs the microbatches is given the model.
SCHEDULE_CHOICE = declare(
    _SCHEDULES, "get_forward_backward_func", aliases=("megatron.core.pipeline_parallel", _TRAINING)
)

# The guard of checkpoints.
SAVE = declare(_CHECKPOINTING, "save_checkpoint", aliases=(_TRAINING,))
LOAD = declare(_CHECKPOINTING, "_load_base_checkpoint")

OPTIMIZER_STATE = declare(
    "megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer.sharded_param_state_fully_reshardable"
)

# Linears of a layer cut as a plan says: every way to a GPT model passes through here with the specification.
GPT_MODEL_INIT = declare("megatron.core.models.gpt.gpt_model", "GPTModel.__init__")

# Custom schedules. get_forward_backward_func looks both functions up when it is called, for training and for
# every evaluation.
SCHEDULES = tuple(declare(_SCHEDULES, name) for name in (_WITH, _WITHOUT))
# Called by the runtime, not replaced.
RUNTIME_CALLED = (
    declare(_SCHEDULES, "forward_step"),
    declare(_SCHEDULES, "backward_step"),
    declare(_SCHEDULES, "deallocate_output_tensor"),
    declare(_SCHEDULES, "get_tensor_shapes"),
    declare(_SCHEDULES, "check_first_val_step"),
    # A bucket group's gather of parameters and its reduction of gradients.
    declare(_BUCKETS, f"{_BUCKET_GROUP}.start_param_sync"),
    declare(_BUCKETS, f"{_BUCKET_GROUP}.start_grad_sync"),
)
# The hook that adds a parameter's gradient to its sum; reports when that is done.
GRADIENT_HOOK = declare(_DDP, "DistributedDataParallel._make_backward_post_hook")
# Before 0.19.0 each schedule makes its groups itself.
BUILD_GROUPS = declare(_SCHEDULES, "_build_default_pg_collection")

# Stages on any devices.
IS_PP_LAST_STAGE = declare(
    _UTILS,
    "is_pp_last_stage",
    aliases=(
        _FINALIZE,
        "megatron.core.models.common.language_module.language_module",
        "megatron.core.pipeline_parallel.p2p_communication",
        _SCHEDULES,
        "megatron.training.models.gpt",
        "megatron.training.models.hybrid",
        _TRAINING,
    ),
)
GET_PP_LAST_RANK = declare(_UTILS, "get_pp_last_rank", aliases=(_FINALIZE,))
IS_FIRST = declare(_STATE, "is_pipeline_first_stage")
IS_LAST = declare(_STATE, "is_pipeline_last_stage")
INITIALIZE = declare(_STATE, "initialize_model_parallel")
GET_OPTIMIZER = declare("megatron.core.optimizer", "get_megatron_optimizer", aliases=(_TRAINING,))
WORD_EMBEDDING_GRADS = declare(_FINALIZE, "_allreduce_word_embedding_grads")
EVALUATE = declare(_TRAINING, "evaluate")

# The layout string. The last two are inherited from and overridden.
FROM_STR = declare(_LAYOUT, "PipelineParallelLayerLayout.from_str")
LAYOUT_CALLED = (
    declare(_LAYOUT, "PipelineParallelLayerLayout.__init__"),
    declare(_LAYOUT, "PipelineParallelLayerLayout.get_layer_offset"),
)

# The stages of a hybrid model's pattern, which only a custom schedule of such a model needs.
HYBRID_SEGMENT = declare("megatron.core.models.hybrid.hybrid_layer_allocation", "select_pipeline_segment")

# Split backwards. The last four compute a deferred gradient and take it over.
LINEAR = declare(_LAYERS, _LINEAR)
DDP_INIT = declare(_DDP, "DistributedDataParallel.__init__")
SPLIT_CALLED = (
    declare(_LAYERS, f"{_LINEAR}.forward"),
    declare(_LAYERS, f"{_LINEAR}.backward"),
    declare("megatron.core.utils", "prepare_input_tensors_for_wgrad_compute", aliases=(_LAYERS,)),
    GRADIENT_HOOK,
)

SPLIT_BACKWARD = (LINEAR, DDP_INIT, *SPLIT_CALLED)
# What must have a known source before a custom schedule replaces Megatron's.
CUSTOM_SCHEDULE = (
    TRAIN_STEP,
    *SCHEDULES,
    *RUNTIME_CALLED,
    BUILD_GROUPS,
    *(IS_PP_LAST_STAGE, GET_PP_LAST_RANK, IS_FIRST, IS_LAST, INITIALIZE),
    *(GET_OPTIMIZER, WORD_EMBEDDING_GRADS, EVALUATE),
    *(FROM_STR, *LAYOUT_CALLED),
    *SPLIT_BACKWARD,
)
CHECKPOINTS = (SAVE, LOAD)
ALL = (ARGUMENTS, TOKENIZER, *CHECKPOINTS, OPTIMIZER_STATE, GPT_MODEL_INIT, *CUSTOM_SCHEDULE, HYBRID_SEGMENT)
