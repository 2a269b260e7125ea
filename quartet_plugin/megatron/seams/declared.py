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
_NO_PIPELINING = f"{_SCHEDULES}:forward_backward_no_pipelining"

# Every plan and every trial. Megatron's parser is asked for its flags; the others are wrapped.
ARGUMENTS = declare(_ARGUMENTS, "add_megatron_arguments", use_sites=(f"{_ARGUMENTS}:parse_args",))
TOKENIZER = declare(
    "megatron.training.global_vars",
    "_build_tokenizer",
    use_sites=(
        "megatron.training.global_vars:rebuild_tokenizer",
        "megatron.training.global_vars:set_global_variables",
    ),
)
TRAIN_STEP = declare(_TRAINING, "train_step", use_sites=(f"{_TRAINING}:train",))
# Where Megatron has no `train_step`: the function that runs the microbatches is given the model.
SCHEDULE_CHOICE = declare(
    _SCHEDULES, "get_forward_backward_func", aliases=("megatron.core.pipeline_parallel", _TRAINING)
)

# The guard of checkpoints.
SAVE = declare(
    _CHECKPOINTING,
    "save_checkpoint",
    aliases=(_TRAINING,),
    use_sites=(
        f"{_TRAINING}:save_checkpoint_and_time",
        f"{_TRAINING}:setup_model_and_optimizer",
        "megatron.training.utils.common_utils:check_adlr_autoresume_termination",
    ),
)
LOAD = declare(
    _CHECKPOINTING,
    "_load_base_checkpoint",
    use_sites=(f"{_CHECKPOINTING}:load_args_from_checkpoint", f"{_CHECKPOINTING}:load_checkpoint"),
)

OPTIMIZER_STATE = declare(
    "megatron.core.optimizer.distrib_optimizer",
    "DistributedOptimizer.sharded_param_state_fully_reshardable",
)

# Linears of a layer cut as a plan says: every way to a GPT model passes through here with the specification.
GPT_MODEL_INIT = declare("megatron.core.models.gpt.gpt_model", "GPTModel.__init__")

# Custom schedules. get_forward_backward_func looks both functions up when it is called, for training and for
# every evaluation.
SCHEDULES = tuple(
    declare(_SCHEDULES, name, use_sites=(f"{_SCHEDULES}:get_forward_backward_func",))
    for name in (_WITH, _WITHOUT)
)
# Called by the runtime, not replaced.
RUNTIME_CALLED = (
    declare(
        _SCHEDULES,
        "forward_step",
        use_sites=(
            _NO_PIPELINING,
            f"{_SCHEDULES}:{_WITH}.forward_step_helper",
            f"{_SCHEDULES}:{_WITHOUT}",
        ),
    ),
    declare(
        _SCHEDULES,
        "backward_step",
        use_sites=(
            _NO_PIPELINING,
            f"{_SCHEDULES}:{_WITH}.backward_step_helper",
            f"{_SCHEDULES}:{_WITHOUT}",
        ),
    ),
    declare(
        _SCHEDULES,
        "deallocate_output_tensor",
        use_sites=(f"{_SCHEDULES}:{_WITH}", f"{_SCHEDULES}:{_WITHOUT}"),
    ),
    declare(_SCHEDULES, "get_tensor_shapes", use_sites=(f"{_SCHEDULES}:{_WITHOUT}",)),
    declare(
        _SCHEDULES,
        "check_first_val_step",
        use_sites=(_NO_PIPELINING, f"{_SCHEDULES}:{_WITHOUT}"),
    ),
    # A bucket group's gather of parameters and its reduction of gradients.
    declare(
        _BUCKETS,
        f"{_BUCKET_GROUP}.start_param_sync",
        use_sites=(f"{_BUCKETS}:{_BUCKET_GROUP}.finish_param_sync",),
    ),
    declare(
        _BUCKETS,
        f"{_BUCKET_GROUP}.start_grad_sync",
        use_sites=(f"{_BUCKETS}:{_BUCKET_GROUP}.finish_grad_sync",),
    ),
)
# The hook that adds a parameter's gradient to its sum; reports when that is done.
GRADIENT_HOOK = declare(
    _DDP,
    "DistributedDataParallel._make_backward_post_hook",
    use_sites=(f"{_DDP}:DistributedDataParallel.__init__",),
)
# Before 0.19.0 each schedule makes its groups itself.
BUILD_GROUPS = declare(
    _SCHEDULES,
    "_build_default_pg_collection",
    use_sites=(_NO_PIPELINING, f"{_SCHEDULES}:{_WITH}", f"{_SCHEDULES}:{_WITHOUT}"),
)

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
    use_sites=(
        f"{_FINALIZE}:_allreduce_embedding_grad",
        "megatron.core.models.common.language_module.language_module:LanguageModule._is_in_embd_group",
        "megatron.core.transformer.module:Float16Module.forward",
        "megatron.training.models.dist_utils:build_virtual_pipeline_stages",
        "megatron.training.models.gpt:GPTModelBuilder.build_model",
    ),
)
GET_PP_LAST_RANK = declare(
    _UTILS, "get_pp_last_rank", aliases=(_FINALIZE,), use_sites=(f"{_FINALIZE}:finalize_model_grads",)
)
IS_FIRST = declare(
    _STATE,
    "is_pipeline_first_stage",
    use_sites=(
        f"{_STATE}:is_rank_in_embedding_group",
        "megatron.core.utils:get_batch_on_this_tp_rank",
        f"{_CHECKPOINTING}:maybe_save_dataloader_state",
        "megatron.training.utils.common_utils:is_first_or_last_pipeline_stage",
    ),
)
IS_LAST = declare(
    _STATE,
    "is_pipeline_last_stage",
    use_sites=(
        f"{_STATE}:is_rank_in_embedding_group",
        f"{_SCHEDULES}:forward_step_calc_loss",
        "megatron.core.utils:get_batch_on_this_tp_rank",
    ),
)
INITIALIZE = declare(
    _STATE, "initialize_model_parallel", use_sites=("megatron.training.initialize:_initialize_distributed",)
)
GET_OPTIMIZER = declare(
    "megatron.core.optimizer",
    "get_megatron_optimizer",
    aliases=(_TRAINING,),
    use_sites=(
        "megatron.core.models.mimo.optimizer:get_mimo_optimizer",
        "megatron.core.optimizer.muon:get_megatron_muon_optimizer",
        f"{_TRAINING}:setup_model_and_optimizer",
    ),
)
WORD_EMBEDDING_GRADS = declare(
    _FINALIZE, "_allreduce_word_embedding_grads", use_sites=(f"{_FINALIZE}:finalize_model_grads",)
)
EVALUATE = declare(_TRAINING, "evaluate", use_sites=(f"{_TRAINING}:evaluate_and_print_results",))

# The layout string. The last two are inherited from and overridden.
FROM_STR = declare(
    _LAYOUT,
    "PipelineParallelLayerLayout.from_str",
    use_sites=("megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",),
)
LAYOUT_CALLED = (
    declare(_LAYOUT, "PipelineParallelLayerLayout.__init__"),
    declare(
        _LAYOUT,
        "PipelineParallelLayerLayout.get_layer_offset",
        use_sites=("megatron.core.transformer.transformer_layer:get_transformer_layer_offset",),
    ),
)

# The stages of a hybrid model's pattern, which only a custom schedule of such a model needs.
HYBRID_SEGMENT = declare(
    "megatron.core.models.hybrid.hybrid_layer_allocation",
    "select_pipeline_segment",
    use_sites=("megatron.core.models.hybrid.hybrid_model:HybridModel.__init__",),
)

# Split backwards. The last four compute a deferred gradient and take it over.
LINEAR = declare(
    _LAYERS, _LINEAR, use_sites=(f"{_LAYERS}:linear_with_grad_accumulation_and_async_allreduce",)
)
DDP_INIT = declare(_DDP, "DistributedDataParallel.__init__")
SPLIT_CALLED = (
    declare(_LAYERS, f"{_LINEAR}.forward"),
    declare(_LAYERS, f"{_LINEAR}.backward"),
    declare(
        "megatron.core.utils",
        "prepare_input_tensors_for_wgrad_compute",
        aliases=(_LAYERS,),
        use_sites=(f"{_LAYERS}:{_LINEAR}.backward",),
    ),
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
