"""Pretrains a GPT with Megatron-Core: `torchrun ... examples/pretrain_gpt.py MEGATRON_FLAGS...`.

An ordinary Megatron script that knows nothing of quartet_plugin. The same command trains on GPUs as it is
and, through `torchrun ... -m quartet_plugin.megatron examples/pretrain_gpt.py ...`, with a plan or on a CPU.
Layers of multi-token prediction lie on the last stage, which therefore gets tokens. Packed sequences are left
out; Megatron's own pretrain_gpt.py has them.
"""

import importlib.util
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

_FIELDS = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")


def get_batch(data_iterator: Iterator[dict[str, Any]] | None, vp_stage: int | None) -> list[Any]:
    """The fields of one microbatch that this stage reads, in the order of `_FIELDS`; None for the others."""
    args = get_args()
    if not is_first_or_last_pipeline_stage(vp_stage):
        return [None] * len(_FIELDS)
    batch: dict[str, Any] = {}
    if data_iterator is not None and mpu.get_tensor_model_parallel_rank() == 0:
        sample = next(data_iterator)
        batch = {
            name: sample[name].cuda(non_blocking=True) if sample.get(name) is not None else None
            for name in _FIELDS
        }
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        # The last stage then embeds the next tokens: it gets tokens and labels.
        mtp_on_this_rank=bool(args.mtp_num_layers)
        and mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return [batch[name] for name in _FIELDS]


def loss_func(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Megatron's convention: the summed loss, its number of tokens, and the two side by side to report."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for rejected, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator: Iterator[dict[str, Any]] | None, model: GPTModel) -> tuple[torch.Tensor, Any]:
    """One chunk's forward of one microbatch, and the function that makes a loss of its output."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    tokens, position_ids, attention_mask, labels, loss_mask = get_batch(
        data_iterator, get_attr_wrapped_model(model, "vp_stage")
    )
    timers("batch-generator").stop()
    output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(loss_func, loss_mask)


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Train, validation and test datasets, on the ranks whose stage reads them."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
    )

    def is_read_here() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and bool(is_first_or_last_pipeline_stage(vp_stage))

    dataset = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0(f"> building {dataset.__name__} for training, validation and test")
    train, valid, test = BlendedMegatronDatasetBuilder(dataset, num_samples, is_read_here, config).build()
    return train, valid, test


# Megatron reads this mark: every rank calls the provider, which decides itself where to build.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def set_defaults(parser: ArgumentParser) -> ArgumentParser:
    """Transformer Engine's layers where it is installed, Megatron's own otherwise; a flag still decides."""
    if importlib.util.find_spec("transformer_engine") is None:
        parser.set_defaults(transformer_impl="local")
    return parser


def use_installed_dataset_helper() -> None:
    """Megatron's wheel holds the compiled helper and not the Makefile that would compile it again."""
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        dataset_utils.compile_helpers = lambda: None


def main() -> None:
    """Parse Megatron's flags and train."""
    use_installed_dataset_helper()
    args = parse_and_validate_args(extra_args_provider=set_defaults)
    # Megatron 0.19 recommends a model config over a model_provider function. It is GPTModel's: its successor,
    # HybridModel, takes no --pipeline-model-parallel-layout, and so no uneven split by flag.
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
