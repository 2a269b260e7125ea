"""A script that trains a tiny GPT with Megatron-Bridge, as a user would write it: `pretrain_tiny.py [PP]`.

Packages that a CPU does not have are stubs, of which nothing runs: Transformer Engine, kernels, services.
"""

import sys

from stubs import install_stubs  # type: ignore[import-not-found]

install_stubs()

import torch  # noqa: E402
from megatron.bridge.models.gpt_provider import GPTModelProvider  # noqa: E402
from megatron.bridge.training.config import (  # noqa: E402
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TrainingConfig,
)
from megatron.bridge.training.gpt_step import forward_step  # noqa: E402
from megatron.bridge.training.pretrain import pretrain  # noqa: E402
from megatron.bridge.training.tokenizers.config import TokenizerConfig  # noqa: E402

ITERATIONS = 20


def configuration(pipeline_parallel: int) -> ConfigContainer:
    """The configuration of the tiny model."""
    return ConfigContainer(
        model=GPTModelProvider(
            num_layers=6,
            hidden_size=32,
            num_attention_heads=4,
            ffn_hidden_size=128,
            seq_length=32,
            pipeline_model_parallel_size=pipeline_parallel,
            pipeline_dtype=torch.float32,
            attention_dropout=0.0,
            hidden_dropout=0.0,
        ),
        train=TrainingConfig(
            micro_batch_size=2,
            global_batch_size=8,
            train_iters=ITERATIONS,
            eval_interval=100,
            eval_iters=1,
            exit_interval=1000,
        ),
        optimizer=OptimizerConfig(lr=1e-3, min_lr=1e-4, use_distributed_optimizer=False, bf16=False),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=False, overlap_grad_reduce=False, overlap_param_gather=False
        ),
        scheduler=SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=0,
            lr_decay_iters=ITERATIONS,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
        ),
        dataset=MockGPTDatasetConfig(
            random_seed=1,
            seq_length=32,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            dataloader_type="single",
            num_workers=1,
        ),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        checkpoint=CheckpointConfig(save="checkpoints", save_interval=10),
        rng=RNGConfig(seed=1),
    )


if __name__ == "__main__":
    pretrain(configuration(int(sys.argv[1]) if len(sys.argv) > 1 else 1), forward_step)
