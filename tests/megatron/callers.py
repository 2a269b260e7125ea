"""The functions of the installed Megatron that use a declared function: a release without them is noticed."""

_TRAINING = "megatron.training.training"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"
_CHECKPOINTING = "megatron.training.checkpointing"
_STATE = "megatron.core.parallel_state"
_LAYERS = "megatron.core.tensor_parallel.layers"
_DDP = "megatron.core.distributed.distributed_data_parallel"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer"
_LAYOUT = "megatron.core.transformer.pipeline_parallel_layer_layout"
_LINEAR = "LinearWithGradAccumulationAndAsyncCommunication"
_WITH, _WITHOUT = (f"forward_backward_pipelining_{how}_interleaving" for how in ("with", "without"))

# The path of the declared function -> MODULE:FUNCTION of each function that uses it.
CALLERS: dict[str, tuple[str, ...]] = {
    "megatron.training.arguments.add_megatron_arguments": ("megatron.training.arguments:parse_args",),
    "megatron.training.global_vars._build_tokenizer": (
        "megatron.training.global_vars:rebuild_tokenizer",
        "megatron.training.global_vars:set_global_variables",
    ),
    f"{_CHECKPOINTING}.save_checkpoint": (
        f"{_TRAINING}:save_checkpoint_and_time",
        f"{_TRAINING}:setup_model_and_optimizer",
        "megatron.training.utils.common_utils:check_adlr_autoresume_termination",
    ),
    f"{_CHECKPOINTING}._load_base_checkpoint": (
        f"{_CHECKPOINTING}:load_args_from_checkpoint",
        f"{_CHECKPOINTING}:load_checkpoint",
    ),
    f"{_TRAINING}.train_step": (f"{_TRAINING}:train",),
    f"{_SCHEDULES}.{_WITH}": (f"{_SCHEDULES}:get_forward_backward_func",),
    f"{_SCHEDULES}.{_WITHOUT}": (f"{_SCHEDULES}:get_forward_backward_func",),
    f"{_SCHEDULES}.forward_step": (
        f"{_SCHEDULES}:forward_backward_no_pipelining",
        f"{_SCHEDULES}:{_WITH}.forward_step_helper",
        f"{_SCHEDULES}:{_WITHOUT}",
    ),
    f"{_SCHEDULES}.backward_step": (
        f"{_SCHEDULES}:forward_backward_no_pipelining",
        f"{_SCHEDULES}:{_WITH}.backward_step_helper",
        f"{_SCHEDULES}:{_WITHOUT}",
    ),
    f"{_SCHEDULES}.deallocate_output_tensor": (
        f"{_SCHEDULES}:{_WITH}",
        f"{_SCHEDULES}:{_WITHOUT}",
    ),
    f"{_SCHEDULES}.get_tensor_shapes": (f"{_SCHEDULES}:{_WITHOUT}",),
    f"{_SCHEDULES}.check_first_val_step": (
        f"{_SCHEDULES}:forward_backward_no_pipelining",
        f"{_SCHEDULES}:{_WITHOUT}",
    ),
    f"{_BUCKETS}._ParamAndGradBucketGroup.start_param_sync": (
        f"{_BUCKETS}:_ParamAndGradBucketGroup.finish_param_sync",
    ),
    f"{_BUCKETS}._ParamAndGradBucketGroup.start_grad_sync": (
        f"{_BUCKETS}:_ParamAndGradBucketGroup.finish_grad_sync",
    ),
    f"{_SCHEDULES}._build_default_pg_collection": (
        f"{_SCHEDULES}:forward_backward_no_pipelining",
        f"{_SCHEDULES}:{_WITH}",
        f"{_SCHEDULES}:{_WITHOUT}",
    ),
    "megatron.core.pipeline_parallel.utils.is_pp_last_stage": (
        f"{_FINALIZE}:_allreduce_embedding_grad",
        "megatron.core.models.common.language_module.language_module:LanguageModule._is_in_embd_group",
        "megatron.core.transformer.module:Float16Module.forward",
        "megatron.training.models.dist_utils:build_virtual_pipeline_stages",
        "megatron.training.models.gpt:GPTModelBuilder.build_model",
    ),
    "megatron.core.pipeline_parallel.utils.get_pp_last_rank": (f"{_FINALIZE}:finalize_model_grads",),
    f"{_STATE}.is_pipeline_first_stage": (
        f"{_STATE}:is_rank_in_embedding_group",
        "megatron.core.utils:get_batch_on_this_tp_rank",
        f"{_CHECKPOINTING}:maybe_save_dataloader_state",
        "megatron.training.utils.common_utils:is_first_or_last_pipeline_stage",
    ),
    f"{_STATE}.is_pipeline_last_stage": (
        f"{_STATE}:is_rank_in_embedding_group",
        f"{_SCHEDULES}:forward_step_calc_loss",
        "megatron.core.utils:get_batch_on_this_tp_rank",
    ),
    f"{_STATE}.initialize_model_parallel": ("megatron.training.initialize:_initialize_distributed",),
    "megatron.core.optimizer.get_megatron_optimizer": (
        "megatron.core.models.mimo.optimizer:get_mimo_optimizer",
        "megatron.core.optimizer.muon:get_megatron_muon_optimizer",
        f"{_TRAINING}:setup_model_and_optimizer",
    ),
    f"{_FINALIZE}._allreduce_word_embedding_grads": (f"{_FINALIZE}:finalize_model_grads",),
    f"{_TRAINING}.evaluate": (f"{_TRAINING}:evaluate_and_print_results",),
    f"{_LAYOUT}.PipelineParallelLayerLayout.from_str": (
        "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    ),
    f"{_LAYOUT}.PipelineParallelLayerLayout.get_layer_offset": (
        "megatron.core.transformer.transformer_layer:get_transformer_layer_offset",
    ),
    f"{_LAYERS}.{_LINEAR}": (f"{_LAYERS}:linear_with_grad_accumulation_and_async_allreduce",),
    "megatron.core.utils.prepare_input_tensors_for_wgrad_compute": (f"{_LAYERS}:{_LINEAR}.backward",),
    f"{_DDP}.DistributedDataParallel._make_backward_post_hook": (f"{_DDP}:DistributedDataParallel.__init__",),
    "megatron.core.models.hybrid.hybrid_layer_allocation.select_pipeline_segment": (
        "megatron.core.models.hybrid.hybrid_model:HybridModel.__init__",
    ),
}
