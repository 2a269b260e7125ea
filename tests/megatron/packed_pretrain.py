"""The example script on packed sequences: three documents a sequence, and padding behind the last.

`packed_pretrain.py FLAGS...`, without flags of pipelines: a microbatch is a single row of tokens.
"""

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
# Of a sequence of 32 tokens: 3 are padding.
DOCUMENTS, PADDING = (10, 6, 13), 3


def offsets(lengths: tuple[int, ...], *, num_sequences: int) -> torch.Tensor:
    """Where the documents of several equal sequences begin, and where the last one ends."""
    return torch.tensor([0, *lengths * num_sequences]).cumsum(0).to(torch.int32)


def main() -> None:
    """Train."""
    example = runpy.run_path(str(EXAMPLE), run_name="example")
    example["use_installed_dataset_helper"]()

    def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
        tokens, position_ids, _, labels, loss_mask = example["get_batch"](data_iterator, None)
        *first, last = DOCUMENTS
        real = offsets(DOCUMENTS, num_sequences=len(tokens))
        padded = offsets((*first, last + PADDING), num_sequences=len(tokens))
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=real,
            cu_seqlens_kv=real,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=last + PADDING,
            max_seqlen_kv=last + PADDING,
        )
        tokens, position_ids, labels, loss_mask = (
            tensor.reshape(1, -1) for tensor in (tokens, position_ids, labels, loss_mask)
        )
        output = model(
            tokens, position_ids, None, labels=labels, loss_mask=loss_mask, packed_seq_params=packed
        )
        return output, partial(example["loss_func"], loss_mask)

    args = parse_and_validate_args(extra_args_provider=example["set_defaults"])
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, example["datasets_provider"], ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
