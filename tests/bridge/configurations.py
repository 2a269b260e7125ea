"""Stand-ins for Megatron-Bridge's configuration: the fields of release 0.3.1 that the adapter reads or sets.

`test_training.py` has the real ones; to import those takes ten seconds.
"""

from types import SimpleNamespace
from typing import Any


class GPTModelProvider(SimpleNamespace):
    """The model's section; the class's name says what it is a provider of."""


class MambaModelProvider(GPTModelProvider):
    """A model whose layers are unlike each other."""


def make_model(kind: type[GPTModelProvider] = GPTModelProvider, **changes: Any) -> GPTModelProvider:
    """A model of 8 layers, hidden size 256, on 2 pipeline ranks."""
    fields: dict[str, Any] = {
        "num_layers": 8,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_query_groups": None,
        "ffn_hidden_size": None,
        "kv_channels": None,
        "seq_length": 256,
        "vocab_size": 16000,
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 128,
        "gated_linear_unit": False,
        "share_embeddings_and_output_weights": True,
        "position_embedding_type": "learned_absolute",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "sequence_parallel": False,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "microbatch_group_size_per_vp_stage": None,
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_modules": None,
        "distribute_saved_activations": None,
        "overlap_p2p_comm": False,
        "batch_p2p_comm": True,
        "pipeline_dtype": None,
        "params_dtype": "torch.float32",
        "num_moe_experts": None,
        "fp8": None,
        "bf16": False,
        "fp16": False,
    }
    return kind(**{**fields, **changes})


def make_config(model: GPTModelProvider | None = None, **sections: Any) -> SimpleNamespace:
    """A configuration with micro-batch 4 and global batch 32; checkpoints and TensorBoard are on."""
    values: dict[str, Any] = {
        "model": model or make_model(),
        "train": SimpleNamespace(
            micro_batch_size=4,
            global_batch_size=32,
            rampup_batch_size=None,
            train_iters=100,
            eval_iters=10,
            exit_interval=50,
            skip_train=False,
        ),
        "ddp": SimpleNamespace(
            use_distributed_optimizer=False,
            overlap_grad_reduce=False,
            overlap_param_gather=False,
            bucket_size=None,
        ),
        "optimizer": SimpleNamespace(use_distributed_optimizer=False, overlap_param_gather=False),
        "dist": SimpleNamespace(distributed_timeout_minutes=30),
        "checkpoint": SimpleNamespace(save="checkpoints", load=None, pretrained_checkpoint="base"),
        "dataset": SimpleNamespace(dataloader_type="single"),
        "logger": SimpleNamespace(tensorboard_dir="tb", log_progress=False, timing_log_level=0),
        "peft": None,
        "ft": None,
        "mixed_precision": None,
    }
    return SimpleNamespace(**{**values, **sections})
