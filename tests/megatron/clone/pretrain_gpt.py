"""Pretrains a GPT as the script of a Megatron-LM clone does, on any release from 0.17 on.

It lies beside `megatron/` of the clone, with `gpt_builders.py` and `model_provider.py`, and knows nothing of
quartet_plugin. Every tensor-parallel rank reads its data itself.
"""

import importlib.util
import inspect
from functools import partial
from typing import Any

import torch
from gpt_builders import gpt_builder  # type: ignore[import-not-found]
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import arguments, get_args, pretrain
from megatron.training.utils import is_first_or_last_pipeline_stage
from model_provider import model_provider  # type: ignore[import-not-found]

_FIELDS = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")


def loss_func(mask: torch.Tensor, losses: torch.Tensor) -> tuple[Any, ...]:
    """The summed loss, its number of tokens, and both to report."""
    mask = mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """One chunk's forward of one microbatch."""
    batch: dict[str, Any] = dict.fromkeys(_FIELDS)
    if is_first_or_last_pipeline_stage(get_attr_wrapped_model(model, "vp_stage")):
        sample = next(data_iterator)
        batch = {name: sample[name].cuda() if sample.get(name) is not None else None for name in _FIELDS}
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Train, validation and test datasets, where a stage reads them."""
    args = get_args()
    values = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": None,
        "blend_per_split": None,
        "split": args.split,
        "tokenizer": build_tokenizer(args),
        "reset_position_ids": args.reset_position_ids,
        "reset_attention_mask": args.reset_attention_mask,
        "eod_mask_loss": args.eod_mask_loss,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
    }
    config = GPTDatasetConfig(**values)
    needed = partial(is_first_or_last_pipeline_stage, vp_stage)
    train, valid, test = BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, needed, config).build()
    return train, valid, test


datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    """Parse Megatron's flags and train, as this release wants it."""
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        dataset_utils.compile_helpers = lambda: None
    build = partial(model_provider, gpt_builder)
    common = {"model_type": ModelType.encoder_or_decoder, "forward_step_func": forward_step}
    if "cfg_container" not in inspect.signature(pretrain).parameters:
        pretrain(train_valid_test_dataset_provider=datasets_provider, model_provider=build, **common)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    container = pretrain_cfg_container_from_args(arguments.parse_and_validate_args())
    pretrain(container, datasets_provider, model_provider=build, **common)


if __name__ == "__main__":
    main()
